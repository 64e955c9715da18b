"""Post-local SGD: after some steps, gradients are averaged within a host alone, and now and then the weights by all.

Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.object_collectives import gathered_objects
from wholestep.comm.engines.shm_segment import host_identity
from wholestep.parallel.comm_hooks.mean import Group, allreduce_hook, communication_hook, noop_hook


class PostLocalSGDState:
    """What post-local SGD keeps from one backward to the next.

    Args:
        process_group: whose ranks average gradients at first; None for all.
        subgroup: whose ranks do so later; None for those of this host.
        start_localSGD_iter: backwards until then.
        post_local_gradient_allreduce: False: later each rank keeps its own gradients.
    """

    def __init__(
        self, process_group: Group, subgroup: Group, start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:  # fmt: skip
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


@communication_hook
def post_localSGD_hook(state: PostLocalSGDState, bucket: Any) -> torch.futures.Future:
    """Averages over all ranks until ``start_localSGD_iter``, then as the state says; weights are left to averagers."""
    if state.iter < state.start_localSGD_iter:
        state.iter += bucket.is_last()
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    if state.subgroup is None:
        state.subgroup = _ranks_of_this_host(comm.get_group(state.process_group))
    return allreduce_hook(state.subgroup, bucket)


def _ranks_of_this_host(group: comm.ProcessGroup) -> comm.ProcessGroup:
    hosts = gathered_objects(host_identity(), group)
    mine = [label for label, host in zip(group.labels, hosts, strict=True) if host == hosts[group.rank()]]
    made = comm.new_group(mine, use_local_synchronization=True)
    assert made is not None  # this rank is in it
    return made


class PeriodicModelAverager:
    """Averages weights over the ranks every ``period`` steps, after ``warmup_steps``.

    Raises:
        ValueError: a period below 1, or a negative number of steps.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Group = None) -> None:
        if warmup_steps < 0:
            raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")
        if period < 1:
            raise ValueError("Arg ``period`` must be a positive value.")
        self.period, self.warmup_steps, self.step = period, warmup_steps, 0
        self.process_group = comm.get_group(process_group)

    @torch.no_grad()
    def average_parameters(self, params: Iterable[Any]) -> None:
        """Called after each step.

        Args:
            params: parameters, or an optimizer's groups; those without a gradient stay as they are.
        """
        late = self.step - self.warmup_steps
        self.step += 1
        if late < 0 or late % self.period:
            return
        groups = (one["params"] if isinstance(one, dict) else [one] for one in params)
        every = dict.fromkeys(p for group in groups for p in group if p.grad is not None)  # a tied one once
        for dtype in dict.fromkeys(p.dtype for p in every):
            same = [p.detach() for p in every if p.dtype is dtype]
            torch._foreach_div_(same, self.process_group.size())
            comm.all_reduce_coalesced(same, group=self.process_group)
