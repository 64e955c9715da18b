"""Replays a step's effects and makes its result by following sources: the plain form of what `applier` generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wholestep.capture.boxes import MISSING
from wholestep.capture.effects import (
    CallStep,
    DelAttr,
    DelItem,
    Effect,
    Extend,
    SetAttr,
    SetContents,
    SetGrad,
    SetItem,
    fill,
)
from wholestep.capture.source import Call, Global, Vars
from wholestep.capture.values import NOTHING, Const, Existing, New, Record, Value, assemble, assemble_record


def build(value: Value, call: Call, made: Sequence[Any], memo: dict[int, Any]) -> Any:
    """The Python object that a `Value` stands for in one call.

    Args:
        made: this call's new values.
        memo: what was built before in this call, so that a container held twice stays one.
    """
    if isinstance(value, New):
        return made[value.index]
    if isinstance(value, Existing):
        return value.source.read(call)
    if isinstance(value, Const):
        return value.value
    if id(value) not in memo:
        if isinstance(value, Record):
            parts = [[build(v, call, made, memo) for v in tree] for tree in
                     (value.items.keys, value.items.values, value.attributes.keys, value.attributes.values)]
            memo[id(value)] = assemble_record(value.items.prototype, *parts)
        else:
            keys = [build(key, call, made, memo) for key in value.keys]
            memo[id(value)] = assemble(value.prototype, keys, [build(item, call, made, memo) for item in value.values])
    return memo[id(value)]


def replay(effects: Sequence[Effect], call: Call, made: Sequence[Any], result: Value = NOTHING) -> Any:
    """Does the changes of a step again in a later call, with that call's new values, and gives its result.

    Every new value is made and every holder found before the first is assigned.
    """
    memo: dict[int, Any] = {}
    outcome = build(result, call, made, memo)
    ready: list[tuple[Effect, Any, Any, Any]] = []
    for effect in effects:
        key = build(effect.key, call, made, memo) if isinstance(effect, (SetItem, DelItem)) else None
        value: Any = MISSING
        if isinstance(effect, (SetItem, SetAttr, SetGrad, SetContents, Extend)):
            value = build(effect.value, call, made, memo)
        ready.append((effect, effect.source.read(call), key, value))
    for entry in ready:
        _assign(*entry)
    return outcome


def _assign(effect: Effect, holder: Any, key: Any, value: Any) -> None:
    if isinstance(effect, SetGrad):
        holder.grad = value
    elif isinstance(effect, SetItem):
        holder[key] = value
    elif isinstance(effect, DelItem):
        del holder[key]
    elif isinstance(effect, Extend):
        holder.extend(value)
    elif isinstance(effect, CallStep):
        holder.step(*effect.args)
    elif isinstance(effect, SetContents):
        fill(effect.box, holder, value)
    elif isinstance(effect, (SetAttr, DelAttr)):
        if isinstance(effect.source, (Vars, Global)):
            holder.pop(effect.name, None) if value is MISSING else holder.__setitem__(effect.name, value)
        elif value is MISSING:
            delattr(holder, effect.name)
        else:
            setattr(holder, effect.name, value)
