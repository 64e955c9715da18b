"""Reduces gradients over the ranks, a bucket at a time, while the backward that computes them goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from wholestep import comm
from wholestep.parallel.buckets import Bucket, GradBucket, bucket_assignment
from wholestep.parallel.comm_hooks.ordered import Hook
from wholestep.parallel.outputs import nodes_behind
from wholestep.torch_compat import at_end_of_backward


class GradientReducer:
    """Buckets of the gradients of some parameters, and their all-reduce.

    A hook on each parameter's autograd node puts its gradient into its bucket; full buckets are sent in their order,
    and what came back is put into the gradients when the backward ends.

    Args:
        named: names and parameters, in the module's order.
        group: whose ranks reduce.
        limits: bytes of the first and of all other buckets.
        as_view: gradients are views of the buckets.
        find_unused: parameters that an output does not depend on take part with zeros.
        static: each backward takes the same way: what the first one uses, and how often, holds for all.
    """

    def __init__(
        self, named: list[tuple[str, torch.nn.Parameter]], group: comm.ProcessGroup, limits: tuple[int, int],
        as_view: bool, find_unused: bool, static: bool,
    ) -> None:  # fmt: skip
        self.names = [name for name, _ in named]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        self.group, self.as_view, self.static = group, as_view, static
        self.find_unused = find_unused and not static
        self.divisor = group.size()
        self.hook: tuple[Hook, Any] | None = None
        self.order = list(reversed(range(len(named))))
        self.rebuilt = False
        self.limits = limits
        self._shared = comm.get_backend(group) == "shm"
        self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in self.parameters]
        for index, node in enumerate(self._nodes):
            node.register_hook(_weak_hook(weakref.ref(self), index))
        self._expecting = self._begun = False
        self._arrived: list[int] = []
        self._unused: set[int] = set()  # here, of which the outputs of this forward do not depend
        self._untouched: set[int] = set()  # on all ranks, by the backward
        self._triggers: list[int] | None = None  # of a static graph: how often each hook is called in a backward
        self._used = torch.zeros(len(named), dtype=torch.int32, device=self.parameters[0].device)
        self._remaining = [1] * len(named)
        self._fill_buckets()

    def _fill_buckets(self) -> None:
        ordered = [self.parameters[i] for i in self.order]
        assigned, _ = bucket_assignment(ordered, self.limits)
        members = [[self.order[i] for i in bucket] for bucket in assigned]
        self.buckets = [Bucket(own, [self.parameters[i] for i in own], self._shared) for own in members]
        self._place = {i: (bucket, k) for bucket in self.buckets for k, i in enumerate(bucket.members)}
        self._next = 0

    def rebuild(self) -> None:
        """After the first backward: buckets in the order in which rank 0's gradients came."""
        if self.rebuilt or self.find_unused or len(self._arrived) < len(self.parameters):
            return
        order = torch.tensor(self._arrived, device=self._used.device)
        comm.broadcast(order, group=self.group, group_src=0)
        self.order, self.rebuilt = order.tolist(), True
        self._fill_buckets()

    def prepare(self, outputs: Any) -> None:
        """Awaits a backward from these outputs of a forward.

        Raises:
            RuntimeError: the last backward has left parameters without a gradient.
        """
        if self._begun:
            raise RuntimeError(self._unfinished())
        self._expecting, self._next = True, 0
        self._remaining = list(self._triggers) if self._triggers is not None else [1] * len(self.parameters)
        for bucket in self.buckets:
            bucket.pending = len(bucket.members)
        if self.find_unused:
            reached = nodes_behind(outputs)
            self._unused = {i for i, node in enumerate(self._nodes) if node not in reached}

    def _unfinished(self) -> str:
        missing = [name for i, name in enumerate(self.names) if self._remaining[i]]
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            f"Parameters which did not receive grad for rank {self.group.labels[self.group.rank()]}: "
            f"{', '.join(missing)} (indices {[i for i, left in enumerate(self._remaining) if left]}). "
            "Each parameter must take part in producing the loss; to do: pass find_unused_parameters=True to "
            "DistributedDataParallel, use all outputs of its forward in the loss, or set requires_grad to False"
        )

    def backward_begun(self) -> None:
        """The outputs' gradients are there. A static graph's first backward reduces at its end what it has found."""
        if self._expecting and self.static and self._triggers is None:
            self._remaining = [0] * len(self.parameters)
            at_end_of_backward(self._end_of_first)

    def gradient_arrived(self, index: int) -> None:
        """The autograd node that accumulates a parameter's gradient has run."""
        if not self._expecting:
            return
        learning = self.static and self._triggers is None
        if not self._begun and not learning:
            self._begun = True
            for unused in self._unused:
                self._ready(unused)
        if (learning or self.find_unused) and self.parameters[index].grad is not None:
            self._used[index] = 1
        if not (self.rebuilt or self.find_unused or (learning and self._remaining[index])):
            self._arrived.append(index)
        if learning:
            self._remaining[index] += 1
            return
        self._ready(index)

    def _ready(self, index: int) -> None:
        """One of a parameter's gradients is there: the last one goes into the bucket.

        Raises:
            RuntimeError: it was there already.
        """
        self._remaining[index] -= 1
        if self._remaining[index] > 0:
            return
        if self._remaining[index] < 0:
            raise RuntimeError(
                f"Expected to mark a variable ready only once. Parameter {self.names[index]} (index {index}) was "
                "marked ready more than once in one backward: it is used outside of the forward, or by several "
                "reentrant checkpoints; to do: pass static_graph=True if each iteration takes the same way, use "
                "torch.utils.checkpoint with use_reentrant=False, or do not call forward between backwards"
            )
        bucket, k = self._place[index]
        self._fill(self.parameters[index], bucket.views[k])
        bucket.pending -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._send(self._next)
            self._next += 1
            if self._next == len(self.buckets) and self._begun:
                at_end_of_backward(self._finish)

    @torch.no_grad()
    def _fill(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Puts a gradient into its bucket, divided by the number of ranks unless a hook does that."""
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad is view:
            if self.hook is None:
                view.div_(self.divisor)
        else:
            if self.hook is None:
                torch.mul(grad.detach(), 1.0 / self.divisor, out=view)
            else:
                view.copy_(grad)
            if self.as_view:
                parameter.grad = view

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        if self.hook is None:
            bucket.under_way = comm.all_reduce(bucket.flat, group=self.group, async_op=True)
            return
        hook, state = self.hook
        given = GradBucket(number, number == len(self.buckets) - 1, bucket.flat, bucket.parameters)
        future = hook(state, given)
        if not hasattr(future, "then"):  # those that C++ makes are of another class
            raise TypeError(f"communication hook: must return a torch.futures.Future, found {type(future).__name__}")
        bucket.under_way = future

    def _end_of_first(self) -> None:
        """Ends the first backward of a static graph."""
        self._triggers = self._remaining
        self._unused = {i for i, count in enumerate(self._triggers) if not count}
        self._arrived += sorted(self._unused)
        self._triggers = [max(1, count) for count in self._triggers]
        self._remaining = [1] * len(self.parameters)
        for index in range(len(self.parameters)):
            self._ready(index)
        self._finish(learns=True)

    @torch.no_grad()
    def _finish(self, learns: bool = False) -> None:
        """Ends a backward: waits for all buckets and gives the parameters their gradients."""
        self._expecting = self._begun = False
        reduced = [bucket.reduced() for bucket in self.buckets]
        if self.find_unused or learns:
            comm.all_reduce(self._used, group=self.group)
            self._untouched = {i for i, used in enumerate(self._used.tolist()) if not used}
            self._used.zero_()
        for bucket, grads in zip(self.buckets, reduced, strict=True):
            self._give(bucket, grads)

    def _give(self, bucket: Bucket, reduced: list[torch.Tensor]) -> None:
        targets, sources = [], []
        for k, index in enumerate(bucket.members):
            parameter, new = self.parameters[index], reduced[k]
            if index in self._untouched:  # by all ranks: keeps what it has
                continue
            if self.as_view:
                if new is not bucket.views[k]:
                    bucket.views[k].copy_(new)
                if parameter.grad is not bucket.views[k]:
                    parameter.grad = bucket.views[k]
            elif parameter.grad is None:
                parameter.grad = new.clone()
            else:
                targets.append(parameter.grad)
                sources.append(new)
        if targets:
            torch._foreach_copy_(targets, sources)


def _weak_hook(reducer: weakref.ref[GradientReducer], index: int) -> Callable[..., None]:
    """Does not keep the reducer, which keeps the node that has the hook."""

    def hook(*_: Any) -> None:
        found = reducer()
        if found is not None:
            found.gradient_arrived(index)

    return hook
