"""Sources: where a captured value lives, printed as a user would write it.

A source is a chain from the step's function or arguments down to the value. ``text`` is what people read
(``L['model'].fc.weight``, ``L['opt'].state[L['model'].fc.weight]['exp_avg']``), ``path`` is unambiguous
(``args[0].__dict__['_modules']['fc']…``) and serves as the key, and `read` follows the chain.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class Call:
    """One call of a step: the function and what it was called with.

    Attributes:
        replaced: path of a module -> the module that stands in its place while the step is traced.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    replaced: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Source:
    """The root of all sources; two sources are equal when their paths are."""

    @cached_property
    def path(self) -> str:
        raise TypeError(f"{type(self).__name__} has no path of its own")

    @cached_property
    def text(self) -> str:
        return self.path

    def read(self, call: Call) -> Any:
        """Follows the chain in one call and gives the value that is there now."""
        raise TypeError(f"{type(self).__name__} cannot be read")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Child(Source):
    """Any source that is one step below another."""

    base: Source

    def step(self, holder: Any) -> Any:
        """The value, given the object that ``base`` stands for."""
        raise TypeError(f"{type(self).__name__} has no step")

    def read(self, call: Call) -> Any:
        return self.step(self.base.read(call))


@dataclass(frozen=True, eq=False)
class Vars(Child):
    """The attribute dictionary of an object."""

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}.__dict__"

    @cached_property
    def text(self) -> str:
        return self.base.text

    def step(self, holder: Any) -> Any:
        return vars(holder)


def in_replacement(source: Source) -> bool:
    """True for what is found in a module that stands in another's place."""
    while isinstance(source, Child):
        if isinstance(source, Replacement):
            return True
        source = source.base
    return False


def _plain(key: Any, of_tensor: Callable[[torch.Tensor], object]) -> str:
    """A key as text; a tensor's values change, so something that stays stands for it."""
    return f"tensor {of_tensor(key)}" if isinstance(key, torch.Tensor) else repr(key)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def base_of(holder: Any) -> Any:
    """The class of C whose methods read and write a container, past those of a class of the user's."""
    return next((base for base in _CONTAINERS if isinstance(holder, base)), type(holder))


def item(holder: Any, key: Any) -> Any:
    """``holder[key]``."""
    return base_of(holder).__getitem__(holder, key)


def contents(holder: Any) -> Any:
    """A plain copy of a container."""
    base = base_of(holder)
    return dict(base.items(holder)) if issubclass(base, dict) else list(base.__iter__(holder))


def is_exact(holder: Any) -> bool:
    """Whether a container is read as those of its class of C are."""
    base, kind = base_of(holder), type(holder)
    return kind is base or all(getattr(kind, name, None) is getattr(base, name, None) for name in _READING)


_READING = ("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "keys", "values", "items")
_CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)


@dataclass(frozen=True, eq=False)
class Item(Child):
    """``base[key]``; a key that is itself a captured object is given as its source."""

    key: Any

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}[{self.key.path if isinstance(self.key, Source) else _plain(self.key, id)}]"

    @cached_property
    def text(self) -> str:
        holder = self.base
        if isinstance(holder, Vars):
            return f"{holder.text}.{self.key}"
        if isinstance(holder, Item) and isinstance(holder.base, Vars) and holder.key in REGISTRIES:
            return f"{holder.base.text}.{self.key}"
        return f"{holder.text}[{self.key if isinstance(self.key, Source) else _plain(self.key, _shape)}]"

    def read(self, call: Call) -> Any:
        key = self.key.read(call) if isinstance(self.key, Source) else self.key
        return item(self.base.read(call), key)


@dataclass(frozen=True, eq=False)
class Attr(Child):
    """``base.name`` for what is not in an attribute dictionary: slots, ``.grad``, ``__self__``."""

    name: str

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}.{self.name}"

    @cached_property
    def text(self) -> str:
        hidden = self.name in ("__self__", "__func__") or self.name.startswith("__wrapped")
        return self.base.text if hidden else f"{self.base.text}.{self.name}"

    def step(self, holder: Any) -> Any:
        return getattr(holder, self.name)


@dataclass(frozen=True, eq=False)
class Replacement(Child):
    """The module that stands in the place of another one while the step is traced."""

    @cached_property
    def path(self) -> str:
        return f"replaced[{self.base.path}]"

    @cached_property
    def text(self) -> str:
        return f"{self.base.text}.replacement"

    def read(self, call: Call) -> Any:
        return call.replaced[self.base.path]


@dataclass(frozen=True, eq=False)
class Method(Attr):
    """A function of a class, which runs only where its name is used."""


@dataclass(frozen=True, eq=False)
class Grad(Attr):
    """The ``.grad`` of a tensor."""

    name: str = "grad"


@dataclass(frozen=True, eq=False)
class Version(Child):
    """The version counter of a tensor, ``less`` than it is then."""

    less: int

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}._version - {self.less}"

    @cached_property
    def text(self) -> str:
        return f"{self.base.text}._version - {self.less}"

    def step(self, holder: Any) -> Any:
        return holder._version - self.less


def inside(holder: Any) -> Any:
    """What a weak reference leads to, None when it is gone; the mapping that a read-only one shows."""
    if isinstance(holder, weakref.ref):
        return holder()
    if isinstance(holder, MappingProxyType):
        return gc.get_referents(holder)[0]
    try:
        return holder.__init__.__self__  # a proxy's own attributes are those of what it stands for
    except ReferenceError:
        return None


@dataclass(frozen=True, eq=False)
class Inside(Child):
    """What `inside` gives."""

    @cached_property
    def path(self) -> str:
        return f"inside({self.base.path})"

    @cached_property
    def text(self) -> str:
        return self.base.text

    def step(self, holder: Any) -> Any:
        return inside(holder)


@dataclass(frozen=True, eq=False)
class Got(Child):
    """The value of a context variable."""

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}.get(None)"

    @cached_property
    def text(self) -> str:
        return f"{self.base.text}.get()"

    def step(self, holder: Any) -> Any:
        return holder.get(None)


@dataclass(frozen=True, eq=False)
class Element(Child):
    """A member of a deque, by position."""

    index: int

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}[{self.index}]"

    @cached_property
    def text(self) -> str:
        return f"{self.base.text}[{self.index}]"

    def step(self, holder: Any) -> Any:
        return item(holder, self.index)


@dataclass(frozen=True, eq=False)
class Nth(Child):
    """A value of a dictionary, by position."""

    index: int

    @cached_property
    def path(self) -> str:
        return f"list({self.base.path}.values())[{self.index}]"

    @cached_property
    def text(self) -> str:
        return f"{self.base.text}[{self.index}]"

    def step(self, holder: Any) -> Any:
        return list(base_of(holder).values(holder))[self.index]


@dataclass(frozen=True, eq=False)
class Member(Child):
    """A member of a set, in the set's own order of iteration."""

    index: int

    @cached_property
    def path(self) -> str:
        return f"list({self.base.path})[{self.index}]"

    @cached_property
    def text(self) -> str:
        return f"list({self.base.text})[{self.index}]"

    def step(self, holder: Any) -> Any:
        return list(base_of(holder).__iter__(holder))[self.index]
