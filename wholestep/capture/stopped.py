"""What moves on by itself when a step uses it, unseen by guards: iterators written in C, generators of random numbers.

`itertools.count`, a generator or an iterator over a list gives another value at each call, where a replay would repeat
the first. While a step is traced a stand-in refuses to move them; one that is merely passed on comes back as itself.
Python's and NumPy's own random generators are put back where they were, and refused when the step has drawn from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy

from wholestep.errors import DataDependentError, UnsupportedError


class Stopped:
    """Stands for an iterator: has its type and attributes, and refuses to move it."""

    def __init__(self, holder: Any, source: Any) -> None:
        self.__dict__.update(holder=holder, source=source)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["holder"])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["holder"], name)
        return (lambda *_, **__: _refuse(self)) if name in _MOVING else value

    def __iter__(self) -> Any:
        return self


def _refuse(self: Any, *_: Any) -> Any:
    state = self.__dict__
    raise UnsupportedError(
        f"the step takes the next value of {state['source']}, a {type(state['holder']).__name__}, which moves on at "
        "each call; a replay would repeat the first value",
        remedy="call next() outside of the step and pass the value as an argument, or pass a list",
    )


_MOVING = ("send", "throw", "close", "__setstate__")
for _name in ("__next__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"):
    setattr(Stopped, _name, _refuse)


class Stoppers:
    """The iterators and random generators that one walk has met.

    Attributes:
        iterators: id of an iterator -> itself and its source.
    """

    def __init__(self) -> None:
        self.iterators: dict[int, tuple[Any, Any]] = {}
        self._randoms: list[tuple[Any, Any, Any]] = []  # with their sources and states

    def watch(self, generator: Any, source: Any) -> None:
        """Notes where a generator of random numbers stands."""
        self._randoms.append((generator, source, _read(generator)))

    def put(self) -> dict[int, Stopped]:
        """Makes a stand-in for each iterator; gives them by the id of the iterator."""
        return {key: Stopped(holder, source) for key, (holder, source) in self.iterators.items()}

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
