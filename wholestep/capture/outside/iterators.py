"""Stand-ins for what moves on or fills itself when a step uses it, unseen by guards: iterators, caches of functions.

`itertools.count`, a generator, an open file or an iterator over a list gives another value at each call, where a replay
would repeat the first. While a step is traced a stand-in refuses to move them; one that is merely passed on comes back
as itself.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from wholestep.capture.guards.compared_values import is_plain
from wholestep.errors import CaptureError, UnsupportedError

# Methods by which iterators move on, and files, which are iterators over lines.
_MOVING = frozenset({"send", "throw", "close", "__setstate__", "read", "read1", "readline", "readlines", "readall",
                     "readinto", "readinto1", "peek", "getvalue", "getbuffer", "tell"})  # fmt: skip


class Stopped:
    """Stands for an iterator: has its type and attributes, and refuses to move it."""

    def __init__(self, iterator: Any, source: Any, refused: list[CaptureError]) -> None:
        self.__dict__.update(original=iterator, source=source, refused=refused)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["original"])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["original"], name)
        return (lambda *_, **__: _refuse(self)) if name in _MOVING else value

    def __iter__(self) -> Any:
        return self

    def __enter__(self) -> Any:
        self.__dict__["original"].__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.__dict__["original"].__exit__(*error)


def _refuse(self: Any, *_: Any) -> Any:
    state = self.__dict__
    error = UnsupportedError(
        f"the step takes the next value of {state['source']}, a {type(state['original']).__name__}, which moves on at "
        "each call; a replay would repeat the first value",
        remedy="call next() outside of the step and pass the value as an argument, or pass a list",
    )
    state["refused"].append(error)
    raise error


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
