"""Differences: each container of a snapshot compared with what it holds now, described as effects."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, takewhile
from typing import Any
from uuid import UUID

import torch

from wholestep.capture.effects import effects as changes
from wholestep.capture.effects.recipes import Const, Existing, Made, New, Tree, Value, nested, recipe
from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.outside.stand_ins import (
    REMEDY,
    AppendOnlyList,
    Count,
    Pending,
    Stopped,
    Version,
    taken,
)
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.container_kinds import Contents
from wholestep.capture.snapshot.garbage_collection import kept_in_module
from wholestep.capture.snapshot.names_read import set_on_entry
from wholestep.capture.snapshot.reachable import Container, TensorInput
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import Globals, Source, Vars
from wholestep.errors import LeakError, UnsupportedError
from wholestep.patches import is_added, unpatched
from wholestep.torch_compat import HOOK_TABLES, is_fakes_own

NUMBER_TYPES: tuple[type, ...] = (torch.SymFloat, torch.SymInt)


def outcome(
    snap: Snapshot, is_new: Callable[[torch.Tensor], bool], result: Any = None
) -> tuple[list[changes.Effect], Value]:
    """What has changed in the Python world since a snapshot, and the step's result in the same terms.

    Args:
        is_new: tells tensors that the step made from those that were there before.
        result: what the step returned.

    Raises:
        LeakError: a new tensor is held where a replay cannot put its successor.
    """
    reached = snap.reachable
    reached.outside.raise_refused()  # the step went on past it
    snap.names = snap.names.union(reached.outside.environment)
    snap.substitutes.hand_back()
    reached.add_given()
    described = _Described(snap, is_new)
    effects: list[changes.Effect] = []
    for note in [*snap.substitutes.noted, None]:
        effects += [effect for container in snap.containers for effect in _differences(snap, container, described)]
        effects += _extensions(snap, described)
        described.calls += 1
        if note is not None:
            args = described.value(note.args, note.source.text) if note.args else Const(())
            effects.append(changes.Effect(note.source, changes.STEP, value=args))
    for alias in snap.substitutes.aliases.found.values():
        effects += _autograd_effects(alias, snap.substitutes.original(alias.tensor))
    described.refuse_growth()
    return effects, described.value(result, "the step's result")


class _Described:
    """Turns what the step left behind into `Value`s.

    Attributes:
        calls: how many calls of schedulers come before what is being described.
    """

    def __init__(self, snap: Snapshot, is_new: Callable[[torch.Tensor], bool]) -> None:
        self.snap, self.is_new, self.calls = snap, is_new, 0
        stand_ins = snap.substitutes.stand_ins
        self.numbers: tuple[type, ...] = (*NUMBER_TYPES, *{type(stand_in) for stand_in in stand_ins} - {int, float})
        self.stand_ins = {id(s): n for s, n in zip(stand_ins, snap.numbers, strict=False)}
        self.new: dict[int, New] = {}
        self.open: set[int] = set()
        self.new_ids: set[int] = set()
        self.grown: list[tuple[Source, int, Any]] = []  # a list, by how many values, and the first that is new
        self.made: dict[int, tuple[Any, Value]] = {}  # a container that is held twice is made once

    def value(self, value: Any, where: str) -> Value:
        """The value, described; ``where`` is the place that holds it, for messages."""
        value = unpatched(value)
        if id(value) in self.stand_ins:
            number = self.stand_ins[id(value)]
            return Existing(number.source, number.value)
        if type(value) in (AppendOnlyList, Stopped):
            return Existing(vars(value)["source"], vars(value)["original"])
        if isinstance(value, Pending):
            if value.call >= self.calls:
                what = f"{where} was given what a scheduler sets, in a container that was there before its step()"
                raise UnsupportedError(what, remedy="call scheduler.step() last, or after the compiled step")
            return Existing(value.source, value, after=value.call)
        if isinstance(value, Count):
            found = self.snap.find(value.tensor)
            assert found is not None
            return Existing(Version(found.source, found.tensor._version - int(value)), value)
        if type(value) is torch.SymBool:
            return Const(bool(value))  # a guard, as where Python decides on it
        if isinstance(value, self.numbers):
            return self._new(value)
        if isinstance(value, torch.Tensor):
            found = self.snap.find(value)
            if found is not None:
                return Existing(found.source, value)
            if not self.is_new(value):
                what = f"{where} was given a tensor from before the step, which is out of its sight"
                raise UnsupportedError(what, remedy="pass it to the step as an argument")
            return self._without_attributes(value, where)
        if is_plain(value) and not self._is_of_numbers(value):
            return Const(value)
        if id(value) in self.snap.reachable.first:
            return Existing(self.snap.reachable.first[id(value)], value)
        if id(value) in self.open:
            raise LeakError(f"{where} was given a value that contains itself, made in the step",
                            remedy="build such objects before the step, or return their tensors")
        if id(value) not in self.made:
            self.open.add(id(value))
            try:
                self.made[id(value)] = value, self._made(value, where)
            finally:
                self.open.discard(id(value))
        return self.made[id(value)][1]

    def _is_of_numbers(self, value: Any) -> bool:
        held = value if type(value) is torch.Size else kinds.SLOTS.read(value).values() if type(value) is UUID else ()
        return any(isinstance(number, self.numbers) for number in held)

    def _new(self, value: Any) -> New:
        return self.new.setdefault(id(value), New(value, len(self.new)))

    def _without_attributes(self, value: torch.Tensor, where: str) -> New:
        given = [name for name in vars(value) if not is_fakes_own(name)]
        if given:
            raise _leak(value, f"{where} was given a tensor made in the step with an attribute of its own, {given[0]}",
                        "keep what it says beside the tensor, in a tuple or a dict")
        return self._new(value)

    def _made(self, value: Any, where: str) -> Value:
        """An object that the step made, or one from before that was out of its sight."""
        kind = type(value)
        if kind in (dict, list, tuple, set, frozenset):
            return self.tree(kind, value if kind is dict else dict(enumerate(value)), where)
        held = value() if isinstance(value, weakref.ref) else value
        if held is None or not isinstance(value, (dict, list, set, frozenset)) and not self._is_recent(held):
            source = None if isinstance(value, (types.FunctionType, type, types.ModuleType)) else kept_in_module(value)
            return Const(value) if source is None else Existing(source, value)
        try:
            found = recipe(value)
        except Exception as error:
            what = f"{where} was given a {kind.__qualname__} made in the step, which cannot be made again at each call"
            raise _leak(value, what, "return or store tensors, numbers, and containers and objects of them") from error
        if found is None:
            return Const(value)
        made = Made(kind, found.make, ())
        self.made[id(value)] = value, made
        made.args = tuple(v if isinstance(v, Const) else self.value(v, where) for v in found.args)
        self.open.discard(id(value))  # from here on it may hold itself
        made.parts = tuple(self.value(part, where) for part in found.parts)
        return made

    def _is_recent(self, value: Any) -> bool:
        """Whether an object was made in the step, as far as the garbage collector, which follows it, can tell.

        What it does not follow (`object()`) is from before where the step could see it, or a module has it.
        """
        if self.snap.new_ids is None:
            return True
        if not gc.is_tracked(value):
            reached = self.snap.reachable
            before = [[v for _, v in reached.roots], *(container.before.values() for container in reached.containers)]
            return not any(held is value for held in chain(*before)) and kept_in_module(value) is None
        self.new_ids = self.new_ids or self.snap.new_ids()
        return id(value) in self.new_ids

    def tree(self, kind: type, contents: Contents, where: str) -> Tree:
        """A plain container described by its contents; a copy of globals has no names that are there for a trace."""
        if "__builtins__" in contents:
            contents = {key: held for key, held in contents.items() if not is_added(key, held)}
        keys = tuple(self.value(key, where) for key in contents)
        return Tree(kind, keys, tuple(self.value(v, f"{where}[{k!r}]") for k, v in contents.items()))

    def refuse_growth(self) -> None:
        """Refuses lists that are longer at each call, and asks for another capture where that may do without them."""
        if self.grown:
            source, count, held = self.grown[0]
            what = f"{source} grows by {count} values, at each call, and the step reads it"
            leak = _leak(held, what, REMEDY)
            leak.grown = frozenset(source.path for source, _, _ in self.grown)
            raise leak


def _leak(held: Any, what: str, remedy: str) -> LeakError:
    error = LeakError(what, remedy=remedy)
    error.held = held
    return error


def _extensions(snap: Snapshot, described: _Described) -> Iterator[changes.Effect]:
    """What has been appended to lists between two calls of schedulers."""
    for stand_in in snap.substitutes.lists:
        source = vars(stand_in)["source"]
        now = dict(enumerate(taken(stand_in)))
        before, now = _around(snap, described.calls, id(stand_in), {}, now)
        if len(now) > len(before):
            tree = described.tree(list, {k: v for k, v in now.items() if k not in before}, source.text)
            yield changes.Effect(source, changes.EXTEND, value=tree)


def _around(snap: Snapshot, call: int, held: int, first: Contents, now: Contents) -> tuple[Contents, Contents]:
    """What a container, by its id, held before and after what a step did between two calls of schedulers."""
    noted = snap.substitutes.noted
    before = noted[call - 1].after.get(held, first) if call else first
    return before, noted[call].before.get(held, before) if call < len(noted) else now


def _differences(snap: Snapshot, container: Container, described: _Described) -> Iterator[changes.Effect]:
    """What has changed in one container between two calls of schedulers; in tensors, at the end."""
    kind = container.kind
    at_end, lifted = described.calls == len(snap.substitutes.noted), snap.substitutes.lifted
    if kind is kinds.TENSOR:
        if at_end:
            yield from _tensor_differences(snap, container, described)
        return
    first = {k: lifted.get((id(container.value), k), v) if type(k) in (str, int) else v
             for k, v in container.before.items()} if lifted else container.before
    before, now = _around(snap, described.calls, id(container), first, kind.read(container.value) if at_end else {})
    if len(now) != len(before) or not all(map(_same_entry, now.items(), before.items())):
        container.changed = True
        if kind in (kinds.LIST, kinds.SET, kinds.DEQUE):
            yield _new_contents(container, now, before, described)
        else:
            yield from _entry_differences(snap, container, now, before, described)


def _new_contents(container: Container, now: Contents, before: Contents, described: _Described) -> changes.Effect:
    kind, source = container.kind, container.source
    tree = described.tree(list, now, source.text)
    grown = len(now) > len(before) > 0 and all(now[key] is before[key] for key in before if key in now)
    added = tree.values[len(before):] if grown else ()
    new = [v.value for v in nested(added) if isinstance(v, New)]
    new += [v.value for v in added if isinstance(v, Existing) and v.after is not None]
    if new or (added and kind is not kinds.SET):
        described.grown.append((source, len(now) - len(before), [*new, None][0]))
    return changes.Effect(source, changes.SET_CONTENTS, Const(kind), tree)


def _entry_differences(
    snap: Snapshot, container: Container, now: Contents, before: Contents, described: _Described
) -> Iterator[changes.Effect]:
    source, is_mapping = container.source, container.kind is kinds.MAPPING
    put, delete = changes.SET_ATTR, changes.DEL_ATTR
    if is_mapping:
        put, delete = changes.SET_ITEM, changes.DEL_ITEM
    elif isinstance(source, (Vars, Globals)):
        put, delete = changes.SET_NAME, changes.DEL_NAME
    moved = _moved(now, before)
    for key in [key for key in before if key not in now or key in moved]:
        yield changes.Effect(source, delete, described.value(key, source.text) if is_mapping else Const(key))
    for key, value in now.items():
        if key in before and _unchanged(value, before[key]) and key not in moved:
            continue
        if not is_plain(value) and key in set_on_entry(type(container.owner)):  # type: ignore[arg-type]
            continue  # a handle of C that only the `with` statement under way needs: `torch.inference_mode()`
        new = described.value(value, snap.reachable.child(container, key).text)
        yield changes.Effect(source, put, described.value(key, source.text) if is_mapping else Const(key), new)


def _unchanged(now: Any, before: Any) -> bool:
    return now is before or (is_plain(now) and type(now) is type(before) and bool(now == before))


def _same_entry(now: tuple[Any, Any], before: tuple[Any, Any]) -> bool:
    return _unchanged(now[0], before[0]) and _unchanged(now[1], before[1])


def _moved(now: Contents, before: Contents) -> dict[Any, None]:
    """The keys that were there before and were put in anew: behind those that are in their old order."""
    rest = iter(before)
    kept = len([*takewhile(lambda key: any(_unchanged(key, other) for other in rest), now)])
    return dict.fromkeys(key for key in [*now][kept:] if key in before)


def _tensor_differences(snap: Snapshot, container: Container, described: _Described) -> Iterator[changes.Effect]:
    source, before = container.source, container.before
    alias = snap.substitutes.aliases.of.get(id(container.value))  # of a view
    value = container.value if alias is None or container.value.requires_grad else alias
    with snap.unwritten(value):
        now, has_history = container.kind.read(value), value.grad_fn is not None
    for name in now:
        if _unchanged(now[name], before[name]) or (name == "requires_grad" and has_history):
            continue  # with a history comes the flag
        if name == "grad":
            yield changes.Effect(source, changes.SET_GRAD, value=described.value(now[name], f"{source}.grad"))
        elif name == "requires_grad":
            yield changes.Effect(source, changes.SET_ATTR, Const(name), Const(now[name]))
        else:
            raise _hooked(source)
    if now["grad"] is before["grad"] is None:
        if snap.reachable.child(container, "grad").path in snap.replaced_gradients:  # a later call may find one
            yield changes.Effect(source, changes.SET_GRAD)


def _autograd_effects(found: TensorInput, original: torch.Tensor) -> Iterator[changes.Effect]:
    """What the step asked of autograd for a tensor with a history, of which there is an alias."""
    alias, source = found.tensor, found.source
    if any(getattr(alias, name) for name in HOOK_TABLES):
        raise _hooked(source)
    if alias.retains_grad and not original.retains_grad:
        yield changes.Effect(source, changes.CALL, Const("retain_grad"))
    if found.beginning is not None and alias.grad_fn is None:
        if alias.requires_grad:
            raise LeakError(f"{source} is detached in place, and requires grad again", remedy="use tensor.detach()")
        yield changes.Effect(source, changes.CALL, Const("detach_"))


def _hooked(source: Source) -> LeakError:
    remedy = "add hooks to inputs before the step; hooks on tensors of the step are free"
    return LeakError(f"a hook was added to {source} in the step", remedy=remedy)
