"""The group of ranks, and what a backend may implement.

A backend is a subclass of `ProcessGroup` with some of the collective methods; a method takes lists of
tensors and an `Options`, starts the collective and returns a `Work`. Tensors that reach it are contiguous.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.dist_errors import DistBackendError
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.work import Work

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
        out_splits, in_splits: rows of dim 0 from and to each rank, for `alltoall_base`; empty for equal parts.
    """

    op: RedOpType = RedOpType.SUM
    factor: float | torch.Tensor | None = None
    root: int = 0
    timeout: timedelta | None = None
    async_op: bool = False
    out_splits: list[int] = field(default_factory=list)
    in_splits: list[int] = field(default_factory=list)


class ProcessGroup:
    """Ranks that communicate. ``rank`` and ``size`` are within the group.

    Attributes:
        group_name: by which programs and errors know it.
        labels: what errors call each rank: its number in the world.
        timeout: for each collective.
        sequence: collectives started.
    """

    group_name: str = ""
    backend_name: str = ""
    timeout: timedelta = DEFAULT_TIMEOUT
    sequence: int = 0
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
        self.timeout = timeout

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

    def _missing(self, what: str) -> Work:
        raise DistBackendError(f"backend {self.name()} does not implement {what}")

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._missing("all_reduce")

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._missing("reduce")

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._missing("broadcast")

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._missing("all_gather")

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Rank r's ``input`` [n, …] lands in rows r*n to (r+1)*n of ``output`` [size*n, …]."""
        return self.allgather([list(output.view(self._size, *input.shape))], [input], opts)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self._missing("reduce_scatter")

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """``output`` [n, …] is the reduction of rows rank*n to (rank+1)*n of every rank's ``input`` [size*n, …]."""
        return self.reduce_scatter([output], [list(input.view(self._size, *output.shape))], opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._missing("gather")

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self._missing("scatter")

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._missing("all_to_all")

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._missing("all_to_all_single")

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return self._missing("send")

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        return self._missing("recv")

    def barrier(self, opts: Any = None) -> Work:
        return self._missing("barrier")
