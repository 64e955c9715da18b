"""Generates the binder's fast path for one snapshot: a function that answers "all as it was" in microseconds.

Holders are *anchored* or *volatile*. An anchored holder (a module's attributes, an optimizer's state) is the same
object at each call (`persistent_objects.py`), a volatile one (a batch, a tuple of hidden states) another
(`per_call_objects.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from wholestep.capture.guards.identity_checks import Anchored, memory, sharing_pattern
from wholestep.capture.guards.persistent_objects import Anchors
from wholestep.capture.snapshot.reachable import NumberInput
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import Source

Fast = Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any] | None]


class FastPath(Anchors):
    """Builds the generated function for one snapshot.

    Attributes:
        code: its text.
        function: ``(args, kwargs) -> inputs``, or None when anything differs.
    """

    def __init__(self, snap: Snapshot, inputs: Sequence[Source], mutated: frozenset[str]) -> None:
        super().__init__(snap, inputs)
        self._gather()
        self._arguments()
        self._anchored()
        self._memory(mutated)
        self._inputs(inputs)
        body = "\n        ".join(self.lines)
        self.code = f"def bind(args, kwargs):\n    try:\n        {body}\n    except (KeyError, AttributeError, " \
                    "IndexError, TypeError, ValueError, RuntimeError, NameError):\n        return None\n"
        exec(compiled(self.code), self.space)
        self.function: Fast = self.space["bind"]

    def _memory(self, mutated: frozenset[str]) -> None:
        """Volatile tensors are new objects, and share no memory that the step writes, unless they did so before."""
        written = {i for i, t in enumerate(self.tensors) if self.snap.tensors[id(t)].source.path in mutated}
        volatile_written = [self.snap.tensors[id(t)].source.path in mutated for _, t in self.volatile_tensors]
        anchored = Anchored(self.tensors, self.watched, written, any(volatile_written), self.gradients)
        self.anchored = anchored
        self.space |= {"anchored": anchored, "rebind": anchored.rebind, "recall": anchored.recall}
        self.space["LAST"] = anchored.last
        if not self.volatile_tensors:
            return
        names = ", ".join(name for name, _ in self.volatile_tensors)
        self.lines.append(f"ids = {{*map(id, ({names},))}}")
        self._require(f"len(ids) == {len(self.volatile_tensors)} and anchored.ids.isdisjoint(ids)")
        if not written and not any(volatile_written):  # memory is no matter
            return
        addresses = [memory(t) for _, t in self.volatile_tensors]
        self.lines.append(f"m = [*map(memory, ({names},))]")
        if any(volatile_written) or not anchored.memory.isdisjoint(addresses):
            self.space["pattern"] = sharing_pattern
            expected = sharing_pattern(addresses, volatile_written, self.tensors)
            self._require(f"pattern(m, {self._fresh(volatile_written)}, t) == {self._fresh(expected)}")
        else:
            self._require("anchored.memory.isdisjoint(m)")

    def _inputs(self, inputs: Sequence[Source]) -> None:
        tensors = {f.source.path: f.tensor for f in self.snap.tensors.values()}
        numbers = {n.source.path: n for n in self.snap.numbers}
        volatile = {id(t): name for name, t in self.volatile_tensors}
        generators = {source.path: generator for generator, source in self.snap.reachable.generators.values()}
        for number in self.snap.numbers:
            self._require(self._is_number(number))
        parts = []
        for source in inputs:
            if source.path in numbers:
                n = numbers[source.path]
                at = self._number(n)
                parts.append(at if not n.setting else f"float({at})" if n.index is None else f"{at}[{n.index}]")
            elif source.path in tensors:
                tensor = tensors[source.path]
                parts.append(self.anchored_tensors.get(id(tensor)) or volatile[id(tensor)])
            elif source.path in generators:
                parts.append(self._name(generators[source.path]))  # guarded by identity
            else:
                raise ValueError(f"{source} is not a tensor or number that the snapshot found")
        self.lines.append(f"return [{', '.join(parts)}]")

    def _number(self, number: NumberInput) -> str:
        """An expression for a number that is an input, or for the tuple that it is in."""
        return number.source.path if number.container is None else self._at(number.container, number.key)

    def _is_number(self, number: NumberInput) -> str:
        at = self._number(number)
        if not number.setting:
            return f"type({at}) is {type(number.value).__name__}"
        if number.index is not None:
            length = len(number.container.before[number.key])  # type: ignore[union-attr]
            return f"type({at}) is tuple and len({at}) == {length} and type({at}[{number.index}]) is float"
        return f"type({at}) is float" + f" or type({at}) is int" * (number.key == "lr")


@lru_cache(maxsize=64)
def compiled(text: str) -> CodeType:
    """The code object of generated text; captures that differ in their constants alone share it."""
    return compile(text, "<wholestep binder>", "exec")
