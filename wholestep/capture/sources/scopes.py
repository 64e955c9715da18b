"""Sources in the scope of a function: the step itself, its arguments, cells, global variables, the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wholestep.capture.outside.torch_settings import READERS
from wholestep.capture.sources.source import Call, Child, Source


@dataclass(frozen=True, eq=False)
class Function(Source):
    """The step's own function."""

    @cached_property
    def path(self) -> str:
        return "fn"

    @cached_property
    def text(self) -> str:
        return "L['self']"

    def read(self, call: Call) -> Any:
        return call.fn


@dataclass(frozen=True, eq=False)
class Local(Source):
    """An argument: parameter ``name``, passed at position ``at`` or, for a string, by keyword.

    ``index`` counts within a parameter like ``*args``.
    """

    name: str
    at: int | str
    index: int | None = None

    @cached_property
    def path(self) -> str:
        return f"args[{self.at}]" if isinstance(self.at, int) else f"kwargs[{self.at!r}]"

    @cached_property
    def text(self) -> str:
        return f"L[{self.name!r}]" if self.index is None else f"L[{self.name!r}][{self.index}]"

    def read(self, call: Call) -> Any:
        return call.args[self.at] if isinstance(self.at, int) else call.kwargs[self.at]


@dataclass(frozen=True, eq=False)
class Cell(Child):
    """A closure cell of a function, for variable ``name``."""

    index: int
    name: str

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}.__closure__[{self.index}]"

    @cached_property
    def text(self) -> str:
        return f"L[{self.name!r}]" if self.base.text == "L['self']" else f"{self.base.text}.closure[{self.name!r}]"

    def step(self, holder: Any) -> Any:
        return holder.__closure__[self.index]


@dataclass(frozen=True, eq=False)
class Closure(Child):
    """What a closure cell holds; ``base`` is the `Cell`."""

    @cached_property
    def path(self) -> str:
        return f"{self.base.path}.cell_contents"

    @cached_property
    def text(self) -> str:
        return self.base.text

    def step(self, holder: Any) -> Any:
        return holder.cell_contents


@dataclass(frozen=True, eq=False)
class Global(Child):
    """A global variable that the code of a function names; ``base`` is the function."""

    name: str
    module: str

    @cached_property
    def path(self) -> str:
        return f"globals({self.module!r})[{self.name!r}]" if self.name else f"{self.base.path}.__globals__"

    @cached_property
    def text(self) -> str:
        return f"G[{self.name!r}]" if self.name else "G"

    def step(self, holder: Any) -> Any:
        return holder.__globals__[self.name] if self.name else holder.__globals__


@dataclass(frozen=True, eq=False)
class Variable(Source):
    """A variable of the environment, None where there is none, or a setting."""

    name: str

    @cached_property
    def path(self) -> str:
        return self.name if self.name in READERS else f"os.environ[{self.name!r}]"

    def read(self, call: Call) -> Any:
        return READERS[self.name]() if self.name in READERS else os.environ.get(self.name)


@dataclass(frozen=True, eq=False)
class InModule(Source):
    """What a module, of a library as a rule, holds under a name."""

    module: str
    name: str

    @cached_property
    def path(self) -> str:
        return f"sys.modules[{self.module!r}].{self.name}"

    def read(self, call: Call) -> Any:
        return getattr(sys.modules[self.module], self.name)
