"""Uneven inputs: ranks that have no more batches take part in what the others go on sending.

The classes and their protocol are those of `torch.distributed.algorithms.join`. A rank whose loop has ended runs the
main hook of each joinable once for each iteration of the others, and the post hook when all ranks have ended theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, NamedTuple

import torch

from wholestep import comm
from wholestep.comm.api.rendezvous import joined_group

WITHOUT_JOIN = (
    "DistributedDataParallel: ranks that have fewer batches leave the others alone: put the loop into "
    "`with model.join():`"
)


class JoinHook:
    """What a joinable does on a rank that has no more batches."""

    def main_hook(self) -> None:
        """Issues the collectives of one iteration of the other ranks."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called when all ranks have ended; ``is_last_joiner``: whether this one was among the last."""


class _JoinConfig(NamedTuple):
    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class Joinable(ABC):
    """What can be trained inside of `Join`; calls `Join.notify_join_context` before an iteration's collectives."""

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = _JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """A hook for one `with Join`, which passes on the keyword arguments that it does not know."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the tensors of the collectives are by which ranks count who has ended."""

    @property
    @abstractmethod
    def join_process_group(self) -> comm.ProcessGroup:
        """Whose ranks count."""


class Join:
    """Context manager of a loop whose number of iterations differs between ranks.

    Args:
        joinables: their hooks are called in this order; all have one process group. One of torch's, as
            `ZeroRedundancyOptimizer` is, may be among them.
        enable: False does nothing.
        throw_on_early_termination: all ranks raise when the first of them has no more batches.
        kwargs: for the joinables' ``join_hook``.

    Raises:
        ValueError: there is no joinable, or several have several groups.
        RuntimeError: on leaving, or in an iteration, with ``throw_on_early_termination``.
    """

    def __init__(
        self, joinables: list[Any], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: Any
    ) -> None:
        if not joinables:
            raise ValueError("The join context manager requires at least one joinable")
        self._joinables, self._enable, self._throws = joinables, enable, throw_on_early_termination
        # who tells the others of each iteration: torch's would do so by the collectives of its own group
        self._first = next((one for one in joinables if isinstance(one, Joinable)), joinables[0])
        self._group, self._device = self._first.join_process_group, self._first.join_device
        if not all(map(self._in_group, joinables)):
            raise ValueError("Using join context manager with multiple process groups")
        self._hooks = [one.join_hook(**kwargs) for one in joinables]

    def _in_group(self, one: Any) -> bool:
        """Whether the ranks of a joinable are those that are counted."""
        group = joined_group(one.join_process_group, self._device.type)
        ranks = [comm.get_process_group_ranks(each) for each in (group, self._group)]
        return group is self._group or (not isinstance(one, Joinable) and ranks[0] == ranks[1])

    def __enter__(self) -> None:
        for one in self._joinables:
            one._join_config = _JoinConfig(self._enable, self._throws, one is self._first)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._enable and kind is None:
                self._follow()
        finally:
            for one in self._joinables:
                one._join_config = _JoinConfig()

    def _follow(self) -> None:
        """Takes part until all ranks have ended."""
        is_last_joiner = True
        while self._sum(0):
            if self._throws:
                self._sum(1)
                raise RuntimeError(f"Rank {self._group.rank()} exhausted all inputs.")
            for hook in self._hooks:
                hook.main_hook()
            is_last_joiner = False
        for hook in self._hooks:
            hook.post_hook(is_last_joiner)

    def _sum(self, mine: float) -> float:
        total = torch.tensor(float(mine), device=self._device)
        comm.all_reduce(total, group=self._group)
        return total.item()

    @staticmethod
    def notify_join_context(joinable: Joinable) -> comm.Work | None:
        """Tells those who have ended that another iteration begins here.

        Returns:
            Of the first joinable an all-reduce under way, whose result is the number of ranks that have not ended; of
            others, and outside of `Join`, None.

        Raises:
            RuntimeError: a rank has ended, and that is an error.
        """
        config = joinable._join_config
        if not (config.enable and config.is_first_joinable):
            return None
        group, device = joinable.join_process_group, joinable.join_device
        work = comm.all_reduce(torch.ones((), device=device), group=group, async_op=True)
        if config.throw_on_early_termination:
            ended = torch.zeros((), device=device)
            comm.all_reduce(ended, group=group)
            if ended.item():
                raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        return work
