"""Generates the binder's fast path for one snapshot: a function that answers "all as it was" in microseconds.

What a step can see is *persistent*, the same object at each call, as a module's attributes and an optimizer's state
are (`persistent_objects.py`), or *per call*: another one, as a batch or a tuple of hidden states
(`per_call_objects.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

from numpy import float64

from wholestep.capture.guards.code_writer import CodeWriter
from wholestep.capture.guards.compared_values import PersistentTensors, memory, sharing_pattern
from wholestep.capture.guards.per_call_objects import PerCallObjects
from wholestep.capture.guards.persistent_objects import PersistentObjects
from wholestep.capture.snapshot.reachable import NumberInput
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import Args, Kwargs, Source
from wholestep.errors import UnsupportedError

_FLOATS = (float, float64)  # as schedules by NumPy leave them

Fast = Callable[[Args, Kwargs], list[Any] | None]


class FastPath:
    """Builds the generated function for one snapshot.

    Args:
        replaced: where each call leaves a new container, as path and key.

    Attributes:
        writer: the code, and what it refers to.
        last: the tensors of persistent objects at the last call.
        function: ``(args, kwargs) -> inputs``, or None when anything differs.
    """

    def __init__(
        self, snap: Snapshot, inputs: Sequence[Source], mutated: frozenset[str], replaced: Set[tuple[str, Any]],
        sizeless: frozenset[str],
    ) -> None:  # fmt: skip
        self.snap, self.writer = snap, CodeWriter(snap.reachable.quick_state)
        self._per_call = PerCallObjects(snap, self.writer, replaced, sizeless)
        self._persistent = PersistentObjects(snap, self.writer, self._per_call, inputs)
        self._per_call.compare_quickly()
        self._persistent.gather()
        self._per_call.compare()
        self._persistent.compare()
        self.last = self._compare_memory(mutated)
        self._give(inputs)
        self.function: Fast = self.writer.function("args, kwargs", "bind")

    def is_persistent(self, value: Any) -> bool:
        """True for an object or attribute table that stays the very same while the fast path lets calls pass."""
        return id(value) not in self._per_call.ids and id(value) not in self._per_call.tables

    def _compare_memory(self, mutated: frozenset[str]) -> PersistentTensors:
        """Per-call tensors are new objects, and share no memory that the step writes, unless they did so before."""
        write, found, tensors = self.writer, self.snap.tensors, self._persistent.tensors
        written = {i for i, t in enumerate(tensors) if found[id(t)].source.path in mutated}
        names = ", ".join(name for name, _ in self._per_call.tensors)
        new = [tensor for _, tensor in self._per_call.tensors]
        new_written = [found[id(t)].source.path in mutated for t in new]
        last = PersistentTensors(tensors, self._persistent.watched, written, any(new_written), self._persistent.memo)
        write.space |= {"persistent": last, "known": last.known}
        if not new:
            return last
        write.lines.append(f"ids = {{*map(id, ({names},))}}")
        write.require(f"len(ids) == {len(new)} and persistent.ids.isdisjoint(ids)")
        if not written and not any(new_written):  # memory is no matter
            return last
        addresses = [memory(t) for t in new]
        write.lines.append(f"m = [*map(memory, ({names},))]")
        if any(new_written) or not last.memory.isdisjoint(addresses):
            write.space["pattern"] = sharing_pattern
            expected = sharing_pattern(addresses, new_written, tensors)
            write.require(f"pattern(m, {write.constant(new_written)}, t) == {write.constant(expected)}")
        else:
            write.require("persistent.memory.isdisjoint(m)")
        return last

    def _give(self, inputs: Sequence[Source]) -> None:
        """Writes the line that returns the inputs."""
        write, snap = self.writer, self.snap
        per_call = {id(t): name for name, t in self._per_call.tensors}
        found: dict[str, str] = {}
        for generator, source in snap.reachable.generators.values():
            found[source.path] = self._per_call.weakly(generator)  # guarded by identity
        for tensor in snap.tensors.values():
            found[tensor.source.path] = write.tensors.get(id(tensor.tensor)) or per_call.get(id(tensor.tensor), "")
        for number in snap.numbers:
            at = found[number.source.path] = self._number(number)
            write.require(self._is_number(number, at))
            if number.setting:
                found[number.source.path] = f"float({at})" if number.index is None else f"float({at}[{number.index}])"
        for source in inputs:
            if not found.get(source.path):
                what = f"{source} is a tensor in a set that is another at each call, in no order"
                raise UnsupportedError(what, remedy="keep it in a list, a tuple or a dict")
        places = {expression: i for i, expression in enumerate(write.tensors.values())}  # in the list ``t``
        write.lines.append(f"return [{', '.join(_in_slices([found[source.path] for source in inputs], places))}]")

    def _number(self, number: NumberInput) -> str:
        """An expression for a number that is an input, or for the tuple that it is in."""
        return number.source.path if number.container is None else self.writer.at(number.container, number.key)

    def _is_number(self, number: NumberInput, at: str) -> str:
        if not number.setting:
            return f"type({at}) is {self.writer.name(type(number.value))}"
        kinds = self.writer.name(_FLOATS if number.key != "lr" else (*_FLOATS, int))
        if number.index is not None:
            length = len(number.container.before[number.key])  # type: ignore[union-attr]
            return f"type({at}) is tuple and len({at}) == {length} and type({at}[{number.index}]) in {kinds}"
        return f"type({at}) in {kinds}"


def _in_slices(expressions: Sequence[str], places: Mapping[str, int]) -> list[str]:
    """Items of a list: those that follow each other in the list ``t`` are sliced from it."""
    found: list[str] = []
    for _, run in groupby(enumerate(expressions), lambda item: (item[1] in places, places.get(item[1], 0) - item[0])):
        items = [expression for _, expression in run]
        at = places.get(items[0])
        found += items if at is None or len(items) < 3 else [f"*t[{at}:{at + len(items)}]"]
    return found
