"""Error messages of the compiled engine: what failed, on which rank, and the last collective of each."""

from __future__ import annotations

import errno
import os

import torch

from wholestep.comm.diagnostics import flight_recorder
from wholestep.comm.engines import native_codes as codes
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.shared_tensors import native, no_room
from wholestep.errors import DistBackendError, DistError, DistMismatchError, DistRankError, DistTimeoutError

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
    here, there = codes.describe(mine), codes.describe(theirs)
    name = f"group {group.group_name!r}"
    if status == codes.MISMATCH:
        what = codes.disagreement(mine, theirs, me, other, group.labels)
        gone_on = f"; {me} had gone on from {_place(group, mine)}" if late else ""
        return DistMismatchError(f"{name}: the ranks disagree: {what}{gone_on}")
    if status == codes.DIED:
        return DistRankError(
            f"{name}: {other} has exited or was killed; {me} waits in {here}; it last stood at {there}"
        )
    if status == codes.TIMEOUT:
        return DistTimeoutError(f"{name}: {me} waited {limit:g} s in {here} for {other}, which last stood at {there}")
    if status == codes.ABORTED and not handle:
        return DistBackendError(f"{name}: {me} destroyed the group while it waited in {here}")
    reason = native.reason(handle, culprit).decode(errors="replace") if status == codes.ABORTED else ""
    if reason:
        return DistRankError(f"{name}: {other} cannot go on: {reason}; {me} is in {here}")
    if status == codes.MEMORY:
        return DistBackendError(f"{name}: {me} cannot read the memory of {other} in {here}")
    return DistBackendError(f"{name}: {other} has left the group, or the group has failed before; {me} is in {here}")


def _place(group: ProcessGroup, mine: bytes) -> str:
    """An earlier collective: its number, and the user's line while the flight recorder has it."""
    seq = codes.sequence_of(mine)
    where = flight_recorder.place(group.group_name, seq)
    return f"#{seq}, which {where} called" if where else f"#{seq}"


def message_error(
    group: ProcessGroup, op: int, peer: int, status: int, received: int, tensor: torch.Tensor, limit: float
) -> DistError:
    """Why a message to or from ``peer`` (-1: any) ended with ``status`` after ``received`` bytes."""
    other = "" if peer < 0 else f" {'to' if op == codes.SEND else 'from'} rank {group.labels[peer]}"
    here = f"rank {group.labels[group.rank()]} of group {group.group_name!r}: {codes.OPS[op]}{other}"
    if status == codes.TIMEOUT:
        return DistTimeoutError(f"{here} did not end within {limit:g} s")
    if status == codes.DIED:
        return DistRankError(f"{here}: rank {group.labels[peer]} has exited or was killed")
    if status == codes.MISMATCH:
        return DistMismatchError(f"{here}: {tensor.nbytes} bytes are required, {received} were sent")
    if status == codes.ABORTED:
        return DistBackendError(f"{here}: the group was destroyed")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return no_room(MESSAGE_BYTES, f"{here}: messages between two ranks", full)
