"""Access to what containers hold, past the methods of a class of the user's, and to what references lead to."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from types import MappingProxyType
from typing import Any

_CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)
_READING = ("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "keys", "values", "items")


def base_of(container: Any) -> Any:
    """The class of C whose methods read and write a container, past those of a class of the user's."""
    return next((base for base in _CONTAINERS if isinstance(container, base)), type(container))


def item(container: Any, key: Any) -> Any:
    """``container[key]``."""
    return base_of(container).__getitem__(container, key)


def contents(container: Any) -> Any:
    """A plain copy of a container."""
    base = base_of(container)
    return dict(base.items(container)) if issubclass(base, dict) else list(base.__iter__(container))


def is_exact(container: Any) -> bool:
    """Whether a container is read as those of its class of C are."""
    base, kind = base_of(container), type(container)
    return kind is base or all(getattr(kind, name, None) is getattr(base, name, None) for name in _READING)


def referent(reference: Any) -> Any:
    """What a weak reference leads to, None when it is gone; the mapping that a read-only one shows."""
    if isinstance(reference, weakref.ref):
        return reference()
    if isinstance(reference, MappingProxyType):
        return gc.get_referents(reference)[0]
    try:
        return reference.__init__.__self__  # a proxy's own attributes are those of what it stands for
    except ReferenceError:
        return None
