"""The codes of native/shm.h for operations, reductions, dtypes and outcomes, and the errors that outcomes stand for."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

from wholestep.comm import flight_recorder
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.shared_tensors import native, no_room
from wholestep.errors import DistBackendError, DistError, DistMismatchError, DistRankError, DistTimeoutError

OPS = ["barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"]
OPS += ["all_to_all", "send", "recv"]
BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL, SEND, RECV = range(11)
_KINDS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]
REDUCTIONS = {RedOpType[name]: code for code, name in enumerate(_KINDS)} | {RedOpType.PREMUL_SUM: 0}
MEAN = 8  # PREMUL_SUM of floats by 1 / ranks
NUMBERS = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"]
NUMBERS += ["uint16", "uint32", "uint64"]
_OTHERS = ["bool", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2"]
DTYPES = {getattr(torch, name): code for code, name in enumerate(NUMBERS + _OTHERS)}
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPES.items()}
TIMEOUT, DIED, MISMATCH, ABORTED, MEMORY = 1, 2, 3, 4, 5
UNKNOWN = 255


_EXACT = 1 << 63


@lru_cache(maxsize=1024)
def shape_code(shape: tuple[int, ...]) -> int:
    """A shape in 64 bits: itself, each size after its length in bits, or a hash where that does not fit."""
    code, at = len(shape), 3
    for size in shape:
        code |= (size.bit_length() | size << 6) << at
        at += 6 + size.bit_length()
    return _EXACT | code if at <= 63 and len(shape) < 8 else hash(tuple(shape)) & _EXACT - 1


def _shape(code: int, nbytes: int) -> str:
    if not code & _EXACT:
        return f"{nbytes} bytes of shape {code % 0x10000:04x}…"
    count, code, sizes = code & 7, (code & _EXACT - 1) >> 3, []
    for _ in range(count):
        bits = code & 63
        sizes.append(code >> 6 & (1 << bits) - 1)
        code >>= 6 + bits
    return str(sizes)


def disagreement(mine: bytes, theirs: bytes, me: str, other: str, labels: Sequence[int]) -> str:
    """What two ranks' descriptions differ in.

    Args:
        me, other: names of the ranks.
        labels: names of all ranks of the group.
    """
    op, _, _, _, root, wanted, sent, seq = struct.unpack("<BBBBIQQQ", theirs)
    if op == ALL_TO_ALL and root >> 31:  # alltoall_agree in native/move.c
        sender, receiver = labels[root >> 8 & 0xFF], labels[root & 0xFF]
        return f"in #{seq} all_to_all rank {sender} sends {sent} bytes to rank {receiver}, which expects {wanted}"
    return f"{me} calls {describe(mine)}; {other} calls {describe(theirs)}"


def describe(desc: bytes) -> str:
    """A rank's description of a collective, in words."""
    op, dtype, red, _, root, size, shape, seq = struct.unpack("<BBBBIQQQ", desc)
    if seq == 0 and size == 0 and op == 0:
        return "no collective yet"
    words = [f"#{seq} {OPS[op]}"]
    if op in (ALL_REDUCE, REDUCE, REDUCE_SCATTER):
        names = (kind.name for kind, code in REDUCTIONS.items() if code == red and kind.name != "PREMUL_SUM")
        words.append("PREMUL_SUM" if red == MEAN else "/".join(names))
    if op in (REDUCE, BROADCAST, GATHER, SCATTER):
        words.append(f"root {root}")
    if op != BARRIER:
        words.append(f"{_NAMES.get(dtype, 'dtype?')} {'rows of ' * (op == ALL_TO_ALL)}{_shape(shape, size)}")
    return " ".join(words)


MESSAGE_BYTES = 1 << 20  # that a rank's messages to another one need, about
Outcome = tuple[int, int, bytes, bytes, int]  # status, the rank at fault, what both describe, whether it came late


def collective_error(group: ProcessGroup, outcome: Outcome, handle: int, limit: float) -> DistError:
    """Why a collective failed.

    Args:
        handle: of the group; 0 when it has ended.
        limit: seconds that were waited.
    """
    status, culprit, mine, theirs, late = outcome
    me, other = f"rank {group.labels[group.rank()]}", f"rank {group.labels[culprit]}"
    here, there = describe(mine), describe(theirs)
    name = f"group {group.group_name!r}"
    if status == MISMATCH:
        what = disagreement(mine, theirs, me, other, group.labels)
        gone_on = f"; {me} had gone on from {_place(group, mine)}" if late else ""
        return DistMismatchError(f"{name}: the ranks disagree: {what}{gone_on}")
    if status == DIED:
        return DistRankError(
            f"{name}: {other} has exited or was killed; {me} waits in {here}; it last stood at {there}"
        )
    if status == TIMEOUT:
        waited = f"{me} waited {limit:g} s in {here} for {other}, which last stood at {there}"
        return DistTimeoutError(f"{name}: Timed out as {waited}")
    if status == ABORTED and not handle:
        return DistBackendError(f"{name}: {me} destroyed the group while it waited in {here}")
    reason = native.reason(handle, culprit).decode(errors="replace") if status == ABORTED else ""
    if reason:
        return DistRankError(f"{name}: {other} cannot go on: {reason}; {me} is in {here}")
    if status == MEMORY:
        return DistBackendError(f"{name}: {me} cannot read the memory of {other} in {here}")
    return DistBackendError(f"{name}: {other} has left the group, or the group has failed before; {me} is in {here}")


def _place(group: ProcessGroup, mine: bytes) -> str:
    """An earlier collective: its number, and the user's line while the flight recorder has it."""
    seq = int(struct.unpack_from("<Q", mine, 24)[0])
    where = flight_recorder.place(group.group_name, seq)
    return f"#{seq}, which {where} called" if where else f"#{seq}"


def message_error(
    group: ProcessGroup, op: int, peer: int, status: int, received: int, tensor: torch.Tensor, limit: float
) -> DistError:
    """Why a message to or from ``peer`` (-1: any) ended with ``status`` after ``received`` bytes."""
    other = "" if peer < 0 else f" {'to' if op == SEND else 'from'} rank {group.labels[peer]}"
    here = f"rank {group.labels[group.rank()]} of group {group.group_name!r}: {OPS[op]}{other}"
    if status == TIMEOUT:
        return DistTimeoutError(f"{here} did not end within {limit:g} s")
    if status == DIED:
        return DistRankError(f"{here}: rank {group.labels[peer]} has exited or was killed")
    if status == MISMATCH:
        return DistMismatchError(f"{here}: {tensor.nbytes} bytes are required, {received} were sent")
    if status == ABORTED:
        return DistBackendError(f"{here}: the group was destroyed")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return no_room(MESSAGE_BYTES, f"{here}: messages between two ranks", full)
