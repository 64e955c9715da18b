"""Boxes: how to read, put back and point into each kind of thing that Python code can change.

A box presents its holder as a flat ``dict`` of key -> value, so that taking a snapshot, comparing with it and
restoring it are the same few lines for a dictionary, a list, a closure cell or a tensor's ``.grad``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch

from wholestep.capture.sources import (
    Attr,
    CellContents,
    ContextValue,
    Element,
    Global,
    Item,
    Member,
    Source,
    base_of,
)
from wholestep.torch_compat import HOOK_TABLES

Contents = dict[Any, Any]


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


@dataclass(frozen=True)
class Box:
    """One kind of holder.

    Attributes:
        name: the kind, for guards and messages.
        read: the holder's contents as key -> value, in order.
        write: makes the contents equal to a dict that `read` gave.
        child: the source of the value at a key, given the holder's own source.
    """

    name: str
    read: Callable[[Any], Contents]
    write: Callable[[Any, Contents], None]
    child: Callable[[Source, Any], Source]


def _write_dict(holder: Any, contents: Contents) -> None:
    kind = base_of(holder)
    kind.clear(holder)
    for key, value in contents.items():
        kind.__setitem__(holder, key, value)


def _write_set(holder: set[Any], contents: Contents) -> None:
    set.clear(holder)
    set.update(holder, contents.values())


def _write_deque(holder: deque[Any], contents: Contents) -> None:
    deque.clear(holder)
    deque.extend(holder, contents.values())


def _nothing(holder: Any, contents: Contents) -> None:
    """Tuples and frozen sets cannot change."""


def _numbered(holder: Iterable[Any]) -> Contents:
    return dict(enumerate(base_of(holder).__iter__(holder)))


def _read_dict(holder: dict[Any, Any]) -> Contents:
    return dict(base_of(holder).items(holder))


def slot_names(kind: type) -> list[str]:
    """All slots of a class and its bases, under the names by which they are reached."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return names


def _read_slots(holder: Any) -> Contents:
    found = ((name, getattr(holder, name, MISSING)) for name in slot_names(type(holder)))
    return {name: value for name, value in found if value is not MISSING}


def _write_slots(holder: Any, contents: Contents) -> None:
    for name in slot_names(type(holder)):
        if name in contents:
            object.__setattr__(holder, name, contents[name])
        elif getattr(holder, name, MISSING) is not MISSING:
            object.__delattr__(holder, name)


def _read_cell(cell: CellType) -> Contents:
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # a variable not assigned yet
        return {}


def _write_cell(cell: CellType, contents: Contents) -> None:
    if contents:
        cell.cell_contents = contents["cell_contents"]
    elif _read_cell(cell):
        del cell.cell_contents


@dataclass(frozen=True)
class Names:
    """The global variables of one module that user code names, and the function that named them."""

    function: Any
    names: tuple[str, ...]


def _read_names(holder: Names) -> Contents:
    table = holder.function.__globals__
    return {name: table[name] for name in holder.names if name in table}


def _write_names(holder: Names, contents: Contents) -> None:
    table = holder.function.__globals__
    for name in holder.names:
        if name in contents:
            table[name] = contents[name]
        else:
            table.pop(name, None)


def _write_module(table: dict[str, Any], contents: Contents) -> None:
    """Puts back single globals: a module's table is never empty, not even for a moment."""
    for name in table.keys() - contents.keys():
        del table[name]
    for name, value in contents.items():
        if table.get(name, MISSING) is not value:
            table[name] = value


def class_values(kind: type) -> Contents:
    """What a user's class holds besides its functions: values that code may read through the class."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")
        and not isinstance(value, (staticmethod, classmethod, property, type))
        and not callable(value) and not hasattr(value, "__get__")
    }


def _write_class(kind: type, contents: Contents) -> None:
    now = class_values(kind)
    for name in now.keys() - contents.keys():
        delattr(kind, name)
    for name, value in contents.items():
        if now.get(name, MISSING) is not value:
            setattr(kind, name, value)


def _has_grad(tensor: torch.Tensor) -> bool:
    """Whether autograd keeps a gradient for a tensor.

    A view is not asked whether it is a leaf: when its base was written, autograd would make it another history.
    """
    view = tensor.requires_grad and tensor._is_view() and tensor._base is not None and tensor._base.requires_grad
    return tensor.retains_grad or (not view and tensor.is_leaf)


def _read_tensor(tensor: torch.Tensor) -> Contents:
    contents: Contents = {"grad": tensor.grad if _has_grad(tensor) else None, "requires_grad": tensor.requires_grad}
    # a table without hooks is as none: unpickled tensors have one
    return contents | {name: getattr(tensor, name) or None for name in HOOK_TABLES}


def _write_tensor(tensor: torch.Tensor, contents: Contents) -> None:
    """Puts back ``.grad``, hooks and ``requires_grad``; an in-place write may have made the leaf a non-leaf."""
    for name, value in contents.items():
        if name == "grad" and _has_grad(tensor) and tensor.grad is not value:
            tensor.grad = value
        elif name == "requires_grad" and tensor.requires_grad != value:
            if tensor.grad_fn is not None and not value:
                tensor.detach_()
            tensor.requires_grad_(value)
        elif name.startswith("_") and getattr(tensor, name) is not value:
            setattr(tensor, name, value)


def _write_context(variable: ContextVar[Any], contents: Contents) -> None:
    if variable.get(None) is not contents["value"]:
        variable.set(contents["value"])


MAPPING = Box("dict", _read_dict, _write_dict, Item)
ATTRIBUTES = Box("attributes", dict, _write_dict, Item)
MODULE = Box("module", dict, _write_module, Item)
LIST = Box("list", _numbered, lambda holder, contents: list.__setitem__(holder, slice(None), contents.values()), Item)
TUPLE = Box("tuple", _numbered, _nothing, Item)
SET = Box("set", _numbered, _write_set, Member)
FROZENSET = Box("frozenset", _numbered, _nothing, Member)
DEQUE = Box("deque", _numbered, _write_deque, Element)
SLOTS = Box("slots", _read_slots, _write_slots, Attr)
CELL = Box("cell", _read_cell, _write_cell, CellContents)
NAMES = Box("globals", _read_names, _write_names, Global)
CLASS = Box("class", class_values, _write_class, Attr)
CONTEXT = Box("context variable", lambda v: {"value": v.get(None)}, _write_context, ContextValue)
TENSOR = Box("tensor", _read_tensor, _write_tensor, Attr)
