"""Buckets of gradients on their way: sent where they lie, or as a communication hook says."""

from __future__ import annotations

import math
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.collectives import sparse_all_reduce
from wholestep.comm.api.groups import world
from wholestep.comm.ops.functional_collectives import cores_are_busy
from wholestep.parallel.buckets import LARGE_BYTES, Bucket, GradBucket, bucket_assignment
from wholestep.parallel.comm_hooks.mean import Hook
from wholestep.parallel.equal_models import noted
from wholestep.parallel.logging_data import StepTimes
from wholestep.torch_compat import skipped_by_dynamo

_ELSEWHERE = (
    "DistributedDataParallel: this rank reduces the gradients of {}; others do not, if their step raised an error, "
    "their loss uses other parameters (find_unused_parameters=True) or they have fewer batches (`with model.join():`)"
)


@skipped_by_dynamo
class BucketReduction:
    """The buckets of some parameters' gradients, and how each is reduced.

    Args:
        named: names and parameters, in the module's order.
        group: whose ranks reduce.
        limits: bytes of the first, second, … bucket; the last holds for all further ones.
        as_view: gradients are views of the buckets.
        sparse: indices of parameters whose gradients are sparse.

    Attributes:
        divisor: of the sum over the ranks; None for their number.
        unused: parameters, here, of which the outputs of this forward do not depend.
        error: what the last failure said.
    """

    def __init__(
        self, named: list[tuple[str, torch.nn.Parameter]], group: comm.ProcessGroup, limits: tuple[int, ...],
        as_view: bool, sparse: set[int],
    ) -> None:  # fmt: skip
        self.names = [name for name, _ in named]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        self.group, self.limits, self.as_view, self.sparse = group, limits, as_view, sparse
        self.divisor: int | None = None
        self._mean = f"premul_sum:{1 / group.size()!r}"
        self.hook: tuple[Hook, Any] | None = None
        self.order = list(reversed(range(len(named))))
        self.unused: set[int] = set()
        self.error = ""
        self._overlaps = not cores_are_busy(group.group_name)
        self.times = StepTimes()
        self._fill_buckets()
        self.first_sizes = [bucket.nbytes for bucket in self.buckets]

    def _fill_buckets(self) -> None:
        ordered = [self.parameters[i] for i in self.order]
        assigned, _ = bucket_assignment(ordered, self.limits, [i in self.sparse for i in self.order])
        members = [[self.order[i] for i in bucket] for bucket in assigned]
        in_place = self.hook is None and not self.as_view and self.parameters[0].is_cpu
        large = LARGE_BYTES if in_place else math.inf  # hooks are given all of a bucket in one tensor
        self.buckets = [
            Bucket(own, [self.parameters[i] for i in own], self.group, large, own[0] in self.sparse) for own in members
        ]
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}

    def set_hook(self, hook: Hook, state: Any) -> None:
        """Has ``hook(state, bucket)`` reduce each bucket.

        Raises:
            RuntimeError: some gradients are sparse, which no bucket has.
        """
        if self.sparse:
            raise RuntimeError(
                "register_comm_hook: hooks reduce dense gradients, found sparse ones of "
                f"{', '.join(self.names[i] for i in sorted(self.sparse))}: make these layers with sparse=False"
            )
        self.hook = hook, state
        self._fill_buckets()

    def _send(self, number: int) -> None:
        """Begins to reduce the gradients of a bucket."""
        bucket = self.buckets[number]
        self.times.mark("backward_comm_time_start")
        if bucket.sparse:
            bucket.results = [self._sparse_mean(bucket.parameters[0], bucket.parameters[0].grad)]
            return
        owners = 2 + self._overlaps  # of a gradient's memory: itself, Python, and as long as it goes on the backward
        try:
            memory = bucket.fill(self.as_view, self.unused, owners)
        except RuntimeError as failure:
            sparse = [i for i in bucket.members if (grad := self.parameters[i].grad) is not None and grad.is_sparse]
            if not sparse:
                raise
            raise RuntimeError(
                "DistributedDataParallel: sparse gradients are reduced for nn.Embedding and nn.EmbeddingBag with "
                f"sparse=True, found those of {', '.join(self.names[i] for i in sparse)}: use such a layer, or have "
                "gradients dense (sparse=False)"
            ) from failure
        self._reduce(number, memory)

    def _reduce(self, number: int, memory: list[torch.Tensor]) -> None:
        """Begins to reduce what a bucket sends, in place: each a flat tensor, of which a hook has one."""
        bucket = self.buckets[number]
        if self.hook is None:
            with noted(_ELSEWHERE, [self.names[i] for i in bucket.members[:9]]):
                bucket.under_way = [self._all_reduce(one) for one in memory]
            return
        before = self.buckets[number - 1].under_way
        try:
            if number and not isinstance(before, list):  # torch's PowerSGD sends in callbacks: in no order with two
                before.wait()
            bucket.under_way = self._hooked(self.hook, number, memory[0])
        except Exception as failure:
            self._tell(failure)
            raise

    def _tell(self, failure: Exception) -> None:
        """Tells the other ranks, which wait for what a hook sends over whichever group, why it has failed here."""
        if self.hook is not None and not isinstance(failure, comm.DistError):
            for group in {self.group, *world().groups.values()}:
                group.abort(f"its communication hook has failed with {type(failure).__name__}: {failure}")

    def _hooked(self, given: tuple[Hook, Any], number: int, flat: torch.Tensor) -> torch.futures.Future:
        """What a hook makes of a bucket, whose gradients are in a flat tensor."""
        hook, state = given
        last = number == len(self.buckets) - 1
        future = hook(state, GradBucket(number, last, flat, self.buckets[number].parameters))
        if not hasattr(future, "then"):  # those that C++ makes are of another class
            raise TypeError(f"communication hook: must return a torch.futures.Future, found {type(future).__name__}")
        return future

    def _all_reduce(self, memory: torch.Tensor) -> comm.Work | None:
        if self.divisor is None:
            return comm.all_reduce(memory, self._mean, self.group, async_op=self._overlaps)
        return comm.all_reduce(memory.mul_(1 / self.divisor), group=self.group, async_op=self._overlaps)

    def _sparse_mean(self, parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
        """The mean of the ranks' gradients, some of which may be missing or dense."""
        if grad is None:
            nowhere = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            grad = torch.sparse_coo_tensor(nowhere, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)
        mean = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce() / (self.divisor or self.group.size())
        sparse_all_reduce(mean, group=self.group)
        return mean if grad.is_sparse else mean.to_dense()
