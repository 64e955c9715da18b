"""Kinds of containers: how to read, put back and point into each kind of thing that Python code can change.

A kind presents a container as a flat ``dict`` of key -> value, so that taking a snapshot, comparing with it and
restoring it are the same few lines for a dictionary, a list, a closure cell or a tensor's ``.grad``.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from wholestep.capture import sources
from wholestep.capture.container_access import base_of, contents
from wholestep.patches import is_put_into, original
from wholestep.torch_compat import HOOK_TABLES

Contents = dict[Any, Any]
Write = Callable[[Any, Contents], None]

_MISSING = object()


@dataclass(frozen=True)
class ContainerKind:
    """One kind of container.

    Attributes:
        name: for guards and messages.
        read: the contents as key -> value, in order.
        write: makes the contents equal to a dict that `read` gave.
        child: the source of the value at a key, given the container's own source.
    """

    name: str
    read: Callable[[Any], Contents]
    write: Write
    child: Callable[[sources.Source, Any], sources.Source]


def _one_by_one(
    read: Callable[[Any], Contents],
    put: Callable[[Any, str, Any], Any] = setattr,
    delete: Callable[[Any, str], Any] = delattr,
    within: Callable[[Any], Any] = lambda container: container,
) -> Write:
    """Contents without an order: what is gone is deleted, what differs is set, so that nothing is empty in between."""

    def write(container: Any, contents: Contents) -> None:
        now, target = read(container), within(container)
        for name in now.keys() - contents.keys():
            delete(target, name)
        for name, value in contents.items():
            if now.get(name, _MISSING) is not value:
                put(target, name, value)

    return write


def _anew(kind: Any, add: Callable[[Any, Iterable[Any]], None]) -> Write:
    """Contents with an order of their own."""

    def write(container: Any, contents: Contents) -> None:
        kind.clear(container)
        add(container, contents.values())

    return write


def _write_dict(container: Any, contents: Contents) -> None:
    kind = base_of(container)
    kind.clear(container)
    for key, value in contents.items():
        kind.__setitem__(container, key, value)


def _constant(container: Any, contents: Contents) -> None:
    """Tuples and frozen sets cannot change."""


def _numbered(container: Iterable[Any]) -> Contents:
    return dict(enumerate(contents(container)))


_SLOTS_IN_C = {defaultdict: "default_factory", deque: "maxlen"}


def slot_names(kind: type) -> list[str]:
    """All slots of a class and its bases, under the names by which they are reached; those of C's own, too."""
    names = [name for base, name in _SLOTS_IN_C.items() if issubclass(kind, base)]
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return names


def is_complete(container: Any, contents: Contents) -> bool:
    """Whether nothing can be added to what slots or a closure's cell has."""
    return len(contents) == (1 if isinstance(container, CellType) else len(slot_names(type(container))))


def _read_slots(owner: Any) -> Contents:
    found = ((name, getattr(owner, name, _MISSING)) for name in slot_names(type(owner)))
    return {name: value for name, value in found if value is not _MISSING}


def _read_cell(cell: CellType) -> Contents:
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # a variable not assigned yet
        return {}


# The fields of what has no table of attributes, or other things besides in it.
_FIELDS: dict[type, tuple[str, ...]] = {
    type: ("__bases__",),
    FunctionType: ("__defaults__", "__kwdefaults__"),
    MethodType: ("__self__", "__func__"),
    **dict.fromkeys((functools.partial, functools.partialmethod), ("func", "args", "keywords")),
    **dict.fromkeys((functools.cached_property, functools.singledispatchmethod), ("func",)),
}


def _read_fields(value: Any) -> Contents:
    names = next(_FIELDS[base] for base in type(value).__mro__ if base in _FIELDS)
    return {name: getattr(value, name) for name in names}


def _put_field(value: Any, name: str, new: Any) -> None:
    if isinstance(value, functools.partial):  # whose fields are set together alone
        state = _read_fields(value) | {name: new}
        value.__setstate__((*state.values(), vars(value)))  # type: ignore[attr-defined]
    else:
        setattr(value, name, new)


@dataclass(frozen=True)
class UsedGlobals:
    """The global variables of one module that user code names, and all that the module has.

    Attributes:
        library: the module, or object, where it is a library's.
    """

    table: Mapping[str, Any]
    names: tuple[str, ...]
    library: Any = None


_OF_IMPORTS = frozenset({"__loader__", "__spec__", "__builtins__"})  # what Python's imports keep there, not the user


def is_left_out(table: dict[str, Any], name: str) -> bool:
    """Whether what a module's table has by a name is no matter."""
    return name in _OF_IMPORTS or is_put_into(table, name)


def _read_module(table: dict[str, Any]) -> Contents:
    return {name: value for name, value in [*table.items()] if not is_left_out(table, name)}


def _read_globals(used: UsedGlobals) -> Contents:
    table = used.table
    if used.library is not None:  # of which another thread may have patched functions
        return {name: original(used.library, name) for name in used.names if name in table}
    return {name: table[name] for name in used.names if name in table and not is_put_into(table, name)}


# What a special method may be; others of such names are what Python keeps about a class.
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.partial, functools.partialmethod,
            functools.singledispatchmethod)  # fmt: skip


def class_values(kind: type) -> Contents:
    """What a user's class holds, its functions included: what code may read through the class."""
    return {
        name: value
        for name, value in vars(kind).items()
        if (isinstance(value, _METHODS) or not (name.startswith("__") and name.endswith("__")))
        and not name.startswith("_abc_")
        and not is_put_into(kind, name)
    }


def _has_grad(tensor: torch.Tensor) -> bool:
    """Whether autograd keeps a gradient for a tensor."""
    return tensor.retains_grad or tensor.is_leaf


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


_TABLE = dict.__setitem__, dict.__delitem__
MAPPING = ContainerKind("dict", contents, _write_dict, sources.Item)
ATTRIBUTES = ContainerKind("attributes", dict, _write_dict, sources.Item)
MODULE = ContainerKind("module", _read_module, _one_by_one(_read_module, *_TABLE), sources.Item)
LIST = ContainerKind("list", _numbered, _anew(list, list.extend), sources.Item)
TUPLE = ContainerKind("tuple", _numbered, _constant, sources.Item)
SET = ContainerKind("set", _numbered, _anew(set, set.update), sources.Member)
FROZENSET = ContainerKind("frozenset", _numbered, _constant, sources.Member)
DEQUE = ContainerKind("deque", _numbered, _anew(deque, deque.extend), sources.Item)
_write_slots = _one_by_one(_read_slots, object.__setattr__, object.__delattr__)
SLOTS = ContainerKind("slots", _read_slots, _write_slots, sources.Attr)
CELL = ContainerKind("cell", _read_cell, _one_by_one(_read_cell), sources.Attr)
_write_globals = _one_by_one(_read_globals, *_TABLE, within=lambda used: used.table)
GLOBALS = ContainerKind("globals", _read_globals, _write_globals, sources.of_module)
FIELDS = ContainerKind("fields", _read_fields, _one_by_one(_read_fields, _put_field), sources.Attr)
CLASS_VALUES = ContainerKind(
    "class", _read_globals, _one_by_one(_read_globals, within=lambda used: used.library), sources.Method)
USED = GLOBALS, CLASS_VALUES
CLASS = ContainerKind("class", class_values, _one_by_one(class_values), sources.Method)
TENSOR = ContainerKind("tensor", _read_tensor, _write_tensor, sources.Attr)
