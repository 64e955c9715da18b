"""Guards: what must still be true for a captured program to serve a call.

A guard is (source, kind, expected). All guards of a program are derived from its places, in the order of the
walk, so that the first one that fails is the one nearest to the user's arguments; the reason for a recompile is
that guard in words: ``L['x'] requires_grad: expected True, found False``.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture import boxes
from wholestep.capture.source import Source
from wholestep.capture.walk import Place, Walk, is_plain

STATE = "global state"


@dataclass(frozen=True, eq=False)
class Guard:
    """One condition: ``kind`` says what is compared at ``source``; `holds` compares it with another's ``expected``."""

    source: Source | None
    kind: str
    expected: Any

    def holds(self, found: Any) -> bool:
        """True when a value found later is as expected; plain values are equal only within one type."""
        if self.kind in ("identity", "hook"):
            return self.expected is found
        if self.kind != "value" or type(self.expected) is not type(found):
            return bool(type(self.expected) is type(found) and self.expected == found)
        return bool(self.expected is found or self.expected == found or
                    (self.expected != self.expected and found != found))

    def __str__(self) -> str:
        where = self.source.text if self.source else STATE
        return f"{where} is {self.expected}" if self.kind == "is" else f"{where} {self.kind}: {_show(self.expected)}"


@dataclass(frozen=True)
class GuardFailure:
    """The first guard that a call does not meet, in words."""

    reason: str


META = ("shape", "stride", "dtype", "device", "layout", "requires_grad", "is_leaf", "type")


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a captured program relies on in a tensor, in the order of `META`."""
    strided = tensor.layout == torch.strided
    return (list(tensor.shape), list(tensor.stride()) if strided else None, tensor.dtype, tensor.device, tensor.layout,
            tensor.requires_grad, tensor.is_leaf, type(tensor))


def global_state() -> tuple[Any, ...]:
    """The settings of torch that change what a step computes, in the order of `STATE_NAMES`."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(),
    )


STATE_NAMES = (
    "grad mode", "inference mode", "autocast on cpu", "autocast on cuda", "autocast dtype on cpu",
    "autocast dtype on cuda", "autocast cache", "default dtype", "default device", "deterministic algorithms",
)


def _structure(walk: Walk, place: Place) -> tuple[Any, ...]:
    kind = type(place.owner)
    keys = tuple(
        key if is_plain(key) else walk.first[id(key)].path if id(key) in walk.first else f"{type(key).__name__} object"
        for key in place.before if key not in place.ignored
    ) if place.box not in (boxes.LIST, boxes.TUPLE, boxes.SET, boxes.FROZENSET, boxes.DEQUE) else len(place.before)
    return kind, keys


def guards(walk: Walk) -> list[Guard]:
    """All guards of what a walk met, parents before children."""
    found: list[Guard] = [Guard(None, name, value) for name, value in zip(STATE_NAMES, global_state(), strict=True)]
    call = walk.call
    found.append(Guard(None, "arguments", (len(call.args), tuple(call.kwargs))))
    for source, value in walk.roots:
        _value_guard(walk, source, value, found)
    for place in walk.places:
        if place.box is boxes.TENSOR:
            tensor = place.holder
            found += [Guard(place.source, name, m) for name, m in zip(META, metadata(tensor), strict=True)]
            found.append(Guard(place.source, "grad", "None" if place.before["grad"] is None else "a tensor"))
        else:
            found.append(Guard(place.source, f"structure of {place.box.name}", _structure(walk, place)))
        names = dict(place.children)
        for key, value in place.before.items():
            if key in place.ignored or (place.box is boxes.TENSOR and key in ("grad", "requires_grad") and value is None):
                continue
            if place.box is boxes.TENSOR and key == "requires_grad":
                continue
            source = names.get(key)
            _value_guard(walk, walk.child(place, key) if source is None else source, value, found)
    return found


def _value_guard(walk: Walk, source: Source, value: Any, found: list[Guard]) -> None:
    first = walk.first.get(id(value))
    if is_plain(value):
        found.append(Guard(source, "value", value))
    elif isinstance(value, types.FunctionType):
        found.append(Guard(source, "code", value.__code__))
    elif isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType, torch.Generator)):
        found.append(Guard(source, "identity", value))
    elif first is None or isinstance(value, (tuple, frozenset, types.MethodType)):
        found.append(Guard(source, "kind", type(value)))
    elif first.path == source.path:
        found.append(Guard(source, "kind", type(value)))
    else:
        found.append(Guard(source, "is", first.text))


def compare(old: list[Guard], new: list[Guard]) -> GuardFailure | None:
    """The first guard of ``old`` that ``new``, derived from a later call, does not meet; None when all hold."""
    later = {(g.source.path if g.source else "", g.kind): g for g in new}
    earlier = {(g.source.path if g.source else "", g.kind) for g in old}
    for guard in new:
        if guard.kind == "is" and ((guard.source.path if guard.source else ""), "is") not in earlier:
            return GuardFailure(f"{_pair(guard)}: expected two objects, found the same one")
        if guard.source is not None and guard.kind == "is":
            continue
    for guard in old:
        path = guard.source.path if guard.source else ""
        match = later.get((path, guard.kind))
        if match is not None and guard.holds(match.expected):
            continue
        if guard.kind == "is":
            return GuardFailure(f"{_pair(guard)}: expected the same object, found two")
        return GuardFailure(_reason(guard, match, later))
    return None


def _pair(guard: Guard) -> str:
    """``L['a'] is L['b']``, the one met first on the left."""
    return f"{guard.expected} is {guard.source}"


def _reason(guard: Guard, match: Guard | None, later: dict[tuple[str, str], Guard]) -> str:
    where = guard.source.text if guard.source else STATE
    if guard.kind == "arguments":
        return f"arguments: expected {_call(guard.expected)}, found {_call(match.expected if match else None)}"
    if match is None:
        path = guard.source.path if guard.source else ""
        other = next((g for (p, _), g in later.items() if p == path), None)
        if other is None:
            return f"{where}: expected to be there, found missing"
        return f"{where}: expected {guard.kind} {_show(guard.expected)}, found {other.kind} {_show(other.expected)}"
    if guard.kind.startswith("structure"):
        return f"{where}: {_keys(guard.expected, match.expected)}"
    kind = "" if guard.kind == "value" else f" {guard.kind}"
    return f"{where}{kind}: expected {_show(guard.expected)}, found {_show(match.expected)}"


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
        return f"expected key {missing[0]!r}, found it missing"
    if extra:
        return f"expected missing key {extra[0]!r}, found it"
    return f"expected keys in order {_show(list(old[1]))}, found {_show(list(new[1]))}"


def _show(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, types.CodeType):
        return f"{value.co_qualname} at line {value.co_firstlineno}"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
