"""Sources: where a captured value is found, printed as a user would write it.

A source is a chain from the step's function or arguments down to the value. ``text`` is what people read
(``L['model'].fc.weight``, ``L['opt'].state[L['model'].fc.weight]['exp_avg']``), ``path`` is unambiguous
(``args[0].__dict__['_modules']['fc']…``) and serves as the key, and `read` follows the chain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from wholestep.cached_property import cached_property
from wholestep.capture.container_access import base_of, item, referent
from wholestep.capture.outside.torch_settings import READERS

REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})

# Where a chain begins -----------------------------------------------------------------------------------

# What a step is called with.
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of a step: the function and what it was called with.

    Attributes:
        replaced: path of a module -> the module that stands in its place while the step is traced.
    """

    fn: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    replaced: Mapping[str, Any] = field(default_factory=dict)


class Source:
    """A chain of accesses; two sources are equal when their paths are."""

    path: str
    text: str

    def read(self, call: Call) -> Any:
        """Follows the chain in one call and gives the value that is there now."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Root(Source):
    """The beginning of a chain.

    Attributes:
        argument: position or name of an argument of the call, None for what is none.
    """

    path: str
    text: str
    get: Callable[[Call], Any]
    argument: int | str | None = None

    def read(self, call: Call) -> Any:
        return self.get(call)


class Decision(Source):
    """What the step decides on, in words: computed from several values, and read nowhere."""

    def __init__(self, text: str) -> None:
        self.path = self.text = text


FUNCTION = Root("fn", "L['self']", lambda call: call.fn)


def argument(name: str, at: int | str, index: int | None = None) -> Root:
    """An argument: parameter ``name``, passed at a position or by keyword; ``index`` counts in one like ``*args``."""
    text = f"L[{name!r}]" if index is None else f"L[{name!r}][{index}]"
    if isinstance(at, int):
        return Root(f"args[{at}]", text, lambda call: call.args[at], at)
    return Root(f"kwargs[{at!r}]", text, lambda call: call.kwargs[at], at)


def variable(name: str) -> Root:
    """A variable of the environment, None where there is none, or a setting of torch."""
    return Root(name, name, lambda call: READERS[name]())


def module(name: str) -> Root:
    """A module that has been imported."""
    return Root(f"sys.modules[{name!r}]", name, lambda call: sys.modules[name])


def constant(function: Callable[..., Any]) -> Root:
    """A function that a library calls, and no code of the step's names."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return Root(f"function {id(function)}", f"G[{name!r}]", lambda call: function)


# One step further ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Child(Source):
    """Any source that is one step below another; a class for each kind of step.

    Attributes:
        key: where in it; itself a source for a key that is a captured object.
        paths, texts: formats of path and text, given ``base`` and ``key``.
        step: the value, given the object that ``base`` stands for and the key.
    """

    base: Source
    key: Any = None
    paths: ClassVar[str] = ""
    texts: ClassVar[str] = "{0.text}"
    step: ClassVar[Any]

    @cached_property
    def path(self) -> str:  # type: ignore[override]
        return self.paths.format(self.base, self.key)

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        return self.texts.format(self.base, self.key)

    def read(self, call: Call) -> Any:
        key = self.key.read(call) if isinstance(self.key, Source) else self.key
        return self.step(self.base.read(call), key)


def lineage(source: Source | None) -> Iterator[Source]:
    """A source and those that it is below, the nearest first."""
    while source is not None:
        yield source
        source = source.base if isinstance(source, Child) else None


class Vars(Child):
    """The attribute dictionary of an object."""

    paths = "{0.path}.__dict__"
    step = staticmethod(lambda owner, key: vars(owner))


class Item(Child):
    """``base[key]``."""

    step = staticmethod(item)

    @cached_property
    def path(self) -> str:  # type: ignore[override]
        return f"{self.base.path}[{self.key.path if isinstance(self.key, Source) else _plain(self.key, id)}]"

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        base = self.base
        if isinstance(base, Vars):
            return f"{base.text}.{self.key}"
        if isinstance(base, Item) and isinstance(base.base, Vars) and base.key in REGISTRIES:
            return f"{base.base.text}.{self.key}"
        return f"{base.text}[{self.key if isinstance(self.key, Source) else _plain(self.key, _shape)}]"


def _plain(key: Any, of_tensor: Callable[[torch.Tensor], object]) -> str:
    """A key as text; a tensor's values change, so something that stays stands for it."""
    return f"tensor {of_tensor(key)}" if isinstance(key, torch.Tensor) else repr(key)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


class Attr(Child):
    """``base.key`` for what is not in an attribute dictionary: slots, ``.grad``, ``__self__``."""

    paths = "{0.path}.{1}"
    step = staticmethod(getattr)

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        hidden = self.key in ("__self__", "__func__", "cell_contents") or self.key.startswith("__wrapped")
        return self.base.text if hidden else f"{self.base.text}.{self.key}"


class Method(Attr):
    """A function of a class, which runs only where its name is used."""


class Replacement(Child):
    """The module that stands in the place of another one while the step is traced."""

    paths, texts = "replaced[{0.path}]", "{0.text}.replacement"

    def read(self, call: Call) -> Any:
        return call.replaced[self.base.path]


class Referent(Child):
    """What `referent` gives."""

    paths = "inside({0.path})"
    step = staticmethod(lambda reference, key: referent(reference))


class Nth(Child):
    """A value of a dictionary, by position."""

    paths, texts = "list({0.path}.values())[{1}]", "{0.text}[{1}]"
    step = staticmethod(lambda container, index: list(base_of(container).values(container))[index])


class Member(Child):
    """A member of a set, in the set's own order of iteration."""

    paths, texts = "list({0.path})[{1}]", "list({0.text})[{1}]"
    step = staticmethod(lambda container, index: list(base_of(container).__iter__(container))[index])


class Cell(Child):
    """A closure cell of a function; the key is its index, and the variable's name."""

    paths = "{0.path}.__closure__[{1[0]}]"
    step = staticmethod(lambda function, key: function.__closure__[key[0]])

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        name = self.key[1]
        return f"L[{name!r}]" if self.base is FUNCTION else f"{self.base.text}.closure[{name!r}]"


class Globals(Child):
    """The table of a function's global variables; the key is the module's name."""

    paths, texts = "{0.path}.__globals__", "G"
    step = staticmethod(lambda function, key: function.__globals__)


class Global(Child):
    """A global variable; ``base`` is the table."""

    paths, texts = "globals({0.key!r})[{1!r}]", "G[{1!r}]"
    step = staticmethod(item)


def of_module(base: Source, name: str) -> Source:
    """A global variable, given the table: of a function, or of a module itself."""
    return Global(base, name) if isinstance(base, Globals) else Item(base, name)
