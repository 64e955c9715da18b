"""Garbage collection around captures: off while many objects are made, and made up for afterwards.

Its lists tell which objects were made since a step began to be traced.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from wholestep.capture.sources import Attr, Source, module
from wholestep.errors import UnsupportedError

COUNTS = 8  # to count blocks takes 20 ms where there are ten million: once in so many captures
MOST_PLACES = 8  # beyond, what holds those that were found is no longer looked for


class _Counted:
    """Blocks of memory after the last full collection, at first those before any capture; whether objects were frozen
    since; how often captures were asked for one since blocks were counted."""

    blocks = 0
    frozen = False
    asked = 0


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector away from code that makes many small objects and drops none.

    A full collection in the middle of a walk of BERT-base costs 170 ms, the walk itself 20 ms.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            _collect_when_due()


def objects_are_frozen() -> bool:
    """Whether somebody has set objects aside; Python 3.12 begins with some hundred that are."""
    return gc.get_freeze_count() > 10_000


@contextmanager
def new_objects() -> Iterator[Callable[[], set[int]]]:
    """Gives a function that gives the ids of all objects made inside of the context so far.

    The collector's lists have only these; what was there before is set aside, which costs nothing. Objects that the
    collector does not follow, which hold no others, are not among them.
    """
    nested = objects_are_frozen()  # by the user, which stays
    _Counted.blocks = _Counted.blocks or sys.getallocatedblocks()
    gc.freeze()
    try:
        yield lambda: set(map(id, gc.get_objects()))
    finally:
        if not nested:
            gc.unfreeze()
            _Counted.frozen = True
            _collect_when_due()


def referrers(values: Sequence[Any], frozen: bool) -> list[Any]:
    """What refers to some objects.

    Args:
        frozen: whether objects are set aside, as inside of `new_objects`, so that they have to be looked through, too.
    """
    given = tuple(values)  # the very arguments, which Python 3.13 counts
    if frozen:
        gc.unfreeze()
    found = [holder for holder in gc.get_referrers(*given) if holder is not given]
    if frozen:
        gc.freeze()
    return found


def functions_of(code: CodeType) -> list[FunctionType]:
    """The functions that have some code, looked for inside of `new_objects`.

    Raises:
        UnsupportedError: there is none.
    """
    held = referrers([code], frozen=True)
    found = [one for one in held if isinstance(one, FunctionType) and one.__code__ is code]
    if not found:
        raise UnsupportedError(f"{code.co_qualname} runs in the step, and nothing that the step can see leads to it",
                               "call it by a name", where=f"{code.co_filename}:{code.co_firstlineno}")
    return found


def places_of(functions: list[FunctionType]) -> dict[str, Callable[[], Any]]:
    """Where functions are kept, in dicts and attributes, and what holds them: names, and what reads each place."""
    found: dict[str, Callable[[], Any]] = {}
    values: list[Any] = [*functions]
    met: set[int] = set()
    while values:
        wanted, holders = set(map(id, values)), []
        met |= wanted
        for held in referrers(values, frozen=True):
            table = held if type(held) is dict else getattr(held, "__dict__", None)
            items = [*table.items()] if type(table) is dict and "__builtins__" not in table else []
            keys = [key for key, value in items if id(value) in wanted]
            found |= {f"[{k!r}] of {type(held).__name__} {id(table)}": partial(dict.get, table, k) for k in keys}
            holders += [held] if held is not table and id(held) not in met and (keys or isinstance(held, tuple)) else []
        values = holders if len(found) < MOST_PLACES else []
    return found


def _collect_when_due() -> None:
    """Who captures often would have no full collection: they are counted from the last time that objects were frozen.

    Due is one when what is allocated has grown by a quarter, as with the collector itself.
    """
    if not _Counted.frozen or not gc.isenabled():
        return
    _Counted.frozen = False
    gc.collect(0)  # a capture's own garbage is among the new objects, which alone are searched
    _Counted.asked += 1
    if _Counted.asked % COUNTS:
        return
    if 4 * sys.getallocatedblocks() > 5 * _Counted.blocks:
        gc.collect()
        _Counted.blocks = sys.getallocatedblocks()


def kept_in_module(value: Any) -> Source | None:
    """The name under which a module holds an object, such as ``sys.stdout``, which may be another in a later call."""
    for holder in list(sys.modules.values()):
        for name, held in list(getattr(holder, "__dict__", {}).items()):
            if held is value and name.isidentifier():
                return Attr(module(holder.__name__), name)
    return None
