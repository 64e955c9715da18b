"""Effects: what a step changed in the Python world, as values that can be done again without running it.

`differences` describes them, `replay_code` writes the code that does them in a later call. A table of two templates
says how each reads and which statement does it: `container`, `key` and `value` are variables of that code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wholestep.capture.container_access import base_of
from wholestep.capture.effects.recipes import NOTHING, Const, Existing, Made, New, Tree, Value, nested
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.sources import Source
from wholestep.ir import InputKind


class Change(NamedTuple):
    """A kind of change: how it reads, and the statement that does it."""

    text: str
    code: str


SET_ITEM = Change("{source}[{key}] = {value}", "base_of({container}).__setitem__({container}, {key}, {value})")
DEL_ITEM = Change("del {source}[{key}]", "base_of({container}).__delitem__({container}, {key})")
# Attributes, slots, classes, closure cells and ``.requires_grad``; and names in a table.
SET_ATTR = Change("{source}.{name} = {value}", "{container}.{name} = {value}")
DEL_ATTR = Change("del {source}.{name}", "del {container}.{name}")
SET_NAME = Change("{source}.{name} = {value}", "{container}[{name!r}] = {value}")
DEL_NAME = Change("del {source}.{name}", "{container}.pop({name!r}, None)")
SET_GRAD = Change("{source}.grad = {value}", "{container}.grad = {value}")
# All of a list, set or deque, which stays the same object; the key is its kind.
SET_CONTENTS = Change("{source}[:] = {value}", "refill({key}, {container}, {value})")
# A list or deque that the step appends to and does not read.
EXTEND = Change("{source} += {value}", "base_of({container}).extend({container}, {value})")
# A learning-rate scheduler moves on, after all else; a tensor retains its gradient.
CALL = Change("{source}.{name}{value}", "{container}.{name}(*{value})")


@dataclass(frozen=True, eq=False)
class Effect:
    """One change at ``source``, the container."""

    source: Source
    change: Change
    key: Value = NOTHING
    value: Value = NOTHING

    @property
    def parts(self) -> dict[str, Value]:
        """The key and the value that must be made before the change."""
        return {name: getattr(self, name) for name in ("key", "value") if f"{{{name}}}" in self.change.code}

    @property
    def name(self) -> Any:
        """The key as a name."""
        return self.key.value if isinstance(self.key, Const) else ""

    def statement(self, variables: dict[str, str]) -> str:
        """The statement that does it, given the code's variables by the names that templates have for them."""
        return self.change.code.format(**variables, name=self.name)

    def __str__(self) -> str:
        return self.change.text.format(**vars(self), name=self.name)


def refill(kind: kinds.ContainerKind, container: Any, built: Any) -> None:
    """Makes the contents of a container those of a new one."""
    kind.write(container, dict(enumerate(built)))


# What statements call.
FUNCTIONS: dict[str, Any] = {"base_of": base_of, "refill": refill}


def _values_of(effects: Sequence[Effect], result: Value) -> Iterator[Value]:
    return nested([result, *(value for effect in effects for value in effect.parts.values())])


def new_values(effects: Sequence[Effect], result: Value = NOTHING) -> list[Any]:
    """The distinct tensors and numbers made in the step that effects and result hold, in the order of `New.index`."""
    found = {v.index: v.value for v in _values_of(effects, result) if isinstance(v, New)}
    return [found[index] for index in sorted(found)]


def forget(effects: Sequence[Effect], result: Value = NOTHING) -> None:
    """Lets go of the objects that effects and result were described from; they can be replayed as before."""
    for value in _values_of(effects, result):
        if isinstance(value, (New, Existing)):
            value.value = None


def read_by(effects: Sequence[Effect], result: Value = NOTHING) -> set[str]:
    """The paths of what a replay of effects and result looks at in the call."""
    existing = {value.source.path for value in _values_of(effects, result) if isinstance(value, Existing)}
    return existing | {effect.source.path for effect in effects}


def state_outputs(effects: Sequence[Effect]) -> dict[int, tuple[str, InputKind]]:
    """Where effects leave the gradients and the optimizer state that the step makes: `New.index` -> source, kind.

    Sources are written as those of inputs are, so that a later step finds the same words for what is there then.
    """
    found: dict[int, tuple[str, InputKind]] = {}

    def collect(value: Value, where: str) -> None:
        if isinstance(value, New) and _STATE.search(where):
            found.setdefault(value.index, (where, "state"))
        elif isinstance(value, Made) and value.parts:  # the items of a dict of another class
            collect(value.parts[0], where)
        elif isinstance(value, Tree):
            for key, inner in zip(value.keys, value.values, strict=True):
                collect(inner, f"{where}[{key}]")

    for effect in effects:
        if effect.change is SET_GRAD and isinstance(effect.value, New):
            found[effect.value.index] = f"{effect.source}.grad", "grad"
        elif effect.change is SET_ITEM:
            collect(effect.value, f"{effect.source}[{effect.key}]")
        elif effect.change is SET_CONTENTS:
            collect(effect.value, str(effect.source))
    return found


_STATE = re.compile(r"\.state\[.*\]\[[^\[\]]*\]$")


def replaced_containers(effects: Sequence[Effect]) -> frozenset[tuple[str, Any]]:
    """Path and key of the places where effects put a container that they make."""
    return frozenset((effect.source.path, effect.key.value) for effect in effects
                     if isinstance(effect.value, (Made, Tree)) and isinstance(effect.key, Const))  # fmt: skip
