"""What a step left behind, described so that it can be made again in a later call: values, and recipes for objects.

A recipe is how an object that the step made is made again: a function, its arguments, contents and attributes.

No method of a user's class runs: what is in an object is read and put back past them. What only C knows how to make
(iterators, partials, exceptions, deques) has none: the Python of a step that leaves such runs at each call.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from wholestep.capture.container_access import base_of, contents
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.sources import Source


@dataclass(eq=False)
class New:
    """A tensor (or a number computed from lifted ones) that the step makes; ``index`` counts the distinct ones."""

    value: Any
    index: int

    def __str__(self) -> str:
        return f"new[{self.index}]"


@dataclass(eq=False)
class Existing:
    """Something that was there before the step; a late one is read after a scheduler's call, given by its number."""

    source: Source
    value: Any
    after: int | None = None

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
    """Any other object that the step makes: a function makes it of arguments, and it is filled; see `Recipe`.

    Attributes:
        kind: its class, for people.
        parts: what `fill` is given; they may hold the object itself.
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
        if isinstance(value, Tree):
            todo += reversed((*value.keys, *value.values))
        elif isinstance(value, Made):
            todo += reversed((*value.args, *value.parts))


def is_late(*values: Value) -> bool:
    """Whether one of some values is, or holds, one that is read late."""
    return any(isinstance(value, Existing) and value.after is not None for value in nested(values))


@dataclass
class Recipe:
    """``make(*args)``, then `fill` with what follows.

    Attributes:
        items: what a container holds.
        attributes: the attribute dictionary.
        fields: slots and other attributes.
    """

    make: Callable[..., Any]
    args: tuple[Any, ...] = ()
    items: dict[Any, Any] | list[Any] | None = None
    attributes: dict[str, Any] | None = None
    fields: dict[str, Any] | None = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The rest of `fill`'s arguments, if there are any."""
        parts = self.items or None, self.attributes or None, self.fields or None
        return parts if any(parts) else ()


def fill(made: Any, items: Any = None, attributes: Any = None, fields: Any = None) -> None:
    """Puts contents and attributes into an object, past methods of its own, which may do more than store."""
    base = base_of(made)
    if isinstance(items, dict):
        for key, item in items.items():
            base.__setitem__(made, key, item)
    elif items is not None:
        _ADDING[base](made, items)
    if attributes:
        vars(made).update(attributes)
    for name, value in (fields or {}).items():
        object.__setattr__(made, name, value)


_ADDING: dict[type, Callable[..., None]] = {list: list.extend, set: set.update}


def recipe(value: Any) -> Recipe | None:
    """How an object is made again; None for one that stays the same object in each call.

    Raises:
        TypeError: there is no way.
    """
    kind = type(value)
    if _stays(value):
        return None
    make = next((make for base, make in RECIPES.items() if isinstance(value, base)), _plain)
    found = make(value)
    if found.attributes is None:
        found.attributes = dict(getattr(value, "__dict__", None) or {})
    if kind.__flags__ & _HEAP and kinds.slot_names(kind):
        found.fields = kinds.SLOTS.read(value) | (found.fields or {})
    return found


def _stays(value: Any) -> bool:
    """Whether an object stays as it is: it is one of a kind, or leads to nothing that a step makes."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (types.ModuleType, type, type(None)))
    return isinstance(value, CONSTANT) or (isinstance(value, numpy.ndarray) and value.base is not None)


def _plain(value: Any) -> Recipe:
    object.__new__(type(value))  # which refuses what a function of C makes
    return Recipe(object.__new__, (type(value),))


def _dict(value: dict[Any, Any]) -> Recipe:
    fields = {"default_factory": value.default_factory} if isinstance(value, defaultdict) else None
    return Recipe(type(value).__new__, (type(value),), contents(value), fields=fields)


def _function(value: types.FunctionType) -> Recipe:
    names = ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__")
    fields = {name: getattr(value, name) for name in names}
    code = value.__code__, Const(value.__globals__), value.__name__, value.__defaults__, value.__closure__
    return Recipe(types.FunctionType, code, fields={name: given for name, given in fields.items() if given})


def _tuple(value: tuple[Any, ...]) -> Recipe:
    items = contents(value)
    # what operators with several results return, and sizes
    if hasattr(type(value), "n_sequence_fields") or type(value) is torch.Size:
        return Recipe(type(value), (items,), attributes={})
    return Recipe(tuple.__new__, (type(value), items))


def _reference(value: weakref.ref[Any]) -> Recipe:
    if type(value) is not weakref.ref or value.__callback__ is not None:
        raise TypeError("what a weak reference calls when its object is gone is not known")
    return Recipe(weakref.ref, (value(),), attributes={})


_HEAP = 1 << 9  # of a type's flags: made by Python code
# What stays as it is, although it could be made again.
CONSTANT: tuple[type, ...] = (type, types.ModuleType, types.CodeType, torch.Generator)
RECIPES: dict[Any, Callable[[Any], Recipe]] = {
    dict: _dict,
    list: lambda v: Recipe(list.__new__, (type(v),), contents(v)),
    tuple: _tuple,
    set: lambda v: Recipe(set.__new__, (type(v),), contents(v)),
    frozenset: lambda v: Recipe(frozenset.__new__, (type(v), contents(v))),
    types.SimpleNamespace: lambda v: Recipe(types.SimpleNamespace.__new__, (type(v),)),
    types.FunctionType: _function,
    types.CellType: lambda v: Recipe(types.CellType, fields=kinds.CELL.read(v)),
    types.MethodType: lambda v: Recipe(types.MethodType, (v.__func__, v.__self__), attributes={}),
    weakref.ref: _reference,  # as torch.utils.checkpoint leaves in hooks
}
