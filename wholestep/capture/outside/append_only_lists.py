"""Append-only lists: those that a step appends to and does not read.

Such a list is another one at each call, and yet the step is the same. So it is not looked into: while the step is
traced an empty stand-in takes its place, takes what is appended, and refuses to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from wholestep.errors import CaptureError, LeakError

REMEDY = "read it outside of the step, clear it first, or return the values and append them outside"


class AppendOnlyList:
    """Stands for a list or deque that a step appends to.

    Args:
        refused: takes the error by which the step is refused when it reads the list.

    Attributes:
        original: the list itself, which stays as it is.
        before: what it holds.
        taken: what was appended.
    """

    def __init__(self, container: Any, source: Any, refused: list[CaptureError]) -> None:
        before = [*container]
        self.__dict__.update(original=container, source=source, refused=refused, before=before, taken=[])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["original"])

    def append(self, value: Any) -> None:
        self.__dict__["taken"].append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.__dict__["taken"].extend(values)

    def __iadd__(self, values: Iterable[Any]) -> Any:
        self.extend(values)
        return self


def _refuse(self: Any) -> LeakError:
    what = f"{self.__dict__['source']} grows by values made in the step, at each call, and the step reads it"
    error = LeakError(what, remedy=REMEDY)
    self.__dict__["refused"].append(error)
    return error


def _reading(name: str) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _refuse(self)

    return read


_READ = {"__eq__", "__ne__", "__repr__", "__str__", "__reduce_ex__"}
_OWN = {*vars(AppendOnlyList), *vars(object), "__class_getitem__"} - _READ
for _name in ({*dir(list), *dir(deque), "__bool__", "__copy__", "__deepcopy__"} - _OWN):
    setattr(AppendOnlyList, _name, _reading(_name))


def taken(stand_in: AppendOnlyList) -> list[Any]:
    """What the step has appended to a list.

    Raises:
        LeakError: it has reached the list past its stand-in.
    """
    state = vars(stand_in)
    if [*map(id, state["original"])] != [*map(id, state["before"])]:
        raise _refuse(stand_in)
    return state["taken"]  # type: ignore[no-any-return]


def restore(stand_in: AppendOnlyList) -> None:
    """Puts a list back as it was."""
    state = vars(stand_in)
    state["taken"] = []
    if len(state["original"]) != len(state["before"]):
        state["original"].clear()
        state["original"].extend(state["before"])
