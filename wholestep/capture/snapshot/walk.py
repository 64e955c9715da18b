"""The walk: everything that a training step can see, as a flat list of places.

A place is one holder (a dict, a module's attributes, a tensor, a closure cell, …) met on the way from the
function and its arguments, with its source and a copy of its contents. What a holder contains is found by a
table from type to handler (`handlers.py`).
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture.guards.compared_values import EXACT_PLAIN
from wholestep.capture.snapshot import boxes
from wholestep.capture.snapshot.handlers import WAITING, handler
from wholestep.capture.snapshot.library_code import is_library, own
from wholestep.capture.snapshot.places import Number, Places
from wholestep.capture.sources import FUNCTION, Call, Source, argument

_VARYING = (boxes.MAPPING, boxes.ATTRIBUTES, boxes.SLOTS, boxes.LIST, boxes.CELL, boxes.NAMES, boxes.MODULE)


def arguments(call: Call) -> Iterator[tuple[Source, Any]]:
    """The arguments of a call with their sources, named as the function's signature names them."""
    names: list[str] = []
    variadic = None
    try:
        fn = call.fn.forward if isinstance(call.fn, torch.nn.Module) else call.fn
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                variadic = parameter.name
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
    except (TypeError, ValueError):  # a builtin without a signature
        variadic = "args"
    for position, value in enumerate(call.args):
        if position < len(names):
            yield argument(names[position], position), value
        else:
            yield argument(variadic or "args", position, position - len(names)), value
    for key, value in call.kwargs.items():
        yield argument(key, key), value


class Walk(Places):
    """A walk over all that a call can see, from its function and arguments on."""

    def __init__(self, call: Call, names: Iterable[str] = (), varying: frozenset[str] = frozenset()) -> None:
        super().__init__(call, names, varying)
        self._waiting: tuple[deque[tuple[Any, Source]], ...] = (deque(), deque())
        self.roots = [*arguments(call), (FUNCTION, call.fn)]
        if isinstance(call.fn, types.FunctionType):
            own(call.fn.__code__.co_filename)
        for name in ("__call__", "forward"):
            entry = getattr(type(call.fn), name, None)
            if isinstance(entry, types.FunctionType) and not is_library(entry.__code__.co_filename):
                self.reach.add(entry, False)
        self._todo.extend((value, source) for source, value in reversed(self.roots))
        self.run()
        if varying or self.counting:
            self._vary()

    def _vary(self) -> None:
        """Makes inputs of the plain numbers whose sources are known to vary."""
        for source, value in self.roots:
            if type(value) in (int, float) and source.path in self.varying:
                self.numbers.append(Number(source, value))
        for place in self.places:
            for key, value in place.before.items():
                if type(value) in (int, float) and place.box in _VARYING and key not in place.ignored:
                    source = self.child(place, key)
                    if source.path in self.varying or (key == "step" and id(place.holder) in self.counting):
                        self.numbers.append(Number(source, value, key=key, place=place))
                        place.lifted |= {key}
                        place.ignored |= {key}

    def run(self) -> None:
        """Walks until nothing is left that the step's code can name."""
        early, late = self._waiting
        while self._todo or self._reveal() or early or late:
            value, source = self._todo.pop() if self._todo else (early or late).popleft()
            if type(value) in EXACT_PLAIN or id(value) in self.first:
                continue
            handle = handler(type(value))  # type: ignore[arg-type]
            if handle is None:
                continue
            if handle in WAITING and not isinstance(source, _Later):
                self._waiting[WAITING[handle]].append((value, _Later(source)))
                continue
            source = source.source if isinstance(source, _Later) else source
            self.first[id(value)] = source
            self._keep.append(value)
            mark = len(self._todo)
            handle(self, value, source)
            self._todo[mark:] = reversed(self._todo[mark:])  # a stack: what was queued first is walked first

    def _reveal(self) -> bool:
        """Queues attributes whose names have come into use; True when there are any."""
        if not self.hidden:
            return False
        names, anything = self.reach.settle(), self.reach.anything
        seen = [entry for entry in self.hidden if anything or entry[1] in names]
        self.hidden = [entry for entry in self.hidden if not (anything or entry[1] in names)]
        for place, key, source in reversed(seen):
            place.ignored -= {key}
            self._todo.append((place.before[key], source))
        return bool(seen)


@dataclass(frozen=True, eq=False)
class _Later(Source):
    """Marks a source that has waited until all else was walked."""

    source: Source
