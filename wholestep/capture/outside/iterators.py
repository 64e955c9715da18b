"""What moves on by itself when a step uses it, unseen by guards: iterators written in C, generators of random numbers.

`itertools.count`, a generator or an iterator over a list gives another value at each call, where a replay would repeat
the first. While a step is traced a stand-in refuses to move them; one that is merely passed on comes back as itself.
So do Python's and NumPy's random generators that were there before the step, in the thread that traces.
"""

from __future__ import annotations

import functools
import io
import queue
import random
import types
from collections.abc import Callable
from typing import Any

import numpy

from wholestep.capture.guards.compared_values import is_plain
from wholestep.errors import DataDependentError, UnsupportedError
from wholestep.patches import Replacement


class Stopped:
    """Stands for an iterator: has its type and attributes, and refuses to move it."""

    def __init__(self, iterator: Any, source: Any) -> None:
        moving = next((names for base, names in MOVING.items() if isinstance(iterator, base)), _MOVING)
        self.__dict__.update(original=iterator, source=source, moving=moving)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["original"])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["original"], name)
        return (lambda *_, **__: _refuse(self)) if name in self.__dict__["moving"] else value

    def __iter__(self) -> Any:
        return self

    def __enter__(self) -> Any:
        self.__dict__["original"].__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.__dict__["original"].__exit__(*error)


def _refuse(self: Any, *_: Any) -> Any:
    state = self.__dict__
    raise UnsupportedError(
        f"the step takes the next value of {state['source']}, a {type(state['original']).__name__}, which moves on at "
        "each call; a replay would repeat the first value",
        remedy="call next() outside of the step and pass the value as an argument, or pass a list",
    )


_MOVING = ("send", "throw", "close", "__setstate__")
# Other objects of C that move on, and the methods by which they do; files may be written to.
MOVING: dict[type, tuple[str, ...]] = {
    queue.SimpleQueue: ("get", "get_nowait", "qsize", "empty"),
    io.IOBase: ("read", "read1", "readline", "readlines", "readall", "readinto", "readinto1", "peek", "getvalue",
                "getbuffer", "tell"),
    random.SystemRandom: tuple(name for name in vars(random.Random) if not name.startswith("_")) + ("random",
                                                                                                  "getrandbits"),
}  # fmt: skip
for _name in ("__next__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"):
    setattr(Stopped, _name, _refuse)


class Cached:
    """Stands for a function with `functools.cache`: what is made while the step is traced must not stay in there."""

    def __init__(self, function: Any, source: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.source = function, source
        self.cache_info, self.cache_clear = function.cache_info, function.cache_clear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        missed = self.function.cache_info().misses
        value = self.function(*args, **kwargs)
        if not is_plain(value):
            if self.function.cache_info().misses == missed:
                what = f"a value that {self.source} keeps in its cache, where no guard sees it"
            else:
                self.function.cache_clear()
                what = f"{self.source} keeps in its cache what it makes in the step"
            raise UnsupportedError(what, remedy="keep it in an attribute or a dict, or call it outside of the step")
        return value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class Stoppers:
    """The iterators and random generators that one walk has met.

    Attributes:
        iterators: id of an iterator -> itself and its source.
        caches: id of a function with a cache of C -> itself and its source.
        randoms: id of a random generator of Python or NumPy -> itself and its source.
        held: id of a method of one that something holds -> itself.
    """

    def __init__(self) -> None:
        self.iterators: dict[int, tuple[Any, Any]] = {}
        self.caches: dict[int, tuple[Any, Any]] = {}
        self.randoms: dict[int, tuple[Any, Any]] = {id(g): (g, name) for g, name in GLOBAL.items()}
        self.held: dict[int, Any] = {}
        self._refusal: DataDependentError | None = None

    def put(self) -> dict[int, Any]:
        """Makes a stand-in for each iterator and each cache; gives them by the id of what they stand for."""
        stopped: dict[int, Any] = {key: Stopped(iterator, source) for key, (iterator, source) in self.iterators.items()}
        stopped |= {key: Cached(function, source) for key, (function, source) in self.caches.items()}
        return stopped | {key: _looked_up(method) for key, method in self.held.items()}

    def replacements(self) -> list[Replacement]:
        """What refuses to draw from the generators that were there before the step."""
        methods = [(kind, name, self._refusing(vars(kind)[name])) for kind, name in DRAWING]
        return [*methods, *((module, name, _looked_up(getattr(module, name))) for module, name in BOUND)]

    def _refusing(self, method: Any) -> Callable[..., Any]:
        def call(generator: Any, *args: Any, **kwargs: Any) -> Any:
            moves = method.__name__ not in ("setstate", "set_state") or str(_state(generator)) != str(args[0])
            if id(generator) in self.randoms and moves:
                source = self.randoms[id(generator)][1]
                self._refusal = self._refusal or DataDependentError(
                    f"the step draws from {source}, a {type(generator).__name__}, whose numbers a replay would repeat",
                    remedy="draw with torch, or draw outside of the step and pass the number as an argument; what a "
                    "library draws is switched off in its settings (SpecAugment: a probability of 0)",
                )
                raise self._refusal
            return method(generator, *args, **kwargs)

        return call

    def refuse_moved(self) -> None:
        """Refuses numbers that the step wanted to draw, and went on without.

        Raises:
            DataDependentError: a replay would repeat them.
        """
        if self._refusal is not None:
            raise self._refusal


def _looked_up(method: Any) -> Callable[..., Any]:
    """A bound method that is looked up anew at each call."""
    return lambda *args, **kwargs: getattr(method.__self__, method.__name__)(*args, **kwargs)


def _state(generator: Any) -> Any:
    return _OF_C.getstate(generator) if isinstance(generator, _OF_C) else generator.get_state()  # type: ignore[attr-defined]


# The generators of numbers that all code shares, and their names.
_PYTHONS: Any = random.random
_NUMPYS: Any = numpy.random.rand
GLOBAL: dict[Any, str] = {_PYTHONS.__self__: "random", _NUMPYS.__self__: "numpy.random"}
RANDOM: tuple[type, ...] = (random.Random, numpy.random.RandomState, numpy.random.Generator)
_OF_C = random.Random.__mro__[1]
_READING = ("getstate", "get_state")
# Methods by which generators draw, are seeded or set, by the class of C that has them. Python's own end in these, but
# for one that gives every other number from an attribute.
DRAWING = [(kind, name) for kind in (_OF_C, *RANDOM[1:]) for name, method in vars(kind).items()
           if callable(method) and not name.startswith("_") and name not in _READING] + [(random.Random, "gauss")]
# Those that modules have bound to the generators of all.
BOUND = [(module, name) for module in (random, numpy.random) for name, method in vars(module).items()
         if any(getattr(method, "__self__", None) is generator for generator in GLOBAL) and name not in _READING]
