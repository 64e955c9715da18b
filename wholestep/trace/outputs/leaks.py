"""Leaks: what only exists while a step is traced and is alive afterwards, found by identity.

Code that keeps a fake tensor, a host number or a substitute after the capture would get values of no call. Weak
references tell what is alive; who holds it is only asked to explain it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import traceback
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from wholestep.capture.snapshot.garbage_collection import objects_are_frozen, referrers
from wholestep.errors import PACKAGE, LeakError
from wholestep.torch_compat import FakeTensor, held_by_cpp, no_modes

MAX_LEVELS = 12
CACHE = type(functools.lru_cache(len))


class Watch:
    """Weak references to what one trace has made."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []

    def add(self, values: Iterable[Any]) -> None:
        """Watches objects."""
        self._made += map(weakref.ref, values)

    def alive(self) -> list[Any]:
        """What is alive."""
        return [made for made in (reference() for reference in self._made) if made is not None]

    def reachable(self) -> list[Any]:
        """What is alive when cycles of young objects, as a capture's are, have gone: to search all takes long."""
        if self.alive():
            gc.collect(1)
        return self.alive()

    def refuse(self) -> None:
        """Refuses what is still alive, when all that may hold it has let go.

        Raises:
            LeakError: it is still referenced.
        """
        before, now = -1, len(self.reachable())
        while now and before != now:  # what refers to itself; of tensors that C++ holds one layer at a time
            gc.collect()
            before, now = now, len(self.alive())
        alive = self.alive()
        self._made.clear()
        held = _held(alive) if alive else ()  # at once, since each search of all objects takes 40 ms
        for value in alive:
            holder = _holder(value, alive) if id(value) in held else None
            if holder is not None:
                remedy = "return it from the step, or keep it in an attribute, list or dict that the step can see"
                if CACHE.__name__ in holder:
                    remedy = "call what keeps it outside of the step; in a library, compile the parts beside it"
                    empty_caches(frozen=objects_are_frozen())
                _take_out(alive)
                what = f"{_named(value)} is kept {holder}, where a replay cannot put what takes its place"
                raise LeakError(what, remedy, where=made_at(value))


_caches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The caches of all functions that have one, and what each said of itself when it was looked at last."""
_counted = [0, 0]  # references to their class, and caches, when they were looked for last


def empty_caches(frozen: bool) -> None:
    """Empties the caches of functions that keep what was made while tracing, for the calls that come after.

    Those of libraries (`functools.lru_cache`) are in no snapshot, so that nothing else would take it out of there. A
    search of all objects takes from 50 ms to seconds: it is repeated when there are other caches.

    Args:
        frozen: whether objects are frozen, by a capture under way or by the user; to count them takes longer than this.
    """
    if _counted != [sys.getrefcount(CACHE), len(_caches)]:
        for cache in [found for found in referrers([CACHE], frozen) if type(found) is CACHE]:
            _caches.setdefault(cache, None)
        _counted[:] = sys.getrefcount(CACHE), len(_caches)
    for cache, before in [*_caches.items()]:
        if before != cache.cache_info():
            if any(map(_is_traced, _contents(gc.get_referents(cache), 3))):
                cache.cache_clear()
            _caches[cache] = cache.cache_info()


failed = threading.local()
"""What the thread's last capture that failed has made."""


def take_back(error: BaseException | None = None) -> None:
    """Takes what a failed capture has made out of dicts and lists of libraries, as stores of parameters by name.

    Args:
        error: which ended it, and has its frames.
    """
    watch = vars(failed).pop("watch", None)
    if watch is not None:
        _take_out(watch.reachable(), error)


def _take_out(made: list[Any], error: BaseException | None = None) -> None:
    """Removes the entries of all dicts but modules', lists and deques: none is in a snapshot, which has put back what
    it knows."""
    if not made:
        return
    found = _held_by_frames(made, error)
    found = referrers(made, objects_are_frozen()) if found is None else found
    tables = [table for table in found if type(table) in (dict, list, deque) and table is not made]
    ids = {*map(id, made)}
    for table in tables:
        if type(table) is not dict:
            left = [value for value in table if id(value) not in ids]
            table.clear()
            table.extend(left)
        elif _name(table) is None:
            for key in [key for key, value in table.items() if id(value) in ids]:
                del table[key]


# What leads from an error to what its frames' variables hold.
_BETWEEN = (BaseException, types.TracebackType, types.FrameType, types.FunctionType, types.MethodType, types.CellType,
            tuple, list, dict, torch.SymFloat, torch.SymInt)  # fmt: skip


def _held_by_frames(made: list[Any], error: BaseException | None) -> list[Any] | None:
    """What refers to objects, where all that does follows from an error; None where that is more, somewhere else."""
    (known,) = [sys.getrefcount(one) for one in [object()]]
    left = {id(one): sys.getrefcount(one) - known - held_by_cpp(one) for one in made}
    found, todo, met = list[Any](), [error], {id(made)}
    while todo:
        holder = todo.pop()
        for one in gc.get_referents(holder):
            if id(one) in left:
                left[id(one)] -= 1
                found.append(holder)
            elif id(one) not in met and issubclass(type(one), _BETWEEN):
                met.add(id(one))
                todo += [] if type(one) is dict and "__builtins__" in one else [one]
    return None if any(count > 0 for count in left.values()) else found


def _contents(values: Iterable[Any], levels: int) -> Iterator[Any]:
    """Values, and what those that are containers hold."""
    for value in values:
        yield value
        if levels and isinstance(value, (dict, list, tuple)):
            yield from _contents(dict.values(value) if isinstance(value, dict) else value, levels - 1)


def _is_traced(value: Any) -> bool:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):  # whose comparisons ask the trace
        return True
    return isinstance(value, FakeTensor) and hasattr(value, "wholestep_ref")


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        with no_modes():
            return f"a tensor made in the step ({tuple(value.shape)}, {value.dtype})"
    return "a number computed in the step" if hasattr(value, "fx_node") else "what stands for an object of the step"


def made_at(value: Any) -> str:
    """The user's line that made a tensor, number, generator or function in the step; empty for other objects."""
    ref, node = getattr(value, "wholestep_ref", None), getattr(getattr(value, "node", value), "fx_node", None)
    node = ref.storage.value if ref is not None else node
    if node is not None:
        return str(node.meta["info"].where)
    code = getattr(value, "gi_code", None) or getattr(value, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""


def _held(values: list[Any]) -> set[int]:
    """ids of what variables and the objects that the garbage collector sees hold, besides the list itself."""
    holders = [h for h in referrers(values, frozen=False) if h is not values and not isinstance(h, fx.Node)]
    return {*_variables(), *map(id, gc.get_referents(*holders))}


def _holder(value: Any, known: list[Any]) -> str | None:
    """Who holds an object, up to the first that has a name; None when nothing that has one leads to it."""
    variables = _variables()
    if id(value) in variables:
        return variables[id(value)]
    seen, level, way = {id(known)}, [value], dict[int, str]()
    above: list[Any] = []
    for _ in range(MAX_LEVELS):
        above.clear()
        seen |= {id(level), id(above), *map(id, level)}
        # a node shows what a capture has seen there: the graphs that a compiler was given are no leaks
        above += [h for h in referrers(level, frozen=False) if id(h) not in seen and not isinstance(h, fx.Node)]
        for holder in above:
            seen.add(id(holder))
            below = next((o for o in level if any(inner is o for inner in gc.get_referents(holder))), level[0])
            way[id(holder)] = f"{_link(holder, below)}{way.get(id(below), '')}"
            name = _name(holder) or variables.get(id(holder))
            if name is not None:
                return f"{name}{way[id(holder)]}"
        if not above:  # by C++ alone, as the hooks in the history of a tensor are, or by unreachable objects
            return None
        level[:] = above
    return None


def _variables() -> dict[int, str]:
    """ids of what variables of running functions hold, none of which the garbage collector sees -> whose it is."""
    found: dict[int, str] = {}
    for frame in [*sys._current_frames().values()]:
        for above, _ in traceback.walk_stack(frame):
            code = above.f_code
            if code.co_flags & inspect.CO_OPTIMIZED and not code.co_filename.startswith(PACKAGE):
                held = above.f_locals
                found |= dict.fromkeys(map(id, held.values()), f"by a variable of {code.co_qualname}")
                if isinstance(held, dict) and sys.getrefcount(held) <= 3:  # a copy, which the frame would keep
                    held.clear()
    return found


def _link(holder: Any, value: Any) -> str:
    """How an object is reached from its holder."""
    if isinstance(holder, dict):
        return next((f"[{key!r}]" for key, inner in holder.items() if inner is value), "")
    if isinstance(holder, (list, tuple)):
        return f"[{next((i for i, inner in enumerate(holder) if inner is value), '')}]"
    table = getattr(holder, "__dict__", None)
    found = next((name for name, inner in table.items() if inner is value), "") if isinstance(table, dict) else ""
    return f".{found}" if found else f" ({type(holder).__name__})"


def _name(holder: Any) -> str | None:
    """What a person calls an object that is held for good; None for others."""
    if isinstance(holder, types.ModuleType):
        return f"in module {holder.__name__}"
    if isinstance(holder, type):
        return f"in class {holder.__qualname__}"
    if isinstance(holder, dict) and holder.get("__name__") in sys.modules:
        return f"in module {holder['__name__']}"
    return None
