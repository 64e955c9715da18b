"""Replays a step's effects and makes its result by following sources: the plain form of what `applier` generates."""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType
from typing import Any

from wholestep.capture.effects.effects import Effect
from wholestep.capture.effects.recipes import fill
from wholestep.capture.effects.values import NOTHING, Const, Existing, Made, New, Value, assemble, is_late
from wholestep.capture.sources.source import Call


def build(value: Value, call: Call, made: Sequence[Any], memo: dict[int, Any]) -> Any:
    """The Python object that a `Value` stands for in one call; see `_build`."""
    cells: list[Made] = []
    built = _build(value, call, made, memo, cells)
    while cells:
        cell = cells.pop()
        fill(memo[id(cell)], *(_build(v, call, made, memo, cells) for v in cell.parts))
    return built


def _build(value: Value, call: Call, made: Sequence[Any], memo: dict[int, Any], cells: list[Made]) -> Any:
    """The Python object that a `Value` stands for in one call.

    Args:
        made: this call's new values.
        memo: what was built before in this call, so that a container held twice stays one.
        cells: closure cells, which are filled last, as a function may be in a cell of its own.
    """
    if isinstance(value, New):
        return made[value.index]
    if isinstance(value, Existing):
        return value.source.read(call)
    if isinstance(value, Const):
        return value.value
    if id(value) not in memo:
        if isinstance(value, Made):
            args = [_build(v, call, made, memo, cells) for v in value.args]
            memo[id(value)] = _build(value.make, call, made, memo, cells)(*args)
            if value.kind is CellType:
                cells.append(value)
            else:
                fill(memo[id(value)], *(_build(v, call, made, memo, cells) for v in value.parts))
        else:
            keys, items = ([_build(v, call, made, memo, cells) for v in some] for some in (value.keys, value.values))
            memo[id(value)] = assemble(value.kind, keys, items)
    return memo[id(value)]


def replay(effects: Sequence[Effect], call: Call, made: Sequence[Any], result: Value = NOTHING) -> Any:
    """Does the changes of a step again in a later call, with that call's new values, and gives its result.

    Every new value is made and every holder found before the first is assigned, but for those that are read late.
    """
    memo: dict[int, Any] = {}
    outcome = None if is_late(result) else build(result, call, made, memo)
    late = [e for e in effects if any(part is not None and is_late(part) for part in e.parts)]
    for some in ([e for e in effects if e not in late], late):
        ready: list[tuple[Effect, Any, Any, Any]] = []
        for effect in some:
            key, value = (None if part is None else build(part, call, made, memo) for part in effect.parts)
            ready.append((effect, effect.source.read(call), key, value))
        for effect, holder, key, value in ready:
            effect.assign(holder, key, value)
    return build(result, call, made, memo) if is_late(result) else outcome
