"""Effects: what a step changed in the Python world, as values that can be replayed without running it.

`differences` describes them. `replay` does the same changes again in a later call: first it evaluates every new value
and finds every holder, then it assigns, so that two effects that exchange values do not disturb each other. Each
effect says how it is done twice: as Python (`assign`), and as the text of a statement that does the same.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wholestep.capture.effects.values import NOTHING, Existing, Made, New, Tree, Value, hollow_out, new_in, walk
from wholestep.capture.snapshot import boxes
from wholestep.capture.sources.scopes import Global
from wholestep.capture.sources.source import Source, Vars, base_of
from wholestep.ir import InputKind


@dataclass(frozen=True, eq=False)
class Effect(ABC):
    """One change at ``source``, the holder; subclasses say which."""

    source: Source

    @property
    def parts(self) -> tuple[Value | None, Value | None]:
        """The key and the value that must be made before the change."""
        return getattr(self, "key", None), getattr(self, "value", None)

    @abstractmethod
    def assign(self, holder: Any, key: Any, value: Any) -> None:
        """Does the change in one call.

        Args:
            holder: what is at ``source``.
            key, value: what `parts` are in this call.
        """

    @abstractmethod
    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        """A statement that does it.

        Args:
            holder, key, value: names of what `assign` is given.
            constant: gives the name of a constant.
        """


@dataclass(frozen=True, eq=False)
class SetItem(Effect):
    """``source[key] = value``."""

    key: Value
    value: Value

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        base_of(holder).__setitem__(holder, key, value)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        return f"{constant(base_of)}({holder}).__setitem__({holder}, {key}, {value})"

    def __str__(self) -> str:
        return f"{self.source}[{self.key}] = {self.value}"


@dataclass(frozen=True, eq=False)
class DelItem(Effect):
    """``del source[key]``."""

    key: Value

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        base_of(holder).__delitem__(holder, key)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        return f"{constant(base_of)}({holder}).__delitem__({holder}, {key})"

    def __str__(self) -> str:
        return f"del {self.source}[{self.key}]"


@dataclass(frozen=True, eq=False)
class SetAttr(Effect):
    """``source.name = value``, for attributes, slots, classes, closure cells and ``.requires_grad``."""

    name: str
    value: Value

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        if _is_table(self.source):
            holder[self.name] = value
        else:
            setattr(holder, self.name, value)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        table = _is_table(self.source)
        return f"{holder}[{self.name!r}] = {value}" if table else f"{holder}.{self.name} = {value}"

    def __str__(self) -> str:
        return f"{self.source}.{self.name} = {self.value}"


@dataclass(frozen=True, eq=False)
class DelAttr(Effect):
    """``del source.name``."""

    name: str

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        if _is_table(self.source):
            holder.pop(self.name, None)
        else:
            delattr(holder, self.name)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        table = _is_table(self.source)
        return f"{holder}.pop({self.name!r}, None)" if table else f"del {holder}.{self.name}"

    def __str__(self) -> str:
        return f"del {self.source}.{self.name}"


@dataclass(frozen=True, eq=False)
class SetGrad(Effect):
    """``source.grad = value``."""

    value: Value

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        holder.grad = value

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        return f"{holder}.grad = {value}"

    def __str__(self) -> str:
        return f"{self.source}.grad = {self.value}"


@dataclass(frozen=True, eq=False)
class SetContents(Effect):
    """The whole contents of a list, set, deque or reordered dict, the holder staying the same object."""

    box: boxes.Box
    value: Tree

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        _fill(self.box, holder, value)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        return f"{constant(_fill)}({constant(self.box)}, {holder}, {value})"

    def __str__(self) -> str:
        return f"{self.source}[:] = {self.value}"


@dataclass(frozen=True, eq=False)
class Extend(Effect):
    """``source.extend(values)``: a list or deque that the step appends to and does not read."""

    value: Tree

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        base_of(holder).extend(holder, value)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        return f"{constant(base_of)}({holder}).extend({holder}, {value})"

    def __str__(self) -> str:
        return f"{self.source} += {self.value}"


@dataclass(frozen=True, eq=False)
class CallMethod(Effect):
    """``source.name(*args)``: a learning-rate scheduler moves on, after all else; a tensor retains its gradient."""

    name: str
    args: tuple[Any, ...] = ()

    def assign(self, holder: Any, key: Any, value: Any) -> None:
        getattr(holder, self.name)(*self.args)

    def statement(self, holder: str, key: str, value: str, constant: Callable[[Any], str]) -> str:
        return f"{holder}.{self.name}(*{constant(self.args)})"

    def __str__(self) -> str:
        return f"{self.source}.{self.name}({', '.join(map(repr, self.args))})"


def new_values(effects: Sequence[Effect], result: Value = NOTHING) -> list[Any]:
    """The distinct tensors and numbers made in the step that effects and result hold, in the order of `New.index`."""
    return new_in(_values_of(effects, result))


def forget(effects: Sequence[Effect], result: Value = NOTHING) -> None:
    """Lets go of the objects that effects and result were described from; they can be replayed as before."""
    hollow_out(_values_of(effects, result))


def read_by(effects: Sequence[Effect], result: Value = NOTHING) -> set[str]:
    """The paths of what a replay of effects and result looks at in the call."""
    paths = {effect.source.path for effect in effects}

    def look(value: Value) -> None:
        if isinstance(value, Existing):
            paths.add(value.source.path)

    for value in _values_of(effects, result):
        walk(value, look)
    return paths


def _values_of(effects: Sequence[Effect], result: Value) -> list[Value]:
    return [result, *(v for effect in effects for v in effect.parts if v is not None)]


def homes(effects: Sequence[Effect]) -> dict[int, tuple[str, InputKind]]:
    """Where effects leave the gradients and the optimizer state that the step makes: `New.index` -> source, kind.

    Sources are written as those of inputs are, so that a later step finds the same words for what is there then.
    """
    found: dict[int, tuple[str, InputKind]] = {}

    def look(value: Value, where: str) -> None:
        if isinstance(value, New) and _STATE.search(where):
            found.setdefault(value.index, (where, "state"))
        elif isinstance(value, Made) and value.parts:  # the items of a dict of another class
            look(value.parts[0], where)
        elif isinstance(value, Tree):
            for key, inner in zip(value.keys, value.values, strict=True):
                look(inner, f"{where}[{key}]")

    for effect in effects:
        if isinstance(effect, SetGrad) and isinstance(effect.value, New):
            found[effect.value.index] = f"{effect.source}.grad", "grad"
        elif isinstance(effect, SetItem):
            look(effect.value, f"{effect.source}[{effect.key}]")
        elif isinstance(effect, SetContents):
            look(effect.value, str(effect.source))
    return found


def _is_table(source: Source) -> bool:
    """Whether what is at a source is a table of names."""
    return isinstance(source, Vars) or (isinstance(source, Global) and not source.name)


def _fill(box: boxes.Box, holder: Any, built: Any) -> None:
    """Makes the contents of a holder those of a container that `assemble` made."""
    box.write(holder, dict(built) if isinstance(built, dict) else dict(enumerate(built)))


_STATE = re.compile(r"\.state\[.*\]\[[^\[\]]*\]$")
