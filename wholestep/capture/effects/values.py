"""Values: what a step left behind, described so that it can be made again in a later call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wholestep.capture.sources.source import Source


@dataclass(eq=False)
class New:
    """A tensor (or a number computed from lifted ones) that the step makes; ``index`` counts the distinct ones."""

    value: Any
    index: int

    def __str__(self) -> str:
        return f"new[{self.index}]"


@dataclass(eq=False)
class Existing:
    """Something that was there before the step; a ``late`` one is read when all that the step changes is changed."""

    source: Source
    value: Any
    late: bool = False

    def __str__(self) -> str:
        return self.source.text


@dataclass(frozen=True, eq=False)
class Const:
    """A Python value that is the same in each call."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(eq=False)
class Tree:
    """A plain dict, list, tuple, set or frozenset that the step makes."""

    kind: type
    keys: tuple[Value, ...]
    values: tuple[Value, ...]

    def __str__(self) -> str:
        inner = ", ".join(f"{k}: {v}" for k, v in zip(self.keys, self.values, strict=True))
        return f"{self.kind.__name__}({{{inner}}})"


@dataclass(eq=False)
class Made:
    """Any other object that the step makes: a function makes it of arguments, and it is filled; see `recipes`.

    Attributes:
        kind: its class, for people.
        parts: what `recipes.fill` is given; they may hold the object itself.
    """

    kind: type
    make: Value
    args: tuple[Value, ...]
    parts: tuple[Value, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(map(str, self.args))})"


Value = New | Existing | Const | Tree | Made
NOTHING = Const(None)


def new_in(values: Iterable[Value]) -> list[Any]:
    """The distinct tensors and numbers made in the step that values hold, in the order of `New.index`."""
    found: dict[int, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, New):
            found[value.index] = value.value

    for value in values:
        walk(value, look)
    return [found[index] for index in sorted(found)]


def is_late(value: Value) -> bool:
    """Whether a value is, or holds, one that is read late."""
    found: list[bool] = []
    walk(value, lambda inner: found.append(isinstance(inner, Existing) and inner.late))
    return any(found)


def hollow_out(values: Iterable[Value]) -> None:
    """Lets go of the objects that values were described from; they can be made again as before."""

    def drop(value: Any) -> None:
        if isinstance(value, (New, Existing)):
            value.value = None

    for value in values:
        walk(value, drop)


def walk(value: Value, visit: Callable[[Any], None]) -> None:
    """Calls a function for a value and all inside of it, once each."""
    seen: set[int] = set()
    todo: list[Value] = [value]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        visit(value)
        if isinstance(value, Tree):
            todo += reversed((*value.keys, *value.values))
        elif isinstance(value, Made):
            todo += reversed((value.make, *value.args, *value.parts))


def assemble(kind: type, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    """A plain container of a kind."""
    return kind(zip(keys, items, strict=True)) if kind is dict else kind(items)
