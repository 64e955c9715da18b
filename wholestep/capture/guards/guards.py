"""Guards: what must still be true for a captured program to serve a call.

A guard is (source, kind, expected). All guards of a program are derived from the containers, in the order of the
walk, so that the first one that fails is the one nearest to the user's arguments; the reason for a recompile is
that guard in words: ``L['x'] requires_grad: expected True, found False``.
"""

from __future__ import annotations

import re
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.capture.guards.compared_values import BY_CONTENTS, META, NUMBERS, is_one_of_a_kind, is_plain, same_plain
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.handlers import GETTERS, OPERATORS
from wholestep.capture.snapshot.reachable import Container, Reachable
from wholestep.capture.sources import Source, variable
from wholestep.torch_compat import HOOK_TABLES

STATE = "global state"
SHARED = "is", "is still"  # kinds of guards of what stands in two places


@dataclass(frozen=True, eq=False, slots=True)
class Guard:
    """One condition; `holds` compares it with another's ``expected``, and `str` says it in words.

    Attributes:
        source: where the value is found; None for settings that hold everywhere.
        kind: what is compared there: a "value", "type", "code", "identity" or "number", the metadata of a "tensor", the
            "structure of" a container; an "object" that is not looked into; "is" for one that stands in two
            places, "is still" for one of two that may become one: `expected` is the place where it was met first.
        expected: what was found when the step was captured.
    """

    source: Source | None
    kind: str
    expected: Any

    @property
    def key(self) -> tuple[str, str]:
        """Identifies it among the guards of a snapshot."""
        return self.source.path if self.source else "", self.kind

    @property
    def where(self) -> str:
        """The source in words."""
        return self.source.text if self.source else STATE

    def holds(self, found: Any) -> bool:
        """True when a value found later is as expected; plain values are equal only within one type."""
        if self.kind == "identity":
            return self.expected is found
        if isinstance(self.expected, Hooks):
            return self.expected.fit(found)
        if self.kind != "value" or type(self.expected) is not type(found):
            return bool(type(self.expected) is type(found) and self.expected == found)
        return bool(same_plain(found, self.expected) or (self.expected != self.expected and found != found))

    def __str__(self) -> str:
        return self.where + (f" is {self.expected}" if self.kind in SHARED else f" {self.kind}: {self._expectation()}")

    def _expectation(self) -> str:
        if self.kind == "arguments":
            return _call(self.expected)
        if self.kind == "tensor":
            known = META[:-2] if self.expected[-2] is None else META  # of symbolic sizes
            return ", ".join(f"{name} {_show(value)}" for name, value in zip(known, self.expected, strict=False))
        if not self.kind.startswith("structure") or isinstance(self.expected, Hooks):
            return _show(self.expected)
        kind, keys = self.expected
        return f"{kind.__name__} " + (f"of {keys}" if isinstance(keys, int) else f"with {', '.join(map(_show, keys))}")


@dataclass(frozen=True)
class GuardFailure:
    """The first guard that a call does not meet, in words.

    Attributes:
        varying: paths of all plain numbers that are others now, when the first that failed is one of them.
        outcomes: where all guards held, and the program met a value that Python had decided on otherwise: its decisions
            up to there, as this call has them.
        by_value: whether a plain value (a number, a string) has changed.
    """

    reason: str
    varying: frozenset[str] = field(default=frozenset(), compare=False)
    outcomes: tuple[str, ...] = ()
    by_value: bool = field(default=False, compare=False)


_IN_OPTIMIZER = re.compile(r"\['(param_groups|state)'\]\[")
STATE_NAMES = (
    "grad mode", "inference mode", "autocast on cpu", "autocast on cuda", "autocast dtype on cpu",
    "autocast dtype on cuda", "autocast cache", "default dtype", "deterministic algorithms", "kernels of attention",
    "default device", "flags that torch keeps in Python", "hooks of all modules and optimizers",
    "denormal numbers being flushed", "kernels replaced in Python",
)


class Missing:
    """The type of a global variable that is named and not there, or is one of Python's own."""


@dataclass(frozen=True)
class Hooks:
    """A table of hooks: as many as there were, and under the numbers that they had if the step changes it."""

    numbers: tuple[int, ...]
    changed: bool

    def fit(self, found: Any) -> bool:
        same = isinstance(found, Hooks) and len(found.numbers) == len(self.numbers)
        return same and (not self.changed or found.numbers == self.numbers)

    def __repr__(self) -> str:
        count = f"{len(self.numbers)} hook{'s' * (len(self.numbers) != 1)}"
        return f"{count} numbered {', '.join(map(str, self.numbers))}" if self.changed and self.numbers else count


def _structure(reached: Reachable, container: Container) -> Any:
    kind = type(container.owner)
    if container.numbered:
        return Hooks(tuple(container.before), container.changed)
    if not container.ordered:
        return kind, tuple(sorted(k for k in container.before if k not in container.ignored or k in container.lifted))
    if container.kind in (kinds.LIST, kinds.TUPLE, kinds.SET, kinds.FROZENSET, kinds.DEQUE):
        return kind, len(container.before)
    return kind, tuple(
        key if is_plain(key) else reached.first.get(id(key), f"{type(key).__name__} object")
        for key in container.before if key not in container.ignored or key in container.lifted
    )


def guards(reached: Reachable) -> list[Guard]:
    """All guards of what a walk met, parents before children."""
    found: list[Guard] = [Guard(None, name, value) for name, value in zip(STATE_NAMES, reached.state, strict=True)]
    call = reached.call
    found.append(Guard(None, "arguments", (len(call.args), tuple(call.kwargs))))
    found += [Guard(variable(name), "value", value) for name, value in reached.outside.environment.items()]
    arguments = {number.source.path for number in reached.numbers if number.container is None}
    for source, value in reached.roots:
        if source.path in arguments:
            found.append(Guard(source, "number", type(value)))
        else:
            _value_guard(reached, source, value, found)
    for container in reached.containers:
        if container.kind is kinds.TENSOR:
            found.append(Guard(container.source, "tensor", reached.metadata[id(container.value)]))
        elif container.kind is kinds.GLOBALS:
            missing = (name for name in container.value.names if name not in container.before)
            found += [Guard(reached.child(container, name), "type", Missing) for name in missing]
        elif container.kind not in kinds.USED or container.value.library is None:  # of which there may be two
            found.append(Guard(container.source, f"structure of {container.kind.name}", _structure(reached, container)))
        names = dict(container.children)
        for key, value in container.before.items():
            source = names.get(key) or reached.child(container, key)
            if key in container.lifted:
                found.append(Guard(source, "number", _number_type(key, value)))
            elif container.kind is kinds.TENSOR and key != "grad":
                if key in HOOK_TABLES and key not in container.ignored and value is None:
                    found.append(Guard(source, f"structure of {kinds.MAPPING.name}", Hooks((), False)))
            elif key not in container.ignored:
                _value_guard(reached, source, value, found)
    return found


def _number_type(key: Any, value: Any) -> Any:
    if type(value) is tuple:
        return [type(v) for v in value]
    return float if key == "lr" else type(value)  # a learning rate of 1 is one of 1.0


def _value_guard(reached: Reachable, source: Source, value: Any, found: list[Guard]) -> None:
    first = reached.first.get(id(value))
    if is_plain(value):
        found.append(Guard(source, "value", value))
    elif isinstance(value, types.FunctionType) and first is not None:
        apart = reached.apart.get(id(value.__globals__))
        found.append(Guard(source, "code", value.__code__ if apart is None else (value.__code__, apart)))
        if first.path != source.path:
            found.append(Guard(source, "is still", first))  # what else it has is guarded there
    elif isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType, *OPERATORS)) or \
            is_one_of_a_kind(type(value)):
        found.append(Guard(source, "identity", value))
    elif first is None or isinstance(value, GETTERS):
        found.append(Guard(source, "type", type(value)))
        found.append(_of_object(source, value))
    elif isinstance(value, BY_CONTENTS):
        found.append(Guard(source, "type", type(value)))
        if source.path in reached.repeated:
            found.append(Guard(source, "is still", first))
    elif first.path == source.path:
        found.append(Guard(source, "type", type(value)))
    else:
        found.append(Guard(source, "is", first))


def _of_object(source: Source, value: Any) -> Guard:
    """The guard of an object that is not walked: the same object, or an equal one if its class defines equality."""
    kind: Any = type(value)
    if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None and kind.__hash__ is not object.__hash__:
        return Guard(source, "object", value)
    try:
        return Guard(source, "identity", weakref.ref(value))  # one for all guards, which keep nothing alive so
    except TypeError:
        return Guard(source, "identity", value)


def compare(old: list[Guard], new: list[Guard]) -> GuardFailure | None:
    """The first guard of ``old`` that ``new``, derived from a later call, does not meet; None when all hold."""
    later, earlier = {g.key: g for g in new}, {g.key: g for g in old}
    for guard in new:
        if guard.kind == "is" and not _are_one(guard, earlier):
            return GuardFailure(f"{_pair(guard)}: expected two objects, found the same one")
    for guard in old:
        match = later.get(guard.key)
        if _are_one(guard, later) if guard.kind in SHARED else match and guard.holds(match.expected):
            continue
        if guard.kind in SHARED:
            return GuardFailure(f"{_pair(guard)}: expected the same object, found two")
        varying = frozenset[str]()
        if match is not None and _is_number(guard, match):
            varying = _varying(old, later)
        elif match is not None and _has_grown(guard, match):
            varying = frozenset([guard.key[0]])
        elif guard.kind == f"structure of {kinds.MAPPING.name}":  # an optimizer's step counts, after its first step
            fresh = (g for g in new if g.key not in earlier and _IN_OPTIMIZER.search(g.key[0]))
            varying = frozenset(g.key[0] for g in fresh if g.kind == "value" and type(g.expected) in NUMBERS)
        return GuardFailure(_reason(guard, match, later), varying, by_value=guard.kind == "value")
    return None


def _are_one(guard: Guard, others: dict[tuple[str, str], Guard]) -> bool:
    """Whether other guards have one object in both places, whichever of them they met first."""
    here, first = (others.get((path, guard.kind)) for path in (guard.key[0], guard.expected.path))
    one, two = here.expected if here else guard.source, first.expected if first else guard.expected
    return bool(one == two)


def _is_number(guard: Guard, match: Guard) -> bool:
    return guard.kind == "value" and type(guard.expected) is type(match.expected) in NUMBERS


def _has_grown(guard: Guard, match: Guard) -> bool:
    """Whether a list of the step's own, none that it is given, is longer: one that it may not read."""
    before, now = guard.expected, match.expected
    return (guard.kind in (f"structure of {kinds.LIST.name}", f"structure of {kinds.DEQUE.name}")
            and before[0] is now[0] and before[1] < now[1] and not guard.key[0].startswith(("args", "kwargs")))


def _varying(old: list[Guard], later: dict[tuple[str, str], Guard]) -> frozenset[str]:
    """The plain numbers that differ between two calls."""
    pairs = ((g, later.get(g.key)) for g in old)
    return frozenset(g.key[0] for g, m in pairs if m and _is_number(g, m) and not g.holds(m.expected))


def _pair(guard: Guard) -> str:
    """``L['a'] is L['b']``, the one met first on the left."""
    return f"{guard.expected} is {guard.source}"


def _reason(guard: Guard, match: Guard | None, later: dict[tuple[str, str], Guard]) -> str:
    where = guard.where
    if guard.kind == "arguments":
        return f"arguments: expected {_call(guard.expected)}, found {_call(match.expected if match else None)}"
    if match is None:
        other = next((g for (path, _), g in later.items() if path == guard.key[0]), None)
        if other is None:
            return f"{where}: expected to be there, found missing"
        return f"{where}: expected {_named(guard)}, found {_named(other)}"
    if guard.kind == "tensor":
        name, old, new = next((n, a, b) for n, a, b in zip(META, guard.expected, match.expected, strict=True) if a != b)
        return f"{where} {name}: expected {_show(old)}, found {_show(new)}"
    if guard.kind.startswith("structure") and not isinstance(guard.expected, Hooks):
        return f"{where}: {_keys(guard.expected, match.expected)}"
    kind = "" if guard.kind == "value" or isinstance(guard.expected, Hooks) else f" {guard.kind}"
    return f"{where}{kind}: expected {_show(guard.expected)}, found {_show(match.expected)}"


def _named(guard: Guard) -> str:
    """What one guard stands for, beside another of a different kind."""
    return f"a {_show(guard.expected)}" if guard.kind == "type" else _show(guard.expected)


def _call(expected: Any) -> str:
    if expected is None:
        return "none"
    return f"{expected[0]} by position and {', '.join(expected[1]) or 'none'} by name"


def _keys(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    if old[0] is not new[0]:
        return f"expected {old[0].__name__}, found {new[0].__name__}"
    if isinstance(old[1], int):
        return f"expected length {old[1]}, found {new[1]}"
    missing = [key for key in old[1] if key not in new[1]]
    extra = [key for key in new[1] if key not in old[1]]
    if missing:
        return f"expected key {_show(missing[0])}, found it missing"
    if extra:
        return f"expected missing key {_show(extra[0])}, found it"
    return f"expected keys in order {', '.join(map(_show, old[1]))}, found {', '.join(map(_show, new[1]))}"


def _show(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, types.CodeType):
        return f"{value.co_qualname} at line {value.co_firstlineno}"
    if isinstance(value, Source):
        return value.text
    text = repr(list(value) if isinstance(value, torch.Size) else value)
    return text if len(text) <= 120 else text[:117] + "…"
