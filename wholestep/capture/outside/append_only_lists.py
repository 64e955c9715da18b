"""Append-only lists: those that a step appends to and does not read.

Such a list is another one at each call, and yet the step is the same. So it is not looked into: while the step is
traced an empty stand-in takes its place, takes what is appended, and refuses to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from wholestep.errors import LeakError

REMEDY = "read it outside of the step, clear it first, or return the values and append them outside"


class AppendOnlyList:
    """Stands for a list or deque that a step appends to.

    Attributes:
        original: the list itself, which stays as it is.
        taken: what was appended.
        refusal: why the step cannot be captured, once it has read the list.
    """

    def __init__(self, container: Any, source: Any) -> None:
        self.__dict__.update(original=container, source=source, taken=[], refusal=None)

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
    state = self.__dict__
    error = LeakError(f"{state['source']} grows by values made in the step, at each call, and the step reads it",
                      remedy=REMEDY)
    error.read = True
    state["refusal"] = state["refusal"] or error
    return error


def _reading(name: str) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _refuse(self)

    return read


_READ = {"__eq__", "__ne__", "__repr__", "__str__", "__reduce_ex__"}
_OWN = {*vars(AppendOnlyList), *vars(object), "__class_getitem__"} - _READ
for _name in ({*dir(list), *dir(deque), "__bool__", "__copy__", "__deepcopy__"} - _OWN):
    setattr(AppendOnlyList, _name, _reading(_name))


class AppendOnlyLists:
    """The lists that one snapshot does not look into.

    Attributes:
        found: id of a list -> the list and its source.
        standing: what stands in their place while the step is traced.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[Any, Any]] = {}
        self.standing: dict[int, AppendOnlyList] = {}
        self._before: dict[int, list[Any]] = {}

    def put(self) -> dict[int, AppendOnlyList]:
        """Makes a stand-in for each; gives them by the id of the list."""
        self.standing = {key: AppendOnlyList(container, source) for key, (container, source) in self.found.items()}
        self._before = {key: list(container) for key, (container, _) in self.found.items()}
        return self.standing

    def taken(self) -> list[tuple[Any, list[Any]]]:
        """Source and new values of each list that the step has appended to.

        Raises:
            LeakError: it has read one of them, or has reached one past its stand-in.
        """
        for key, stand_in in self.standing.items():
            container, before = self.found[key][0], self._before[key]
            if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
                raise _refuse(stand_in)
            if vars(stand_in)["refusal"] is not None:
                raise vars(stand_in)["refusal"]
        states = [vars(stand_in) for stand_in in self.standing.values()]
        return [(state["source"], state["taken"]) for state in states if state["taken"]]

    def restore(self) -> None:
        """Puts the lists back as they were."""
        for key, before in self._before.items():
            container = self.found[key][0]
            if len(container) != len(before):
                container.clear()
                container.extend(before)
        self.standing, self._before = {}, {}
