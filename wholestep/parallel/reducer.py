"""Reduces gradients over the ranks, a bucket at a time, while the backward that computes them goes on."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.tracing import is_captured
from wholestep.errors import UnsupportedError
from wholestep.marks import want_mean
from wholestep.parallel.bucket_reduction import BucketReduction
from wholestep.parallel.buckets import flat_as, views_of
from wholestep.parallel.comm_hooks.mean import value_of
from wholestep.parallel.equal_models import noted
from wholestep.parallel.join import WITHOUT_JOIN
from wholestep.parallel.outputs import nodes_of
from wholestep.torch_compat import at_end_of_backward, backward_reaches, behind, skipped_by_dynamo

IN_BACKWARD = "_in_backward_optimizers"  # torch's attribute of a parameter


@skipped_by_dynamo
class GradientReducer(BucketReduction):
    """Has buckets reduced as their gradients come.

    A hook on each parameter's autograd node puts its gradient into its bucket; full buckets are sent in their order,
    and what came back is put into the gradients when the backward ends.

    Args:
        named, group, limits, as_view, sparse: as for `BucketReduction`.
        find_unused: parameters that an output does not depend on take part with zeros.
        static: each backward takes the same way: what the first one uses, and how often, holds for all.

    Attributes:
        backward: what a captured step sees and a replay sets: whether a backward is ``expected`` to reduce, and what
            that has ``arrived`` of the one that is captured: indices of parameters; with a hook, the ``order`` in which
            the first one's came, by which the next capture fills its buckets.
    """

    def __init__(
        self, named: list[tuple[str, torch.nn.Parameter]], group: comm.ProcessGroup, limits: tuple[int, ...],
        as_view: bool, find_unused: bool, static: bool, sparse: set[int],
    ) -> None:  # fmt: skip
        super().__init__(named, group, limits, as_view, sparse)
        self.static, self.find_unused, self.rebuilt = static, find_unused and not static, False
        self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in self.parameters]
        self._index = {id(one): index for index, one in enumerate(self.parameters)}
        self._noted: list[int] = []  # parameters whose gradients have come, while hooks do no more than say so
        for index, node in enumerate(self._nodes):
            node.register_hook(_weak_hook(weakref.ref(self), self._noted, index))
        self._begun, self.backward = False, SimpleNamespace(expected=False, arrived=[], order=())
        self._arrived: list[int] = []  # in the first backward
        self._roots: list[weakref.ref[Any]] | None = None  # nodes of outputs whose unused parameters are to be found
        self._untouched: set[int] = set()  # on all ranks, by the backward
        self._triggers: list[int] | None = None  # of a static graph: how often each hook is called in a backward
        self._used: set[int] = set()  # on this rank, since the last reduction
        self._reset()

    def _reset(self) -> None:
        """All gradients of a backward are still to come."""
        self._next, self._running = 0, False
        self._noted.clear()
        self._remaining = list(self._triggers) if self._triggers is not None else [1] * len(self.parameters)
        for bucket in self.buckets:
            bucket.pending = len(bucket.members)

    def _rebuild(self) -> None:
        """The first backward has ended: buckets in the order in which rank 0's gradients came."""
        if self.rebuilt or self.find_unused or len(self._arrived) < len(self.parameters):
            return
        order = torch.tensor(self._arrived, device=self.parameters[0].device)
        comm.broadcast(order, group=self.group, group_src=0)
        self.order, self.rebuilt = order.tolist(), True
        self._fill_buckets()

    def prepare(self, outputs: Any, joined: bool = False) -> None:
        """Awaits a backward from these outputs of a forward.

        Args:
            joined: whether they are results of one node, so that what they do not lead to can be found when the
                backward begins; where it reaches all parameters, they do.

        Raises:
            RuntimeError: the last backward has left parameters without a gradient.
        """
        if self._begun or self.backward.arrived:
            raise self._failure(self._unfinished())
        self.backward.expected = True
        early = [] if self.times.iterations else [one for one in self.parameters if hasattr(one, IN_BACKWARD)]
        if early:
            raise UnsupportedError(
                "DistributedDataParallel with optimizers that step in the backward, by this rank's own gradients",
                remedy="call optimizer.step() after the backward",
            )
        if is_captured():
            if self.find_unused:
                raise UnsupportedError(
                    "DistributedDataParallel with find_unused_parameters=True, which asks the ranks at each call",
                    remedy="compile without fullgraph=True; if a forward uses all parameters, it needs no such search",
                )
            return
        self._reset()
        self._roots = None
        if self.find_unused and joined:
            self._roots = [weakref.ref(node) for node in nodes_of(outputs)]
        elif self.find_unused:
            self.unused = self._unreached(nodes_of(outputs))

    def _unreached(self, roots: Iterable[Any]) -> set[int]:
        reached = {*behind(roots)}
        return {i for i, node in enumerate(self._nodes) if node not in reached}

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the reducer's."""
        return id(parameter) in self._index

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the reducer's, and its autograd node is still the one that has the hook."""
        index = self._index.get(id(parameter))
        return index is not None and torch.autograd.graph.get_gradient_edge(parameter).node is self._nodes[index]

    def require_reduced(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compares parameters with those that the module had when it was wrapped.

        Raises:
            RuntimeError: some learn from the gradients of this rank alone.
        """
        others = [name for name, one in named if one.requires_grad and not self.reduces(one)]
        if others:
            raise self._failure(
                f"DistributedDataParallel: gradients of {', '.join(others)} are not reduced: when the module was "
                "wrapped, these were frozen, of another dtype or device, or not there; to do: wrap it again after such "
                "a change, as load_state_dict(assign=True) is one"
            )

    def _failure(self, words: str) -> RuntimeError:
        self.error = words
        return RuntimeError(words)

    def _unfinished(self) -> str:
        left = {i for i, count in enumerate(self._remaining) if count} - {*self.backward.arrived, *self._noted}
        missing = [self.names[i] for i in sorted(left)]
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            f"Parameters which did not receive grad for rank {self.group.labels[self.group.rank()]}: "
            f"{', '.join(missing)} (indices {sorted(left)}). "
            "Each parameter must take part in producing the loss; to do: pass find_unused_parameters=True to "
            "DistributedDataParallel, use all outputs of its forward in the loss, or set requires_grad to False"
        )

    @property
    def _learns(self) -> bool:
        """Whether the next backward of a static graph shows which parameters are used, and how often."""
        return self.static and self._triggers is None

    def backward_begun(self) -> None:
        """The outputs' gradients are there, or the first one of a parameter."""
        if not self.backward.expected or self._running:
            return
        reached = [*map(backward_reaches, self._nodes)]
        if not any(reached):  # torch.autograd.grad, which gives no parameter a gradient
            return
        if self._roots is not None:
            roots, self._roots = [node for node in (root() for root in self._roots) if node is not None], None
            self.unused = set() if all(reached) else self._unreached(roots)
            self.require_reduced((self.names[i], self.parameters[i]) for i in self.unused)
        self._running = True
        at_end_of_backward(self._backward_ended)
        if not self._begun and not self._learns:
            self._begun = True
            self.times.mark("backward_compute_time_start")
            self._count(sorted(self.unused))

    def gradient_arrived(self, index: int) -> None:
        """The autograd node that accumulates a parameter's gradient has run."""
        if not self._running:
            if not self.backward.expected:
                if (self.find_unused or self._learns) and not is_captured():
                    self._used.add(index)  # accumulated here within no_sync, to be reduced by the next backward
                return
            if is_captured():
                self._record(index)
                return
            self.backward_begun()
        if not self._overlaps or self._learns:
            self._noted.append(index)
        elif self.rebuilt:
            self._count([index])
        else:
            self._arrive([index])

    def _backward_ended(self) -> None:
        """Counts what came in this backward, and ends the reduction, if that was all."""
        came, self._running = [*self._noted], False
        self._noted.clear()
        learns = self._learns
        if learns:
            often = Counter(came)
            self.unused = {*range(len(self.parameters))} - often.keys()
            self._arrive([*often])
            self._arrived += sorted(self.unused)
            self._count(sorted(self.unused))
            self._triggers = [max(1, often[i]) for i in range(len(self.parameters))]
        elif self.rebuilt and self._triggers is None and len(came) == len({*came}) == len(self.parameters):
            self._next = len(self.buckets)  # all gradients, and each of them once, as mostly
        else:
            self._arrive(came)
        if self._next == len(self.buckets):
            self._finish(learns)

    def _arrive(self, indices: list[int]) -> None:
        """Gradients are there. Keeps what is learnt from that: that they are used, and in which order they come."""
        if self.find_unused or self._learns:
            self._used.update(i for i in indices if self.parameters[i].grad is not None)
        if not self.rebuilt and not self.find_unused:
            self._arrived += indices[: len(self.parameters) - len(self._arrived)]
        self._count(indices)

    def _count(self, indices: list[int]) -> None:
        """Each time that an index comes, one of a parameter's gradients is there, or will not come."""
        for index in indices:
            self._remaining[index] -= 1
            if self._remaining[index] <= 0:
                self._ready(index)

    def _ready(self, index: int) -> None:
        """A parameter's gradient is there: with the last one of a bucket, that can be sent.

        Raises:
            RuntimeError: it was there already.
        """
        left = self._remaining[index]
        if left < 0 and self._triggers is not None:
            raise self._failure(
                "Your training graph has changed in this iteration: parameter "
                f"{self.names[index]} (index {index}) was used more often than in the first one, which "
                "static_graph=True holds for all; to do: leave static_graph out"
            )
        if left < 0:
            raise self._failure(
                f"Expected to mark a variable ready only once. Parameter {self.names[index]} (index {index}) was "
                "marked ready more than once in one backward: it is used outside of the forward, or by several "
                "reentrant checkpoints; to do: pass static_graph=True if each iteration takes the same way, use "
                "torch.utils.checkpoint with use_reentrant=False, or do not call forward between backwards"
            )
        bucket = self._bucket_of[index]
        bucket.pending -= 1
        if bucket.pending == 0:
            self._advance()

    @torch.no_grad()
    def _advance(self) -> None:
        """Buckets that are full go on their way, in one order on all ranks."""
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            if self._overlaps:
                self._send(self._next)
            self._next += 1

    def _unused_on_all_ranks(self) -> set[int]:
        used = torch.zeros(len(self.parameters), dtype=torch.int32, device=self.parameters[0].device)
        used[[*self._used]] = 1
        comm.all_reduce(used, group=self.group)
        self._used.clear()
        return {i for i, often in enumerate(used.tolist()) if not often}

    @torch.no_grad()
    def follow(self) -> None:
        """Sends zeros as the backward of other ranks sends gradients: this rank has no more batches."""
        learns = self._learns
        for number, bucket in enumerate(self.buckets):
            if bucket.sparse:
                self._sparse_mean(bucket.parameters[0], None)
                continue
            sizes = [bucket.parameters[k].numel() for k in bucket.large]
            sizes += [bucket.flat.numel()] * bool(bucket.packed)
            self._reduce(number, [bucket.flat.new_zeros(size) for size in sizes])
        for bucket in self.buckets:
            bucket.reduced()
        if self.find_unused or learns:
            self._unused_on_all_ranks()
        if learns:
            self._triggers = [1] * len(self.parameters)
        self._arrived = list(self.order)  # all that this rank knows, if it has had no batch
        self._rebuild()

    # While a program is captured, which gets the communication

    @torch.no_grad()
    def _record(self, index: int) -> None:
        """A gradient has arrived: its reduction starts. A pass packs those of many; hooks are given buckets."""
        arrived, parameter = self.backward.arrived, self.parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if index not in arrived:
            arrived.append(index)
        if len(arrived) == len(self.parameters):
            at_end_of_backward(self._finish_recording)

    @torch.no_grad()
    def _finish_recording(self) -> None:
        """The backward ends that is captured, and all gradients have come."""
        if self.hook is not None and self.backward.order and not self.rebuilt:
            self.order, self.rebuilt = [*self.backward.order], True
            self._fill_buckets()
        elif self.hook is not None and not self.rebuilt:
            self.backward.order = tuple(self.backward.arrived)
        self.backward.arrived.clear()
        self.backward.expected = False
        for number, bucket in enumerate(self.buckets):
            grads = [one.grad for one in bucket.parameters if one.grad is not None]  # all, by now
            if self.hook is None:
                for grad in grads:
                    want_mean(grad, self.group.group_name)
                continue
            flat = torch.cat([flat_as(one, grad) for one, grad in zip(bucket.parameters, grads, strict=True)])
            reduced = views_of(value_of(self._hooked(self.hook, number, flat)), bucket.parameters)
            for grad, new in zip(grads, reduced, strict=True):
                grad.copy_(new)

    @torch.no_grad()
    @noted(WITHOUT_JOIN)
    def _finish(self, learns: bool) -> None:
        """Ends a backward: waits for all buckets and gives the parameters their gradients."""
        self.backward.expected = self._begun = False
        self.times.mark("backward_compute_time_end")
        if not self._overlaps:
            for number in range(len(self.buckets)):
                self._send(number)
        try:
            reduced = [bucket.reduced() for bucket in self.buckets]
        except Exception as failure:
            self._tell(failure)
            raise
        if self.find_unused or learns:
            self._untouched = self._unused_on_all_ranks()
        for bucket, grads in zip(self.buckets, reduced, strict=True):
            bucket.give(grads, self.as_view, self._untouched)
        self._reset()
        self.times.mark("backward_comm_time_end")
        self.times.end_iteration()
        self._rebuild()


def _weak_hook(reducer: weakref.ref[GradientReducer], noted: list[int], index: int) -> Callable[..., None]:
    """Does not keep the reducer, which keeps the node that has the hook."""

    def hook(_inputs: Any, _outputs: Any) -> None:
        if noted:  # the first one has seen to all else
            noted.append(index)
        elif (found := reducer()) is not None:
            found.gradient_arrived(index)

    return hook
