"""Values: what a step left behind, described so that it can be made again in a later call."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wholestep.capture.source import Source


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
    """A container or plain object that the step makes: its prototype, keys and values."""

    prototype: Any
    keys: tuple[Value, ...]
    values: tuple[Value, ...]

    def __str__(self) -> str:
        inner = ", ".join(f"{k}: {v}" for k, v in zip(self.keys, self.values, strict=True))
        return f"{type(self.prototype).__name__}({{{inner}}})"


@dataclass(frozen=True, eq=False)
class Record:
    """An instance of a dict's subclass that the step makes: its items and its attributes."""

    items: Tree
    attributes: Tree

    def __str__(self) -> str:
        return str(self.items)


Value = New | Existing | Const | Tree | Record
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
        elif isinstance(value, Tree):
            value.prototype = _hollow(value.prototype)

    for value in values:
        walk(value, drop)


def walk(value: Value, visit: Callable[[Any], None]) -> None:
    """Calls a function for a value and all inside of it."""
    visit(value)
    inside: tuple[Any, ...] = ()
    if isinstance(value, Tree):
        inside = (*value.keys, *value.values)
    elif isinstance(value, Record):
        inside = (value.items, value.attributes)
    for inner in inside:
        walk(inner, visit)


def _hollow(prototype: Any) -> Any:
    """An empty object of the prototype's kind, as far as `assemble` can tell."""
    kind: Any = type(prototype)
    if isinstance(prototype, defaultdict):
        return defaultdict(prototype.default_factory)
    if isinstance(prototype, deque):
        return deque((), prototype.maxlen)
    if kind in (dict, OrderedDict, list, tuple, set, frozenset):
        return kind()
    if isinstance(prototype, tuple):
        return tuple.__new__(kind, ()) if hasattr(kind, "_make") else prototype
    return kind.__new__(kind) if isinstance(prototype, (dict, list, set, frozenset)) else object.__new__(kind)


def assemble(prototype: Any, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    """A container or plain object of the prototype's kind."""
    kind = type(prototype)
    if isinstance(prototype, defaultdict):
        return defaultdict(prototype.default_factory, zip(keys, items, strict=True))
    if isinstance(prototype, dict):
        return kind(zip(keys, items, strict=True))
    if isinstance(prototype, tuple) and hasattr(kind, "_make"):
        return kind._make(items)
    if isinstance(prototype, deque):
        return deque(items, prototype.maxlen)
    if isinstance(prototype, (list, tuple, set, frozenset)):
        return kind(items)
    fresh = object.__new__(kind)
    vars(fresh).update(zip(keys, items, strict=True))
    return fresh


def assemble_record(prototype: Any, keys: Sequence[Any], items: Sequence[Any], names: Sequence[str],
                    attributes: Sequence[Any]) -> Any:
    """An instance of a dict's subclass, made without calling its own methods, which may do more than store."""
    kind: Any = type(prototype)
    fresh = kind.__new__(kind)
    setitem = OrderedDict.__setitem__ if isinstance(fresh, OrderedDict) else dict.__setitem__
    for key, item in zip(keys, items, strict=True):
        setitem(fresh, key, item)
    if names:
        vars(fresh).update(zip(names, attributes, strict=True))
    return fresh
