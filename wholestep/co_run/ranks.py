"""The ranks of a step with plans: its segments become programs of one rank, which all ranks run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from wholestep.capture import Args, InitialState, Kwargs, Snapshot, TensorInput
from wholestep.co_run.operators import Facts, Kind
from wholestep.co_run.places import place_of, storage_at
from wholestep.co_run.prefix_tree import Results, Unknown, described
from wholestep.co_run.rank_program import Mark, Named, RankProgram
from wholestep.co_run.segment import Segment
from wholestep.co_run.shards import Shards
from wholestep.errors import DistError, PlanError
from wholestep.fake_evaluate import run
from wholestep.fake_layouts import strict_fake_mode
from wholestep.ir import WHOLE_KINDS, Input, NodeInfo
from wholestep.nested import map_leaves
from wholestep.patches import Replacement, original
from wholestep.pipeline import Options
from wholestep.spmd import BufferBroadcast, GlobalView
from wholestep.torch_compat import FakeTensor, behind, empty_fake, no_modes
from wholestep.trace.record.provenance import WITH_PLAN, Provenance
from wholestep.trace.record.user_line import user_line


class Recording(Protocol):
    """The queue: what it offers to the ranks."""

    def mark(self, function: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        """Records a call of a function that takes note of tensors when the segment is captured."""

    def paused(self) -> AbstractContextManager[None]:
        """Flushes; within, operators run at once instead of being deferred."""


@dataclass
class _Backward:
    """A backward that runs.

    Attributes:
        leaves: in whose ``.grad`` it may leave something, by their ids.
        old: the gradients that there were when it, or the segment, began, and their versions.
    """

    leaves: dict[int, torch.Tensor]
    old: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Takes note of the gradients that there are."""
        grads = {key: leaf.grad for key, leaf in self.leaves.items() if leaf.grad is not None}
        self.old = {key: (grad, grad._version) for key, grad in grads.items()}

    def changed(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The leaves with other gradients now, and these."""
        found = {key: (leaf, leaf.grad) for key, leaf in self.leaves.items() if leaf.grad is not None}
        for key, (grad, version) in self.old.items():
            if key in found and found[key][1] is grad and grad._version == version:
                del found[key]
        return found


class Ranks:
    """Runs the segments of a step's calls.

    Attributes:
        held: storage -> what this rank has of it, instead of all of it.
        keeps_whole: whether there is never any such.
    """

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        self._fn, self._options, self._name = fn, options, getattr(fn, "__qualname__", type(fn).__name__)
        self._executor = options.executor
        self._shards = Shards(options.executor.groups)
        self.held, self.keeps_whole = self._shards.held, options.executor.keeps_whole
        self._initial = InitialState(None)
        self._first = True
        self._homes: dict[Any, tuple[Any, ...]] = {}  # place of a tensor -> its placements when no step runs
        self._by_source: dict[tuple[str, torch.Size], tuple[Any, ...]] = {}
        groups = self._executor.broadcasting
        self._buffers = BufferBroadcast(groups, self._accumulates, self._broadcasting)

    @contextmanager
    def call(self, args: Args, kwargs: Kwargs, queue: Recording) -> Iterator[list[Replacement]]:
        """One call of the step, in which Python sees tensors of which this rank holds a part in their whole shapes.

        Gives replacements for functions of torch's that are to hold inside of it.
        """
        self._queue = queue
        self._graded: dict[int, torch.Tensor] = {}  # leaves of which the segment has noted gradients, by their ids
        self._since: dict[int, int] = {}  # how many updates there were before
        self._unreduced: dict[int, torch.Tensor] = {}  # those whose gradients are each rank's own between segments
        self._call = self._fn, args, kwargs
        self._met: dict[Any, torch.Tensor] = {}
        self._backwards: list[_Backward] = []  # that run now
        if self._first:
            self._initial = InitialState(Snapshot(*self._call))
            self._initial.fill()
        if self._first or not self.keeps_whole:  # else no tensor is to be found that is a part
            world = Snapshot(*self._call)
            self._modules = world.module_names()
            self._shards.put(world.tensors.values(), self._executor.parts)
            self._lasting = self._whole(world) if self._executor.view else []
            if view := self._executor.view:
                strided = (one for one in world.tensors.values() if one.tensor.layout is torch.strided)
                self._homes = {place_of(one.tensor): self._home(view, one) for one in strided}
        else:
            self._lasting = []
            self._shards.put((), None)
        self._provenance = Provenance(self._modules, WITH_PLAN)
        if self._executor.broadcasting:
            self._provenance.outermost = self._buffers.forward
        complete = False
        try:
            with self._provenance.following():
                yield [(torch.autograd, "backward", self._backward())]
            self._first, complete = False, True
            self._initial.drop(kept={id(tensor) for tensor in self._met.values()})
            self._initial.keep()
        except Exception as error:
            complete = self._all_raise(error)
            raise
        finally:
            self._shards.take_back(self._call, complete)
            self._initial.drop()
            del self._call, self._met, self._queue

    # what the queue asks -------------------------------------------------------------------------------------

    def meet(self, tensor: torch.Tensor, place: Any) -> None:
        """Notes a tensor from before the segment that it reads, or that was written at once."""
        self._met[place] = tensor

    def note(self) -> NodeInfo:
        """The record of the call that Python makes now."""
        where = self._provenance
        return NodeInfo(None, where.phase(), where.seq(), user_line(), where.module())

    def described(self, facts: Facts, args: Any, kwargs: Any) -> Results:
        """What a call gives, by fake tensors: the operands may not be there, or not whole."""
        if facts.kind is Kind.VIEW:
            return None
        mode = strict_fake_mode()
        fakes: dict[Any, Any] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            place = place_of(leaf)
            if place not in fakes:
                fakes[place] = empty_fake(mode, leaf)
            return fakes[place]

        with no_modes():
            args, kwargs = map_leaves(fake, args), map_leaves(fake, kwargs)
            sizes = [tensor.size() for tensor in fakes.values()]
            found = run(mode, facts.op, args, kwargs)
            if sizes != [tensor.size() for tensor in fakes.values()]:
                raise Unknown
            return described(facts.op, args, kwargs, found, FakeTensor)

    def read(self, tensors: Iterable[torch.Tensor], writes: bool) -> None:
        """Gathers the whole memory of tensors that are read now; where they are written, it stays whole."""
        if not self.held and not self._unreduced:
            return
        strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
        keys = dict.fromkeys(storage_at(tensor) for tensor in strided)
        grads = [leaf.grad for leaf in self._unreduced.values() if leaf.grad is not None]
        if any(storage_at(grad) in keys for grad in grads):
            self._reduce(f"which reads gradients at {user_line()}")
        with no_modes():
            for key in keys:
                self._shards.fill(key, writes)

    def begin_segment(self) -> None:
        """Before a segment's first call."""
        left = [(leaf, leaf.grad) for leaf in self._unreduced.values() if leaf.grad is not None]
        if left:
            self._graded |= {id(leaf): leaf for leaf, _ in left}
            self._queue.mark(Mark("segment begins"), [tensor for pair in left for tensor in pair])
        for backward in self._backwards:
            self._mark_begin(backward)

    def end_segment(self) -> None:
        """Before what is deferred runs: a backward that goes on in the next segment is two."""
        if any(backward.changed() for backward in self._backwards):
            for backward in reversed(self._backwards):
                self._mark_end(backward)
                backward.begin()

    def dropped(self) -> None:
        """Ends a segment that has marks but nothing to run: the gradients it noted stay each rank's own."""
        new = {key: leaf for key, leaf in self._graded.items() if key not in self._unreduced}
        self._graded.clear()
        if new:
            world = Snapshot(*self._call)
            found = ((key, leaf, world.find(leaf)) for key, leaf in new.items())
            self._unreduced |= {key: leaf for key, leaf, one in found if one is not None and one.kind == "parameter"}

    def end(self) -> None:
        """The step has returned: what gradients are each rank's own are reduced."""
        if self._executor.groups:
            self._reduce("at its end")

    def _all_raise(self, error: Exception) -> bool:
        """Whether all ranks end the call with an error, so that they can put things in order together."""
        if isinstance(error, (DistError, PlanError)):  # which the others have heard
            return False
        try:
            self._reduce(f"which raises {type(error).__name__}")
        except (PlanError, DistError):
            return False
        return True

    @contextmanager
    def _broadcasting(self) -> Iterator[None]:
        """Inside, all ranks broadcast buffers, and nothing is deferred."""
        with self._queue.paused():
            self._executor.preflight.begin_call(f"{self._name}, in the forward at {user_line()}")
            self._executor.preflight.meet("buffers that are to be broadcast")
            yield

    def _reduce(self, where: str) -> None:
        """Reduces the gradients that are each rank's own, of which no program knows a reader."""
        grads = [self._shards.own(leaf.grad.detach()) for leaf in self._unreduced.values() if leaf.grad is not None]
        self._unreduced.clear()
        self._executor.preflight.begin_call(f"{self._name}, {where}")
        with no_modes():
            self._executor.reduce(grads)

    def _accumulates(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        updates, new = self._provenance.updates, self._graded | self._unreduced
        return any(p.grad is not None and id(p) in new and self._since.get(id(p)) == updates for p in parameters)

    def _backward(self) -> Callable[..., None]:
        """`torch.autograd.backward`, which says which gradients it leaves."""
        run = original(torch.autograd, "backward")

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [*tensors] if isinstance(tensors, Sequence) else [tensors]
            this = _Backward(_leaves_behind(roots))
            this.begin()
            self._mark_begin(this)
            self._backwards.append(this)
            try:
                run(tensors, *args, **kwargs)
                self._mark_end(this)
            finally:
                self._backwards.pop()

        return backward

    def _mark_begin(self, backward: _Backward) -> None:
        self._queue.mark(Mark("backward begins"), [grad for grad, _ in backward.old.values()])

    def _mark_end(self, backward: _Backward) -> None:
        new, old = backward.changed(), backward.old
        there = {key: index for index, key in enumerate(old)}
        for leaf, grad in new.values():
            if grad.layout is not torch.strided:
                raise self._executor.sparse_gradient(self._source(leaf), user_line())
        self._graded |= {key: leaf for key, (leaf, _) in new.items()}
        self._since |= dict.fromkeys(new, self._provenance.updates)
        left = [tensor for pair in new.values() for tensor in pair]
        self._queue.mark(Mark("backward ends", tuple(map(there.get, new))), left)

    def _whole(self, world: Snapshot) -> list[tuple[Input, torch.Tensor]]:
        """What this rank has whole when a call begins, besides the batch."""
        found = sorted(world.tensors.values(), key=lambda one: str(one.source))
        return [(Input("", str(one.source), one.kind), one.tensor) for one in found
                if one.kind in WHOLE_KINDS and one.tensor.layout is torch.strided
                and self._shards.of(one.tensor) is None]  # fmt: skip

    def _home(self, view: GlobalView, found: TensorInput) -> tuple[Any, ...]:
        key = str(found.source), found.tensor.shape
        if key not in self._by_source:
            self._by_source[key] = view.placements(Input("", key[0], found.kind), found.tensor)
        return self._by_source[key]

    def placements(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Where tensors lie, alike on all ranks: a segment's program is for that."""
        if self.keeps_whole or not self._homes:
            return ()
        held = (self._shards.of(tensor) for tensor in tensors)
        return tuple([self._homes.get(place_of(tensor)) if mine is None or mine.placements is None else mine.placements
                      for mine, tensor in zip(held, tensors, strict=True)])  # fmt: skip

    def _source(self, tensor: torch.Tensor) -> str:
        found = Snapshot(*self._call).find(tensor)
        return f"a tensor of shape {list(tensor.shape)}" if found is None else str(found.source)

    # programs -------------------------------------------------------------------------------------------------

    def compile(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], varying: frozenset[int]
    ) -> RankProgram:
        """The program of a segment, on which the ranks have agreed."""
        world = Snapshot(*self._call)
        for tensor in self._met.values():
            world.find(tensor)  # also in attributes that only libraries read
        found = world.tensors.values()
        names = {place_of(f.tensor): Named(f.kind, str(f.source), f.tensor) for f in found
                 if f.tensor.layout is torch.strided}  # fmt: skip
        return RankProgram(segment, tensors, numbers, varying, self._options, names, self._shards)

    def begin(self, program: RankProgram | None, numbers: Sequence[float]) -> None:
        """Before a segment's program: all ranks are to run it; None: it has to be compiled, which they agree on."""
        self._executor.preflight.begin_call(f"{self._name}, in the segment that ends at {user_line()}")
        if program is not None:
            self._executor.preflight.check_call(program.contract, numbers, self._lasting)
        self._lasting = []

    def run(self, program: RankProgram, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Runs a segment's program; when it fails, the other ranks hear of it."""
        try:
            program(tensors, numbers)
        except BaseException as error:
            self._executor.preflight.abort_program(error)
            raise
        self._shards.forget_dead()
        noted = [*self._graded.items()]
        self._unreduced = {noted[place][0]: noted[place][1] for place in program.unreduced}
        self._graded.clear()


def _leaves_behind(roots: Sequence[Any]) -> dict[int, torch.Tensor]:
    """By their ids, the tensors in whose ``.grad`` a backward may leave something; also those that no call here met."""
    found = [root for root in roots if isinstance(root, torch.Tensor) and root.is_leaf]
    found += [node.variable for node in behind(roots) if hasattr(node, "variable")]
    return {id(leaf): leaf for leaf in found if leaf.requires_grad}
