"""The codes of native/shm.h for operations, reductions, dtypes and outcomes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

from wholestep.comm.reduce_op import RedOpType

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


def sequence_of(desc: bytes) -> int:
    """The number of a described collective in its group."""
    return int(struct.unpack_from("<Q", desc, 24)[0])


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
