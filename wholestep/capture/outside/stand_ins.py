"""Stand-ins for what a replay cannot look into: iterators, lists that are appended to, cached functions, schedulers.

`itertools.count`, a generator, an open file or an iterator over a list gives another value at each call, where a replay
would repeat the first; a list of losses is longer at each call, and yet the step is the same. So while a step is traced
a stand-in takes their place. That of an iterator refuses to move; that of a list is empty, takes what is appended, and
refuses to be read. What is merely passed on comes back as itself.

A learning-rate scheduler computes numbers from a count that grows with every call, in Python of any kind. Traced, that
would be a new program for each step. So while a step is captured, `scheduler.step()` only takes note of the call, and
of what containers hold then; the effect `STEP` makes the real call after the program has run, behind what the step
changed before it and ahead of what it changed later. The numbers that the scheduler sets are `Pending` from the note
on: whoever computes with them is told so.

The version counter of a tensor from outside is a `Count`, as a step reads it and leaves it in what it gives or keeps.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.snapshot.container_kinds import Contents
from wholestep.capture.sources import Child, Item, Source
from wholestep.errors import CaptureError, LeakError, UnsupportedError

REMEDY = "read it outside of the step, clear it first, or return the values and append them outside"


def refusing(error: type[CaptureError], what: str, remedy: str) -> Callable[..., Any]:
    """A method that refuses the step, also where code of its own catches that.

    Args:
        what: a format, given source and type.
    """

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        state = vars(self)
        refused = error(what.format(state["source"], type(state["original"]).__name__), remedy=remedy)
        state["refused"].append(refused)
        raise refused

    return refuse


class StandIn:
    """Stands for an object, with its type.

    Args:
        source: where the object is.
        refused: takes the error by which the step is refused.
    """

    def __init__(self, original: Any, source: Any, refused: list[CaptureError]) -> None:
        vars(self).update(original=original, source=source, refused=refused)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["original"])


_move = refusing(
    UnsupportedError,
    "the step takes the next value of {}, a {}, which moves on at each call; a replay would repeat the first value",
    "call next() outside of the step and pass the value as an argument, or pass a list",
)
_read = refusing(LeakError, "{} grows by values made in the step, at each call, and the step reads it", REMEDY)
# Methods by which iterators move on, and files, which are iterators over lines.
_MOVING = frozenset({"send", "throw", "close", "__setstate__", "read", "read1", "readline", "readlines", "readall",
                     "readinto", "readinto1", "peek", "getvalue", "getbuffer", "tell"})  # fmt: skip


class Stopped(StandIn):
    """Stands for an iterator: has its attributes, and refuses to move it."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["original"], name)
        return functools.partial(_move, self) if name in _MOVING else value

    def __iter__(self) -> Any:
        return self


for _name in ("__next__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"):
    setattr(Stopped, _name, _move)


class AppendOnlyList(StandIn):
    """Stands for a list or deque that a step appends to."""

    def __init__(self, original: Any, source: Any, refused: list[CaptureError]) -> None:
        super().__init__(original, source, refused)
        vars(self).update(before=[*original], taken=[])

    def append(self, value: Any) -> None:
        vars(self)["taken"].append(value)

    def extend(self, values: Iterable[Any]) -> None:
        vars(self)["taken"].extend(values)

    def __iadd__(self, values: Iterable[Any]) -> Any:
        self.extend(values)
        return self


_READ = {"__eq__", "__ne__", "__repr__", "__str__", "__reduce_ex__"}
_OWN = {*vars(AppendOnlyList), *vars(StandIn), *vars(object), "__class_getitem__"} - _READ
for _name in ({*dir(list), *dir(deque), "__bool__", "__copy__", "__deepcopy__"} - _OWN):
    setattr(AppendOnlyList, _name, _read)


def taken(stand_in: AppendOnlyList) -> list[Any]:
    """What the step has appended to a list.

    Raises:
        LeakError: it has reached the list past its stand-in.
    """
    state = vars(stand_in)
    if [*map(id, state["original"])] != [*map(id, state["before"])]:
        _read(stand_in)
    return state["taken"]  # type: ignore[no-any-return]


def restore(stand_in: AppendOnlyList) -> None:
    """Puts a list back as it was."""
    original, before = vars(stand_in)["original"], vars(stand_in)["before"]
    if len(original) != len(before):
        original.clear()
        original.extend(before)


class Cached(Stopped):
    """Stands for a function with `functools.cache`, which gives what no guard sees: has its attributes, and refuses."""


for _name in ("__call__", "__setattr__"):
    setattr(Cached, _name, refusing(UnsupportedError, "the step calls or changes {}, a function with a cache",
                                    "call it outside of the step, or keep what it gives in an attribute or a dict"))


class Pending:
    """Stands for what a scheduler sets at the end of the step: to be kept or returned; computing with it is an error.

    Args:
        before: what stood there before: a number, or a tensor of one, or a list or tuple of them.
        call: how many calls of schedulers came before the one that sets it.
        refused: takes the error by which the step is refused when it computes with it.
    """

    def __init__(self, source: Source, before: Any, call: int, refused: list[CaptureError]) -> None:
        self.source, self.call, self.refused = source, call, refused
        self.original: Any = before.original if isinstance(before, Pending) else before

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.original, name):
            raise AttributeError(name)
        return _compute(self)

    def __len__(self) -> int:
        return len(self._several())

    def __getitem__(self, index: Any) -> Any:
        several = self._several()
        if isinstance(index, slice):
            return type(several)([self[i] for i in range(len(several))[index]])  # type: ignore[call-arg]
        return Pending(Item(self.source, range(len(several))[index]), several[index], self.call, self.refused)

    def _several(self) -> Sequence[Any]:
        return self.original if isinstance(self.original, (list, tuple)) else _compute(self)


_compute = refusing(UnsupportedError, "{} was read after scheduler.step() in the same step",
                    "call scheduler.step() last, or after the compiled step")  # fmt: skip
for _name in ("add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg pos abs float int bool index "
              "eq ne lt le gt ge round trunc format hash array str repr").split():
    setattr(Pending, f"__{_name}__", _compute)


def refused_by(error: Exception) -> CaptureError | None:
    """The refusal of what stands for a scheduler's values, where code that takes Python's own types refused it."""
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    given = [value for value in frame.f_locals.values() if type(value) is Pending]
    with contextlib.suppress(CaptureError):
        float(given[0]) if given else None  # type: ignore[arg-type]
    return given[0].refused[-1] if given else None


def is_of_types(value: Any, kinds: Container[type]) -> bool:
    """Whether a scheduler may set a value of this kind anew: one of certain types, or several."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return isinstance(value, Pending) or all(type(v) in kinds for v in several)


def all_of(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler, and those that it moves."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from all_of(inner)


@dataclass
class Noted:
    """A call of a scheduler's `step`: at its place, with arguments.

    Attributes:
        before, after: what containers hold when it is called, and after it, by id; those alone that are not tensors.
    """

    source: Source
    args: tuple[Any, ...]
    before: dict[int, Contents]
    after: dict[int, Contents]


class Version(Child):
    """The version counter of a tensor, less by ``key`` than it is then."""

    paths, texts = "{0.path}._version - {1}", "{0.text}._version - {1}"
    step = staticmethod(lambda tensor, less: tensor._version - less)


class Count(int):
    """The version counter of a tensor from outside, as a step reads it: another number at each call.

    It may be kept, returned, set again, and moved by constants; a branch on it would hold for one call only.

    Attributes:
        tensor: the tensor whose counter it is.
    """

    tensor: torch.Tensor
    what, remedy = "a version counter", "compare it with another reading of the same tensor's counter"

    def of(self, tensor: torch.Tensor) -> Any:
        """The same number, for a tensor."""
        self.tensor = tensor
        return self

    def __add__(self, other: int) -> Any:
        return Count(int(self) + int(other)).of(self.tensor)

    __radd__ = __add__

    def __sub__(self, other: int) -> Any:
        difference = int(self) - int(other)
        if isinstance(other, Count):
            return difference if other.tensor is self.tensor else self._compare(int.__sub__, other)
        return Count(difference).of(self.tensor)

    def _compare(self, compare: Callable[[int, int], Any], other: Any) -> Any:
        if isinstance(other, Count) and other.tensor is self.tensor:
            return compare(int(self), int(other))
        what = f"Python compares {self.what}, or computes with it, another number at each call"
        raise CaptureError(what, remedy=self.remedy)

    def __bool__(self) -> bool:
        return bool(self._compare(int.__ne__, 0))


def _comparison(compare: Callable[[int, int], Any]) -> Callable[[Count, Any], Any]:
    return lambda count, other: count._compare(compare, other)


for _way in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Count, _way, _comparison(getattr(int, _way)))
