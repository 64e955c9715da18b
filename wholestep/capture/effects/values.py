"""Values: what a step left behind, described so that it can be made again in a later call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wholestep.capture.sources import Source


@dataclass(eq=False)
class New:
    """A tensor (or a number computed from lifted ones) that the step makes; ``index`` counts the distinct ones.

    Attributes:
        attributes: what the step's code has put into the tensor's attributes.
    """

    value: Any
    index: int
    attributes: Tree | None = None

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
    make: Callable[..., Any]
    args: tuple[Value, ...]
    parts: tuple[Value, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(map(str, self.args))})"


Value = New | Existing | Const | Tree | Made
NOTHING = Const(None)


def nested(values: Sequence[Value]) -> Iterator[Value]:
    """Values and all inside of them, once each."""
    seen: set[int] = set()
    todo = [*reversed(values)]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, New) and value.attributes is not None:
            todo.append(value.attributes)
        elif isinstance(value, Tree):
            todo += reversed((*value.keys, *value.values))
        elif isinstance(value, Made):
            todo += reversed((*value.args, *value.parts))


def is_late(*values: Value) -> bool:
    """Whether one of some values is, or holds, one that is read late."""
    return any(isinstance(value, Existing) and value.late for value in nested(values))
