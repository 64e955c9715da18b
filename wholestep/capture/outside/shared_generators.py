"""The random generators of Python and NumPy: draws from them are seen in the methods of C that they all end in.

Whoever holds such a method, bound, in a closure or in a partial of a library's, calls it past its class and modules.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType, MethodDescriptorType
from typing import Any

import numpy
from sympy.core import random as of_sympy  # which draws to compare expressions, as those of symbolic sizes

from wholestep.capture.snapshot.user_code import is_library
from wholestep.errors import CaptureError
from wholestep.patches import original, suspended

try:
    from wholestep.capture.outside._methods import watch
except ImportError as missing:
    raise ImportError("wholestep's compiled parts are missing or older than its code: run `python setup.py build_ext "
                      "--inplace` (or `pip install .`) with a C compiler") from missing  # fmt: skip

OF_C: Any = random.Random.__mro__[1]  # the class of C in whose methods those of Python's generators end
RANDOM: tuple[type, ...] = (random.Random, numpy.random.RandomState, numpy.random.Generator, numpy.random.BitGenerator)
SHARED: tuple[tuple[Any, str], ...] = (
    (random.random.__self__, "random"), (numpy.random.rand.__self__, "numpy.random"))  # type: ignore[attr-defined]  # fmt: skip
OF_SYMPY = [held for held in vars(of_sympy).values() if isinstance(held, random.Random)]
_TO_DEFINITION = {True: 40, False: 16}  # in a method descriptor, and in a function of C or of Cython


def _nothing(generator: Any, first: Any) -> None:
    """What is called before a method that nobody watches."""


class Method:
    """A method by which generators draw, are seeded or set.

    Attributes:
        entered: what is called first, with the generator and an argument; what it raises comes in the place of a draw.
    """

    entered: Callable[[Any, Any], None]

    def __init__(self, name: str, held: Any) -> None:
        place = id(held) + _TO_DEFINITION[isinstance(held, MethodDescriptorType)]
        self.name, self._definition = name, ctypes.c_void_p.from_address(place).value or 0
        assert ctypes.c_char_p.from_address(self._definition).value == name.encode()
        vars(self)["entered"] = _nothing

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "entered":
            watch(self._definition, None if value is _nothing else value)


METHODS = [Method(name, held) for owner in (OF_C, *RANDOM[1:]) for name, held in vars(owner).items()
           if callable(held) and not name.startswith("_")]  # fmt: skip
METHODS.append(Method("spawn", vars(numpy.random.SeedSequence)["spawn"]))  # which counts
BITS = [kind for kind in numpy.random.BitGenerator.__subclasses__() if "state" in vars(kind)]


class _State:
    """The attribute by which a bit generator of NumPy's is set."""

    def __init__(self, kind: type, read: Callable[[Any, Any], None], entered: Callable[[Any, Any], None]) -> None:
        self._found, self._read, self._entered = original(kind, "state"), read, entered

    def __get__(self, generator: Any, kind: Any = None) -> Any:
        if generator is not None:
            self._read(generator, None)
        return self._found.__get__(generator, kind)

    def __set__(self, generator: Any, state: Any) -> None:
        self._entered(generator, state)
        self._found.__set__(generator, state)


class Draws:
    """Draws of one step.

    Args:
        refuse: is given the name of a generator that was there before the step.

    Attributes:
        names: of generators, by their ids: their sources where the step can see them.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.names: dict[int, tuple[Any, Any]] = {id(generator): (generator, name) for generator, name in SHARED}
        self._refuse, self._made, self._halves = refuse, [*OF_SYMPY], list[tuple[Any, float]]()
        self._read: dict[int, tuple[Any, str]] = {}  # where they were, "" where they are put back

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is called before a method; garbage collection tells which generators the step has made itself."""
        self._read.clear()
        for generator, _ in self.names.values():  # `gauss` gives every other number from an attribute
            if getattr(generator, "gauss_next", None) is not None:
                self._halves.append((generator, generator.gauss_next))
                generator.gauss_next = None
        yield from ((method, "entered", self._entering(method.name)) for method in METHODS)
        yield from ((kind, "state", _State(kind, *map(self._entering, ("get_state", "state"))))
                    for kind in BITS)  # fmt: skip

    def put_back(self) -> None:
        """Has the next numbers of generators be what they were."""
        while self._halves:
            generator, number = self._halves.pop()
            generator.gauss_next = number

    def refuse_read(self) -> None:
        """Refuses states that were read and not put back, of which something else was made."""
        for generator, where in self._read.values():
            if where:
                try:
                    self._refuse(self._shown(generator))
                except CaptureError as error:
                    error.locate(where)
                    raise

    def _shown(self, generator: Any) -> str:
        return f"{self.names.get(id(generator), (0, 'a library'))[1]}, a {type(generator).__name__}"

    def _entering(self, name: str) -> Callable[[Any, Any], None]:
        def enter(generator: Any, first: Any) -> None:
            if self._is_made(generator):
                return
            if name in _READS:
                self._read.setdefault(id(generator), (generator, _line()))
            elif name in _SETS and id(generator) in self._read and _is_in(name, generator, first):  # as Dynamo does
                self._read[id(generator)] = generator, ""
            else:
                self._refuse(self._shown(generator))

        return enter

    def _is_made(self, generator: Any) -> bool:
        if id(generator) in self.names:
            return False
        if not any(made is generator for made in self._made):
            if not any(value is generator for value in gc.get_objects()):
                return False
            self._made.append(generator)
        return True


_READS, _SETS = ("getstate", "get_state"), ("setstate", "set_state", "state")


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a library"


def _is_in(name: str, generator: Any, state: Any) -> bool:
    """Whether a generator is in a state that it is given."""
    with suspended():
        if name == "state":
            before = generator.state
            state = {key: state[key] for key in before if key in state}  # those of RandomState have more
        else:
            before = OF_C.getstate(generator) if isinstance(generator, OF_C) else generator.get_state()
    return bool(_plain(before) == _plain(state))


def _plain(state: Any) -> Any:
    """A state, in lists and dictionaries that can be compared."""
    if isinstance(state, numpy.ndarray):
        return state.tolist()
    if isinstance(state, (tuple, list)):
        return [*map(_plain, state)]
    return {key: _plain(value) for key, value in state.items()} if isinstance(state, dict) else state
