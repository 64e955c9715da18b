"""The random generators of Python and NumPy: draws from them are seen in the methods of C that they all end in.

Whoever holds such a method, bound, in a closure or in a partial of a library's, calls it past its class and modules.
"""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable, Iterable, Iterator
from types import MethodDescriptorType
from typing import Any

import numpy
from sympy.core import random as of_sympy  # which draws to compare expressions, as those of symbolic sizes

from wholestep.capture.outside._methods import watch
from wholestep.patches import original

OF_C: Any = random.Random.__mro__[1]  # the class of C in whose methods those of Python's generators end
RANDOM: tuple[type, ...] = (random.Random, numpy.random.RandomState, numpy.random.Generator, numpy.random.BitGenerator)
SHARED: tuple[tuple[Any, str], ...] = (
    (random.random.__self__, "random"), (numpy.random.rand.__self__, "numpy.random"))  # type: ignore[attr-defined]  # fmt: skip
OF_SYMPY = [held for held in vars(of_sympy).values() if isinstance(held, random.Random)]
_TO_DEFINITION = {True: 40, False: 16}  # in a method descriptor, and in a function of C or of Cython


def _nothing(generator: Any, first: Any) -> None:
    """What is called before a method that nobody watches."""


class Methods:
    """Those by which generators draw, are seeded or set.

    Attributes:
        entered: what is called first, with the generator and an argument; what it raises comes in the place of a draw.
    """

    definitions: list[int]
    entered: Callable[[Any, Any], None]

    def __init__(self, methods: Iterable[tuple[str, Any]]) -> None:
        vars(self).update(definitions=[], entered=_nothing)
        for name, held in methods:
            place = id(held) + _TO_DEFINITION[isinstance(held, MethodDescriptorType)]
            self.definitions.append(ctypes.c_void_p.from_address(place).value or 0)
            assert ctypes.c_char_p.from_address(self.definitions[-1]).value == name.encode()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for definition in self.definitions if name == "entered" else ():
            watch(definition, None if value is _nothing else value)


METHODS = Methods([
    *((name, held) for owner in (OF_C, *RANDOM[1:]) for name, held in vars(owner).items()
      if callable(held) and not name.startswith("_")),
    ("spawn", vars(numpy.random.SeedSequence)["spawn"]),  # which counts
])  # fmt: skip
ATTRIBUTES: list[tuple[type, str]] = [
    *((kind, "state") for kind in numpy.random.BitGenerator.__subclasses__() if "state" in vars(kind)),
    (random.Random, "gauss_next"),  # every other number of `gauss`, which does not ask C for it
]


def _asked(kind: type, name: str, enter: Callable[[Any, Any], None]) -> property:
    """An attribute that tells a generator's next numbers, and by which it is set."""
    found = original(kind, name)

    def read(generator: Any) -> Any:
        enter(generator, None)
        return found.__get__(generator)

    def put(generator: Any, state: Any) -> None:
        enter(generator, state)
        found.__set__(generator, state)

    return property(read, put)


class Draws:
    """Draws of one step.

    Args:
        refuse: is given the name of a generator that was there before the step.

    Attributes:
        names: of generators, by their ids: their sources where the step can see them.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.names: dict[int, tuple[Any, Any]] = {id(generator): (generator, name) for generator, name in SHARED}
        self._refuse, self._made = refuse, [*OF_SYMPY]

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is called before a method; garbage collection tells which generators the step has made itself."""
        yield METHODS, "entered", self._enter
        yield from ((kind, name, _asked(kind, name, self._enter)) for kind, name in ATTRIBUTES)

    def _enter(self, generator: Any, first: Any) -> None:
        if not self._is_made(generator):
            name = self.names.get(id(generator), (0, "a library"))[1]
            self._refuse(f"{name}, a {type(generator).__name__}")

    def _is_made(self, generator: Any) -> bool:
        if id(generator) in self.names:
            return False
        if not any(made is generator for made in self._made):
            if not any(value is generator for value in gc.get_objects()):
                return False
            self._made.append(generator)
        return True
