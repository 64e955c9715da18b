"""What moves on by itself when a step uses it, unseen by guards: iterators written in C, generators of random numbers.

`itertools.count`, a generator or an iterator over a list gives another value at each call, where a replay would repeat
the first. While a step is traced a stand-in refuses to move them; one that is merely passed on comes back as itself.
Python's and NumPy's own random generators are put back where they were, and refused when the step has drawn from them.
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

from wholestep.capture.facts import is_plain
from wholestep.errors import DataDependentError, UnsupportedError


class Stopped:
    """Stands for an iterator: has its type and attributes, and refuses to move it."""

    def __init__(self, holder: Any, source: Any) -> None:
        moving = next((names for base, names in MOVING.items() if isinstance(holder, base)), _MOVING)
        self.__dict__.update(holder=holder, source=source, moving=moving)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["holder"])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["holder"], name)
        return (lambda *_, **__: _refuse(self)) if name in self.__dict__["moving"] else value

    def __iter__(self) -> Any:
        return self

    def __enter__(self) -> Any:
        self.__dict__["holder"].__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.__dict__["holder"].__exit__(*error)


def _refuse(self: Any, *_: Any) -> Any:
    state = self.__dict__
    raise UnsupportedError(
        f"the step takes the next value of {state['source']}, a {type(state['holder']).__name__}, which moves on at "
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
    """

    def __init__(self) -> None:
        self.iterators: dict[int, tuple[Any, Any]] = {}
        self.caches: dict[int, tuple[Any, Any]] = {}
        self._randoms: list[tuple[Any, Any, Any]] = []  # with their sources and states

    def watch(self, generator: Any, source: Any) -> None:
        """Notes where a generator of random numbers stands."""
        self._randoms.append((generator, source, _read(generator)))

    def put(self) -> dict[int, Any]:
        """Makes a stand-in for each iterator and each cache; gives them by the id of what they stand for."""
        stopped = {key: Stopped(holder, source) for key, (holder, source) in self.iterators.items()}
        return stopped | {key: Cached(function, source) for key, (function, source) in self.caches.items()}

    def refuse_moved(self) -> None:
        """Refuses numbers that were drawn.

        Raises:
            DataDependentError: a replay would repeat them.
        """
        for generator, source, state in self._randoms:
            if str(_read(generator)) != str(state):
                raise DataDependentError(
                    f"the step draws from {source}, a {type(generator).__name__}, whose numbers a replay would repeat",
                    remedy="draw with torch, or draw outside of the step and pass the number as an argument",
                )

    def restore(self) -> None:
        """Puts random generators back where they were."""
        for generator, _, state in self._randoms:
            _write(generator, state)


Reader = Callable[[Any], Any]
Writer = Callable[[Any, Any], None]
# Generators of random numbers: how to read and to put back the state that their C code keeps.
RANDOM: dict[type, tuple[Reader, Writer]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    numpy.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    numpy.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
}


def _of(generator: Any) -> tuple[Reader, Writer]:
    return next(RANDOM[base] for base in type(generator).__mro__ if base in RANDOM)


def _read(generator: Any) -> Any:
    return _of(generator)[0](generator)


def _write(generator: Any, state: Any) -> None:
    _of(generator)[1](generator, state)
