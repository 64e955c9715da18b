"""Effects: what a step changed in the Python world, as values that can be done again without running it.

`differences` describes them, `replay_code` writes the code that does them in a later call. Each effect says by two
templates how it reads and which statement does it: `container`, `key` and `value` are variables of that code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wholestep.capture.effects.values import NOTHING, Const, Existing, Made, New, Tree, Value, nested
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.sources import Globals, Source, Vars, base_of
from wholestep.ir import InputKind


@dataclass(frozen=True, eq=False)
class Effect:
    """One change at ``source``, the container; subclasses say which."""

    source: Source
    code = text = ""

    @property
    def parts(self) -> dict[str, Value]:
        """The key and the value that must be made before the change."""
        return {name: getattr(self, name) for name in ("key", "value") if hasattr(self, name)}

    def statement(self, variables: dict[str, str], constant: Callable[[Any], str]) -> str:
        """The statement that does it.

        Args:
            variables: those of the code, by the names that templates have for them.
            constant: gives the name of a constant.
        """
        own = {name: getattr(self, name) for name in ("name", "kind", "args") if hasattr(self, name)}
        shown = {name: value if isinstance(value, str) else constant(value) for name, value in own.items()}
        return self.code.format(**variables, **shown)

    def __str__(self) -> str:
        return self.text.format(**vars(self))


@dataclass(frozen=True, eq=False)
class SetItem(Effect):
    """``source[key] = value``."""

    key: Value
    value: Value
    text = "{source}[{key}] = {value}"
    code = "base_of({container}).__setitem__({container}, {key}, {value})"


@dataclass(frozen=True, eq=False)
class DelItem(Effect):
    """``del source[key]``."""

    key: Value
    text = "del {source}[{key}]"
    code = "base_of({container}).__delitem__({container}, {key})"


@dataclass(frozen=True, eq=False)
class SetAttr(Effect):
    """``source.name = value``, for attributes, slots, classes, closure cells and ``.requires_grad``."""

    name: str
    value: Value
    text = "{source}.{name} = {value}"

    @property
    def code(self) -> str:  # type: ignore[override]
        return "{container}[{name!r}] = {value}" if _is_table(self.source) else "{container}.{name} = {value}"


@dataclass(frozen=True, eq=False)
class DelAttr(Effect):
    """``del source.name``."""

    name: str
    text = "del {source}.{name}"

    @property
    def code(self) -> str:  # type: ignore[override]
        return "{container}.pop({name!r}, None)" if _is_table(self.source) else "del {container}.{name}"


@dataclass(frozen=True, eq=False)
class SetGrad(Effect):
    """``source.grad = value``."""

    value: Value
    text = "{source}.grad = {value}"
    code = "{container}.grad = {value}"


@dataclass(frozen=True, eq=False)
class SetContents(Effect):
    """The whole contents of a list, set, deque or reordered dict, the container staying the same object."""

    kind: kinds.ContainerKind
    value: Tree
    text = "{source}[:] = {value}"
    code = "refill({kind}, {container}, {value})"


@dataclass(frozen=True, eq=False)
class Extend(Effect):
    """``source.extend(values)``: a list or deque that the step appends to and does not read."""

    value: Tree
    text = "{source} += {value}"
    code = "base_of({container}).extend({container}, {value})"


@dataclass(frozen=True, eq=False)
class CallMethod(Effect):
    """``source.name(*args)``: a learning-rate scheduler moves on, after all else; a tensor retains its gradient."""

    name: str
    args: tuple[Any, ...] = ()
    code = "{container}.{name}(*{args})"

    def __str__(self) -> str:
        return f"{self.source}.{self.name}({', '.join(map(repr, self.args))})"


def _is_table(source: Source) -> bool:
    """Whether what is at a source is a table of names."""
    return isinstance(source, (Vars, Globals))


def refill(kind: kinds.ContainerKind, container: Any, built: Any) -> None:
    """Makes the contents of a container those of a new one."""
    kind.write(container, dict(built) if isinstance(built, dict) else dict(enumerate(built)))


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
        if isinstance(effect, SetGrad) and isinstance(effect.value, New):
            found[effect.value.index] = f"{effect.source}.grad", "grad"
        elif isinstance(effect, SetItem):
            collect(effect.value, f"{effect.source}[{effect.key}]")
        elif isinstance(effect, SetContents):
            collect(effect.value, str(effect.source))
    return found


_STATE = re.compile(r"\.state\[.*\]\[[^\[\]]*\]$")


def replaced_containers(effects: Sequence[Effect]) -> frozenset[tuple[str, Any]]:
    """Path and key of the places where effects put a container that they make."""
    places = []
    for effect in effects:
        if isinstance(effect, (SetAttr, SetItem)) and isinstance(effect.value, (Made, Tree)):
            key = Const(effect.name) if isinstance(effect, SetAttr) else effect.key
            places += [(effect.source.path, key.value)] if isinstance(key, Const) else []
    return frozenset(places)
