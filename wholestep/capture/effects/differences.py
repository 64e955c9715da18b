"""Differences: each place of a snapshot compared with what it holds now, described as effects."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wholestep.capture.effects.effects import (
    CallMethod,
    DelAttr,
    DelItem,
    Effect,
    Extend,
    SetAttr,
    SetContents,
    SetGrad,
    SetItem,
)
from wholestep.capture.effects.recipes import recipe
from wholestep.capture.effects.values import Const, Existing, Made, New, Tree, Value, nested
from wholestep.capture.exchange.exchange import Exchanged
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.outside.append_only_lists import REMEDY, Sink
from wholestep.capture.outside.iterators import Stopped
from wholestep.capture.outside.lr_schedulers import Deferred, Pending
from wholestep.capture.snapshot import boxes
from wholestep.capture.snapshot.boxes import Contents
from wholestep.capture.snapshot.new_objects import kept_in_module
from wholestep.capture.snapshot.places import Place
from wholestep.capture.sources import Source, Version
from wholestep.errors import LeakError, UnsupportedError
from wholestep.functional import Count
from wholestep.torch_compat import HOOK_TABLES

NUMBER_TYPES: tuple[type, ...] = (torch.SymFloat, torch.SymInt, torch.SymBool)


def _unchanged(now: Any, before: Any) -> bool:
    return now is before or (is_plain(now) and type(now) is type(before) and bool(now == before))


class _Values:
    """Turns what the step left behind into `Value`s."""

    def __init__(self, seen: Exchanged, is_new: Callable[[torch.Tensor], bool]) -> None:
        self.seen, self.is_new = seen, is_new
        made_of = {type(stand_in) for stand_in in seen.stand_ins} - {int, float}
        self.numbers: tuple[type, ...] = (*NUMBER_TYPES, *made_of)
        self.stand_ins = {id(s): n for s, n in zip(seen.stand_ins, seen.numbers, strict=False)}
        self.new: dict[int, New] = {}
        self.open: set[int] = set()
        self.young: set[int] = set()
        self.cells: list[tuple[Made, tuple[Any, ...], str]] = []  # closure cells, to be filled
        self.grown: list[tuple[Source, int, Any]] = []  # a list, by how many new values, and the first of them
        self.longer: set[str] = set()  # lists that grew by what is the same in each call
        self.made: dict[int, tuple[Any, Value]] = {}  # a container that is held twice is made once

    def value(self, value: Any, where: str) -> Value:
        """The value, described; ``where`` is the place that holds it, for messages."""
        if id(value) in self.stand_ins:
            number = self.stand_ins[id(value)]
            return Existing(number.source, number.value)
        if type(value) in (Sink, Stopped):
            return Existing(vars(value)["source"], vars(value)["holder"])
        if isinstance(value, Pending):
            return Existing(value.source, value, late=True)
        if isinstance(value, Deferred):
            raise UnsupportedError(f"{where} was given a scheduler's own attributes", remedy="read them outside")
        if isinstance(value, Count):
            found = self.seen.find(value.tensor)
            assert found is not None
            return Existing(Version(found.source, found.tensor._version - int(value)), value)
        if isinstance(value, self.numbers):
            return self._new(value)
        if isinstance(value, torch.Tensor):
            found = self.seen.find(value)
            if found is not None:
                return Existing(found.source, value)
            return self._new(value) if self.is_new(value) else Const(value)
        if is_plain(value) and not self._is_of_numbers(value):
            return Const(value)
        if id(value) in self.seen.walk.first:
            return Existing(self.seen.walk.first[id(value)], value)
        if id(value) in self.open:
            raise LeakError(f"{where} was given a value that contains itself, made in the step",
                            remedy="build such objects before the step, or return their tensors")
        if id(value) not in self.made:
            self.open.add(id(value))
            try:
                self.made[id(value)] = value, self._made(value, where)
            finally:
                self.open.discard(id(value))
        while self.cells and not self.open:  # last: a function may be found in a cell of its own
            made, parts, where = self.cells.pop()
            made.parts = tuple(self.value(part, where) for part in parts)
        return self.made[id(value)][1]

    def _is_of_numbers(self, value: Any) -> bool:
        return type(value) is torch.Size and any(isinstance(size, self.numbers) for size in value)

    def _new(self, value: Any) -> New:
        if id(value) not in self.new:
            self.new[id(value)] = New(value, len(self.new))
        return self.new[id(value)]

    def _made(self, value: Any, where: str) -> Value:
        """An object that the step made, or one from before that was out of its sight."""
        kind = type(value)
        if kind in (dict, list, tuple, set, frozenset):
            return self.tree(kind, value if kind is dict else dict(enumerate(value)), where)
        if not isinstance(value, (dict, list, set, frozenset)) and not self._is_young(value):
            source = None if isinstance(value, (types.FunctionType, type, types.ModuleType)) else kept_in_module(value)
            return Const(value) if source is None else Existing(source, value)
        try:
            found = recipe(value)
        except Exception as error:
            what = f"{where} was given a {kind.__qualname__} made in the step, which cannot be made again at each call"
            raise _leak(value, what, "return or store tensors, numbers, and containers and objects of them") from error
        if found is None:
            return Const(value)
        made = Made(kind, self.value(found.make, where), ())
        self.made[id(value)] = value, made
        made.args = tuple(v if isinstance(v, Const) else self.value(v, where) for v in found.args)
        self.open.discard(id(value))  # from here on it may hold itself
        if kind is types.CellType:
            self.cells.append((made, found.parts, where))
            return made
        made.parts = tuple(self.value(part, where) for part in found.parts)
        return made

    def _is_young(self, value: Any) -> bool:
        """Whether an object was made in the step, as far as the garbage collector, which follows it, can tell."""
        if self.seen.young is None or not gc.is_tracked(value):
            return True
        self.young = self.young or self.seen.young()
        return id(value) in self.young

    def tree(self, kind: type, contents: Contents, where: str) -> Tree:
        """A plain container described by its contents."""
        keys = tuple(self.value(key, where) for key in contents)
        return Tree(kind, keys, tuple(self.value(v, f"{where}[{k!r}]") for k, v in contents.items()))


def _leak(held: Any, what: str, remedy: str) -> LeakError:
    error = LeakError(what, remedy=remedy)
    error.held = held
    return error


def differences(seen: Exchanged, is_new: Callable[[torch.Tensor], bool], result: Any) -> tuple[list[Effect], Value]:
    """Compares every place of a snapshot with what it holds now; see `Snapshot.outcome`."""
    values = _Values(seen, is_new)
    found: list[Effect] = []
    for place in seen.places:
        now = place.box.read(place.holder)
        found.extend(_place_effects(seen, place, now, values))
        if place.box is boxes.TENSOR and now["grad"] is place.before["grad"] is None:
            grad = seen.walk.child(place, "grad")
            if grad.path in seen.replaced_gradients:  # a later call may find one
                found.append(SetGrad(place.source, Const(None)))
    for at in seen.twins.found.values():
        found.extend(_twin_effects(at.tensor, seen.original(at.tensor), at.source))
    if values.grown:
        source, count, held = values.grown[0]
        leak = _leak(held, f"{source} grows by {count} values made in the step, at each call, and the step reads it",
                     REMEDY)
        leak.grown = frozenset(source.path for source, _, _ in values.grown)
        raise leak
    if not values.longer <= seen.looked_into:
        leak = LeakError("the step appends to a list at each call", remedy=REMEDY)
        leak.grown, leak.optional = frozenset(values.longer - seen.looked_into), True
        raise leak
    for source, taken in seen.walk.sinks.taken():
        found.append(Extend(source, values.tree(list, dict(enumerate(taken)), source.text)))
    return found, values.value(result, "the step's result")


def _place_effects(seen: Exchanged, place: Place, now: Contents, values: _Values) -> Iterator[Effect]:
    before = place.before
    for key in before if seen.lifted else ():
        lifted = seen.lifted.get((id(place.holder), key)) if type(key) in (str, int) else None
        if lifted is not None:
            before = before | {key: lifted}
    if len(now) == len(before) and all(map(_same_entry, now.items(), before.items())):
        return
    place.changed, source = True, place.source
    if place.box is boxes.TENSOR:
        yield from _tensor_effects(place, now, values)
        return
    if place.box in (boxes.LIST, boxes.SET, boxes.DEQUE) or _reordered(now, before):
        tree = values.tree(dict if place.box is boxes.MAPPING else list, now, source.text)
        grown = len(now) > len(before) > 0 and all(now[key] is before[key] for key in before if key in now)
        added = tree.values[len(before):] if grown and place.box is not boxes.MAPPING else ()
        new = [v.value for v in nested(added) if isinstance(v, New)]
        new += [v.value for v in added if isinstance(v, Existing) and v.late]
        if new:
            values.grown.append((source, len(now) - len(before), new[0]))
        elif added and place.box is not boxes.SET:
            values.longer.add(source.path)
        yield SetContents(source, place.box, tree)
        return
    for key in before:
        if key not in now:
            mapping = place.box is boxes.MAPPING
            yield DelItem(source, values.value(key, source.text)) if mapping else DelAttr(source, key)
    for key, value in now.items():
        if key in before and _unchanged(value, before[key]):
            continue
        described = values.value(value, seen.walk.child(place, key).text)
        if place.box is boxes.MAPPING:
            yield SetItem(source, values.value(key, source.text), described)
        else:
            yield SetAttr(source, key, described)


def _same_entry(now: tuple[Any, Any], before: tuple[Any, Any]) -> bool:
    return _unchanged(now[0], before[0]) and _unchanged(now[1], before[1])


def _reordered(now: Contents, before: Contents) -> bool:
    """True when setting and deleting single keys would leave another order than the step left."""
    kept = [id(key) if not is_plain(key) else key for key in before if key in now]
    added = [id(key) if not is_plain(key) else key for key in now if key not in before]
    return kept + added != [id(key) if not is_plain(key) else key for key in now]


def _tensor_effects(place: Place, now: Contents, values: _Values) -> Iterator[Effect]:
    for name, value in now.items():
        if _unchanged(value, place.before[name]) or (name == "requires_grad" and place.holder.grad_fn is not None):
            continue  # with a history comes the flag
        if name == "grad":
            yield SetGrad(place.source, values.value(value, f"{place.source}.grad"))
        elif name == "requires_grad":
            yield SetAttr(place.source, name, Const(value))
        else:
            raise _hooked(place.source)


def _twin_effects(twin: torch.Tensor, original: torch.Tensor, source: Source) -> Iterator[Effect]:
    """What the step asked of autograd for a tensor with a history."""
    if any(getattr(twin, name) for name in HOOK_TABLES):
        raise _hooked(source)
    if twin.retains_grad and not original.retains_grad:
        yield CallMethod(source, "retain_grad")


def _hooked(source: Source) -> LeakError:
    remedy = "add hooks to inputs before the step; hooks on tensors of the step are free"
    return LeakError(f"a hook was added to {source} in the step", remedy=remedy)
