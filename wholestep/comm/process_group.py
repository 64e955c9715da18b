"""The group of ranks, what a backend may implement and compare, and what becomes of groups in a fork.

A backend is a subclass of `ProcessGroup` with some of the collective methods, or with `_run`, which they all come to;
a method takes lists of tensors and an `Options`, starts the collective and returns a `Work`. Tensors that reach it are
contiguous.
"""

from __future__ import annotations

import ctypes
import enum
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch

from wholestep.comm import shared_tensors
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.work import All, Work, checked_timeout
from wholestep.errors import DistBackendError, DistMismatchError

DEFAULT_TIMEOUT = timedelta(minutes=30)


alive: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # of this process, and in a fork of its parent


@dataclass
class Options:
    """How one collective is to run.

    Attributes:
        op: the kind of reduction.
        factor: for PREMUL_SUM.
        root: rank *in the group* that sends, or receives.
        timeout: for this collective; None for the group's.
        async_op: False when the caller waits at once, so that a backend may run it in the calling thread.
        tag: of a message.
        out_splits, in_splits: rows of dim 0 from and to each rank, for `alltoall_base`; empty for equal parts.
    """

    op: RedOpType = RedOpType.SUM
    factor: float | torch.Tensor | None = None
    root: int = 0
    timeout: timedelta | None = None
    async_op: bool = False
    tag: int = 0
    out_splits: list[int] = field(default_factory=list)
    in_splits: list[int] = field(default_factory=list)


def description(number: int, op: str, tensor: torch.Tensor | None, opts: Options) -> str:
    """A collective in words, which must be equal on all ranks."""
    words = f"#{number} {op} {opts.op.name} root {opts.root}"
    return words if tensor is None else f"{words} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def part_of(op: str, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose shape all ranks have in common: one rank's part. None where there is none."""
    if op in ("all_to_all", "barrier"):
        return None
    return outs[0] if op in ("scatter", "reduce_scatter") else ins[0]


class ProcessGroup:
    """Ranks that communicate. ``rank`` and ``size`` are within the group.

    Attributes:
        group_name: by which programs and errors know it.
        labels: what errors call each rank: its number in the world.
        timeout: for each collective.
        sequence: collectives started.
        in_profiles: whether the backend has profilers see its collectives by itself.
    """

    group_name: str = ""
    backend_name: str = ""
    timeout: timedelta = DEFAULT_TIMEOUT
    sequence: int = 0
    in_profiles = False
    ends_with_fork = True  # a forked process cannot use it

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        alive.add(self)
        self.labels: Sequence[int] = range(size)

    def name_parts(self, name: str, labels: Sequence[int]) -> None:
        """Gives the group, and groups that it is made of, the name and the ranks' numbers in the world."""
        self.group_name, self.labels = name, labels

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return self.getBackendName()

    def getBackendName(self) -> str:
        return self.backend_name or type(self).__name__

    def _get_sequence_number_for_group(self) -> int:
        """Collectives that this rank has started in this group."""
        return self.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out of the collectives from here on."""
        self.timeout = checked_timeout(timeout)

    def shutdown(self) -> None:
        """Frees what the group holds. Called once by `destroy_process_group`."""

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks because this one cannot go on: the others' collectives raise `DistRankError`.

        A backend that cannot tell the others leaves them to their time-out.

        Args:
            reason: what went wrong here; the others' errors have it.
        """

    def __repr__(self) -> str:
        return f"<{self.name()} group {self.group_name!r}: rank {self._rank} of {self._size}>"

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        """Starts a collective: what the backends of this package implement in place of the methods below.

        Args:
            outs: what this rank gets: one tensor, one from each rank, or none where only the root gets something.
            ins: what it gives: one tensor (those of ``outs`` where it works in place), one for each rank, or none.
        """
        raise DistBackendError(f"backend {self.name()} does not implement {op}")

    def _run_each(self, op: str, tensors: list[torch.Tensor], opts: Options | None) -> Work:
        works = [self._run(op, [tensor], [tensor], opts or Options()) for tensor in tensors]
        return works[0] if len(works) == 1 else All(works, tensors)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run_each("all_reduce", tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run_each("reduce", tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run_each("broadcast", tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run("all_gather", outputs[0], inputs, opts or Options())

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Rank r's ``input`` [n, …] lands in rows r*n to (r+1)*n of ``output`` [size*n, …]."""
        return self.allgather([list(output.view(self._size, *input.shape))], [input], opts)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self._run("reduce_scatter", outputs, inputs[0], opts or Options())

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """``output`` [n, …] is the reduction of rows rank*n to (rank+1)*n of every rank's ``input`` [size*n, …]."""
        return self.reduce_scatter([output], [list(input.view(self._size, *output.shape))], opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run("gather", outputs[0] if outputs else [], inputs, opts or Options())

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self._run("scatter", outputs, inputs[0] if inputs else [], opts or Options())

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._run("all_to_all", outputs, inputs, opts or Options())

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = opts or Options()
        return self.alltoall(self.rows(output, opts.out_splits), self.rows(input, opts.in_splits), opts)

    def rows(self, tensor: torch.Tensor, splits: list[int]) -> list[torch.Tensor]:
        """The rows that belong to each rank; equal parts without ``splits``."""
        return list(tensor.split(splits or [len(tensor) // self._size] * self._size))

    def barrier(self, opts: Any = None) -> Work:
        return self._run("barrier", [], [], opts or Options())

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return self._run("send", [], tensors, Options(root=dst))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        return self._run("recv", tensors, [], Options(root=src))


_LENGTH = 160  # bytes of a description that are compared


def in_bytes(text: str) -> torch.Tensor:
    """A description as ranks show it."""
    return torch.frombuffer(bytearray(text.encode()[:_LENGTH].ljust(_LENGTH)), dtype=torch.uint8)


def in_words(shown: torch.Tensor) -> str:
    """The description that a rank shows."""
    return shown.numpy().tobytes().decode(errors="replace").strip()


def require_equal(group: ProcessGroup, said: Sequence[str]) -> None:
    """Compares what the ranks of a group are about to call.

    Raises:
        DistMismatchError: a rank calls something else than this one.
    """
    me = group.rank()
    for rank, theirs in enumerate(said):
        if theirs != said[me]:
            raise DistMismatchError(
                f"group {group.group_name!r}: the ranks disagree: rank {group.labels[me]} calls {said[me]}; "
                f"rank {group.labels[rank]} calls {theirs}"
            )


class ForkedGroup(ProcessGroup):
    """A group in a process that was forked from one of its ranks. It tells ranks, and ends without a word."""

    def _live(self, what: str) -> NoReturn:
        raise DistBackendError(
            f"{what}: this process was forked from rank {self.labels[self._rank]} of group {self.group_name!r} and is "
            "no rank of it: start it by spawn or forkserver, or call destroy_process_group and init_process_group "
            "here, for a group of its own"
        )

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        self._live(op)

    def _get_sequence_number_for_group(self) -> int:
        self._live("a collective")  # where each begins, before the flight recorder notes it


def _in_child() -> None:
    shared_tensors.native.after_fork()
    shared_tensors.renew_pool()
    for group in list(alive):
        if group.ends_with_fork:
            engine = vars(group).get("_engine")
            if engine is not None:  # its destructor would wait for threads that only the parent has
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
            vars(group)["_handle"] = 0
            group.__class__ = ForkedGroup


os.register_at_fork(after_in_child=_in_child)


VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(enum.Enum):
    """OFF; INFO: notes where groups are made; DETAIL: every backend compares all ranks' calls before one goes on."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level = DebugLevel.OFF


def set_debug_level_from_env() -> None:
    """Takes the level from TORCH_DISTRIBUTED_DEBUG: OFF (also when unset), INFO or DETAIL, in any case.

    Raises:
        ValueError: another value.
    """
    value = os.environ.get(VARIABLE, "OFF")
    if value.upper() not in DebugLevel.__members__:
        raise ValueError(f"The value of {VARIABLE} must be OFF, INFO or DETAIL, found {value!r}")
    set_debug_level(DebugLevel[value.upper()])


def set_debug_level(level: DebugLevel) -> None:
    """Sets the level for groups made from here on."""
    global _level
    _level = level


def get_debug_level() -> DebugLevel:
    """The level in force."""
    return _level
