"""The queue: a dispatch mode below autograd that records operators and answers them with memory to be written later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from wholestep.co_run.operators import Facts, Kind, facts_of
from wholestep.co_run.places import place_of, storage_at
from wholestep.co_run.prefix_tree import Node, Signatures, Unknown, described
from wholestep.co_run.ranks import Ranks
from wholestep.co_run.reads import ExposedMemory, ExtensionWatch
from wholestep.co_run.segment import RecordedCall, Segment
from wholestep.co_run.shards import At, PartViews
from wholestep.co_run.slots import Opaque, Slots, is_plain
from wholestep.errors import PlanError
from wholestep.nested import leaves, tensors_of
from wholestep.torch_compat import (
    UnwrappedDispatchMode,
    as_called,
    dispatching,
    function_modes,
    function_modes_disabled,
    no_modes,
    skipped_by_dynamo,
    storage_uses,
)
from wholestep.trace.record.caught_errors import is_caught
from wholestep.trace.record.user_line import user_line

_STRIDED, _NONE = torch.strided, dict[str, Any]()
AT_ONCE, VIEW = Kind.AT_ONCE, Kind.VIEW

# (node, slots that are alive, segment, tensors, numbers)
Run = Callable[[Node, Segment, list[torch.Tensor], list[float]], None]


@skipped_by_dynamo  # which would compile what a model under torch.compile calls
class Queue(UnwrappedDispatchMode):
    """Defers operators until `flush`.

    A call is looked up under those that came before it since the last flush (`Signatures`). Where it is known, so are
    the layouts of its results, and it is deferred. Where it is not, everything before it runs, and so does it, at once.
    Where too many are known already, as where sizes follow from data, all runs at once until the next flush.

    Args:
        signatures: what was recorded in earlier calls of the step.
        run: runs what was deferred.
        ranks: those of a step with plans, which run each segment together, as a program.
        exposed: memory to which all is written at once.

    Attributes:
        known: whether no call was recorded so far.
        plain: whether no other ranks take part.
        watch: sees calls of C extensions.
    """

    def __init__(self, signatures: Signatures, run: Run, ranks: Ranks | None, exposed: ExposedMemory) -> None:
        super().__init__()
        self.exposed = exposed
        self.plain, self._ranks, self._held = ranks is None, ranks, ranks.held if ranks is not None else {}
        self._views = PartViews()
        self._slots = Slots(ranks, self._views)
        self._signatures, self._run, self._running, self.known = signatures, run, False, True
        self._paused, self.watch = False, ExtensionWatch(self.flush)
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []  # with plans: written at once since the last flush
        self._begin()

    def _begin(self) -> None:
        self._node: Node | None = None  # until the first call, by what is set then
        self._slots.begin()
        self._undeferred = False
        self._ran: set[int] = set()  # storages that calls which are not deferred, since they are new, made or wrote
        self._forget()

    def _forget(self) -> None:
        """Lets go of what was deferred."""
        self._slots.run()
        self._calls: list[RecordedCall] = []
        self._marked: dict[int, list[Any]] = {}  # place of a mark in the calls -> its tensors'

    supports_higher_order_operators = True  # which run at once, as all that they call

    # -- dispatch --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function_modes():  # of the step's own, which what is asked of tensors here is not for
            with function_modes_disabled():
                return self._dispatch(func, args, kwargs or _NONE)
        return self._dispatch(func, args, kwargs or _NONE)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.in_loop:  # of calls in place, which count nothing below autograd
            counted = [t for t in self._written(facts, args, kwargs) if t.device.type == "cpu" and not t.is_inference()]
            torch.autograd.graph.increment_version(counted)
        if facts.kind is AT_ONCE or (facts.refuses is not None and is_caught(facts.refuses)):
            return self._at_once(facts, args, kwargs)
        if facts.written and self.exposed and self.exposed.holds(self._written(facts, args, kwargs)):
            return self._at_once(facts, args, kwargs)
        if self._undeferred:
            return func(*args, **kwargs)
        if self._ranks is not None:
            self._begin_segment()  # which gives gradients that are each rank's own their slots
        if args and not facts.random and self._is_small(args):
            if self._ranks is not None:
                for tensor in self._written(facts, args, kwargs):
                    self._counts.append((tensor, tensor.clone()))
                    self._ranks.meet(tensor, place_of(tensor))
            return func(*args, **kwargs)
        key, node = self.looked_up(facts, args, kwargs, facts.any_float)
        if node is MISSING:
            return self._record(facts, args, kwargs, key)
        if node is None:
            return self._at_once(facts, args, kwargs)
        self._node = node
        if self.watch.active:
            self.watch.end()
        if facts.kind is VIEW:
            found = func(*args, **kwargs)
            results = self._slots.register(found)
            if self._ranks is not None and not self._ranks.keeps_whole:
                self._views.remember(facts, args, kwargs, found)
        else:
            found, results = self._slots.answer(facts, args, kwargs, node.results)
            if facts.written:
                self._slots.written(self._written(facts, args, kwargs))
        self._calls.append((facts.op, key[1], key[2], results, node.note))
        return found

    def looked_up(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], any_float: bool) -> tuple[Any, Any]:
        """A call's key and its node: None for one that runs at once, `MISSING` where it is not known."""
        self._node = self._begin_segment()
        slots = self._slots
        slots.any_float = any_float
        before = slots.count()
        try:
            if self._held:
                self._record_views(tensors_of((args, kwargs)))
                before = slots.count()
            key = what, *slots.arguments(args, kwargs), slots.met()
            node = self._node.next.get(key, MISSING)
            if node is MISSING and self._ranks is not None:
                node = self._add(key, self._described(self._ranks, what, args, kwargs))
        except (Opaque, Unknown, TypeError, RuntimeError):  # or an argument does not hash, or is nested, without sizes
            key, node = None, None
        if node is None or node is MISSING:
            slots.take_back(*before)
        return key, node

    def defers(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a call with these tensors can be deferred now."""
        if self._paused or self._running or self._undeferred:
            return False
        if any(not is_plain(t) or t.is_inference() for t in tensors):
            return False
        return not (self.exposed and self.exposed.holds(tensors))

    def defer(self, function: Any, key: Any, node: Node, written: Iterable[torch.Tensor]) -> None:
        """Defers a call without results that is known."""
        self.watch.end()
        self._slots.written(written)
        self._calls.append((function, key[1], key[2], None, None))
        self._node = node

    def learn(self, key: Any, run: Callable[[], Any]) -> None:
        """Runs a call that is not known after those before it; what it gives is known of it, unless it is `Unknown`."""
        self._run_pending()
        self.known = False
        before, self._node = self._node or Node(), Node()
        self._paused = True
        try:
            results = run()
        except Unknown:
            before.next[key] = None
            return self._begin()
        finally:
            self._paused = False
            self.watch.begin()
        self._node = self._signatures.add(before, key, results)

    @staticmethod
    def _written(facts: Facts, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        return tensors_of([facts.argument(args, kwargs, position) for position in facts.written])

    def _described(self, ranks: Ranks, facts: Facts, args: Any, kwargs: Any) -> Any:
        self._running = True  # what a fake tensor is asked for flushes nothing
        try:
            return ranks.described(facts, args, kwargs)
        finally:
            self._running = False

    def _add(self, key: Any, results: Any) -> Node:
        """A new node, which is deferred as one that is known."""
        assert self._node is not None and self._ranks is not None
        self.known = False
        node = self._signatures.add(self._node, key, results)
        node.note = self._ranks.note()
        return node

    def _append(self, function: Any, facts: Any, parts: Any, named: Any, results: Any) -> None:
        """Records a call that Python does not make here."""
        key = facts, parts, named, self._slots.met()
        assert self._node is not None
        self._node = self._node.next.get(key) or self._add(key, None)
        self._calls.append((function, parts, named, results, self._node.note))

    def _begin_segment(self) -> Node:
        if self._node is None:
            self._node = self._signatures.root()
            if self._ranks is not None:
                self._ranks.begin_segment()
        return self._node

    def mark(self, function: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        """Records a call of a function that takes note of tensors when the segment is captured."""
        self._begin_segment()
        try:
            self._record_views(tensors)
            parts = tuple([self._slots.of_tensor(tensor) for tensor in tensors])
        except Opaque:
            raise PlanError(
                "a gradient is complex or of a subclass, which plans do not reduce where a step's Python runs\n"
                f"  at: {user_line()}\n  to do: compute what leads to it in real numbers and plain tensors"
            ) from None
        self._marked[len(self._calls)] = [place_of(tensor) for tensor in tensors]
        self._append(function, function, parts, (), None)

    # -- views of what this rank holds a part of -----------------------------------------------------------

    def _record_views(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records the views of memory of which this rank holds a part: its programs make them of the part."""
        for tensor in tensors:
            held = self._held.get(storage_at(tensor)) if tensor.layout is _STRIDED else None
            if held is not None and (place := place_of(tensor)) != place_of(held.tensor):
                self._record_view(place)

    def _record_view(self, place: Any) -> None:
        held = self._held.get(place[0])
        if held is None or place in self._slots.of:
            return
        if place == place_of(held.tensor):
            self._slots.of_tensor(held.tensor)
            return
        call = self._views.call_of(place)
        if call is None:
            raise Opaque
        facts, args, kwargs, found = call
        for leaf in leaves((args, kwargs)):
            if type(leaf) is At:
                self._record_view(leaf.place)
        parts, named = self._slots.arguments(args, kwargs)
        self._append(facts.op, facts, parts, named, self._slots.register(found))

    def _is_small(self, args: tuple[Any, ...]) -> bool:
        """Whether the operands are single numbers on the host that nothing deferred touches: an optimizer's counts."""
        first = args[0]
        if type(first) is list and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) or first.dim():
            return False
        known, held = self._slots.storages, self._held
        return all(
            not t.dim() and t.device.type == "cpu" and (storage := storage_at(t)) not in known
            and storage not in held
            for t in tensors_of(args)
        )

    def _record(self, facts: Facts, args: Any, kwargs: Any, key: Any) -> Any:
        """Runs a call that is not known after those before it, which run first, and remembers it."""
        self._run_pending()
        if self._node is not None and self._signatures.is_full(self._node, facts):
            self._begin()
            self._undeferred = True
            self.watch.end()  # all memory is written
            return facts.op(*args, **kwargs)
        self.known = False
        self.watch.begin()
        before, self._node = self._node or Node(), Node()  # where nothing is known, should the call fail
        layouts = [*map(_layout, tensors_of((args, kwargs)))]
        found = facts.op(*args, **kwargs)
        if facts.kind is not VIEW:
            written = self._written(facts, args, kwargs)
            self._ran.update(storage_at(t) for t in (*tensors_of(found), *written) if t.layout is _STRIDED)
        try:
            results = None if facts.kind is VIEW else described(facts.op, args, kwargs, found)
            if layouts != [*map(_layout, tensors_of((args, kwargs)))]:
                raise Unknown
        except Unknown:
            before.next[key] = None
            self._begin()
            return found
        self._node = self._signatures.add(before, key, results)
        if facts.kind is VIEW:
            self._slots.register(found)
        else:
            self._slots.register_made(found, results)
        return found

    def _at_once(self, facts: Facts, args: Any, kwargs: Any) -> Any:
        self._slots.met()
        if not facts.only_reads or self._undeferred or self._touches(args):
            self.flush()
        if facts.tells:
            self.watch.begin()  # what is read may decide
        if self._ranks is not None:
            self._ranks.read(tensors_of((args, kwargs)), writes=bool(facts.written))
        inside = facts.cast_inside or facts.differentiated_inside
        with as_called(facts.differentiated_inside) if inside else nullcontext():
            return facts.op(*args, **kwargs)

    def _touches(self, args: Any) -> bool:
        """Whether a read ends the segment: of what was deferred, or will be when the same calls come again."""
        found = [None if t.layout is not _STRIDED else storage_at(t) for t in tensors_of(args)]
        return None in found or not (self._slots.pending.isdisjoint(found) and self._ran.isdisjoint(found))

    # -- flush -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Runs what was deferred; the next call begins a segment."""
        if self._running:  # a read of the program's own
            return
        try:
            self._run_pending()
        finally:
            self._begin()
            self.watch.begin()

    def read(self, values: Any) -> None:
        """Flushes, and gathers the whole memory of tensors among the values."""
        self.flush()
        if self._ranks is not None and not self._running:
            self._ranks.read(tensors_of(values), writes=True)

    def end(self) -> None:
        """Flushes; no call of the step follows."""
        self.flush()
        if self._ranks is not None:
            self._ranks.end()

    def run_at_once(self) -> None:
        """Flushes; without plans, nothing is deferred any more in this call."""
        self.flush()
        self._paused = self._ranks is None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Flushes; within, operators run at once instead of being deferred."""
        self.flush()
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _run_pending(self) -> None:
        """Runs what was deferred, and writes what is alive."""
        if self._ranks is not None:
            self._ranks.end_segment()
        calls, made, node = self._calls, self._slots.made, self._node
        if node is None or not self._slots.pending:
            if self._marked and self._ranks is not None:
                self._ranks.dropped()
            self._forget()
            return
        alive = [(index, storage, layout) for index, storage, layout in made if storage_uses(storage) > 1]
        segment = Segment(calls, self._slots.externals, [index for index, *_ in alive], self._marked)
        tensors, numbers = self._slots.tensors, self._slots.numbers
        self._forget()
        self._running = True
        # also where C++ has switched modes off; and what plans keep of it is no inference tensor
        with dispatching(), no_modes(), torch.inference_mode(False):
            for _, storage, layout in alive:
                empty = torch.empty((), dtype=layout.dtype, device=layout.device)
                tensors.append(empty.set_(storage, 0, layout.size, layout.stride))
            del made
            try:
                self._run(node, segment, tensors, numbers)
                self._counts.clear()
            finally:
                for tensor, before in reversed(self._counts):  # a rank has failed: what it deferred has not happened
                    tensor.copy_(before)
                self._running = False
                self._views.keep(self._held)


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.size(), tensor.stride() if tensor.layout is _STRIDED else None


MISSING: Any = object()
