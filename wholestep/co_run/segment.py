"""A segment: the operators between two flushes, as a function of tensors and numbers, and its compiled program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from wholestep.capture import Snapshot
from wholestep.capture_call import capture
from wholestep.errors import CaptureError
from wholestep.ir import NodeInfo
from wholestep.lower import lower
from wholestep.nested import leaves
from wholestep.pipeline import Options, of_one_rank
from wholestep.runtime import Program
from wholestep.trace.numbers.recorded_numbers import PythonCall
from wholestep.trace.numbers.symbolic_sizes import is_host
from wholestep.trace.record.inputs import flat_memory


@dataclass(eq=False, slots=True)
class Slot:
    """Stands for a tensor in a recorded call: the n-th that the segment meets. One object for each number."""

    index: int


@dataclass(eq=False, slots=True)
class Constant:
    """Stands for a bool, which is equal to an integer, or for any float."""

    value: bool | None


class Exactly(NamedTuple):
    """Stands for one float, in hexadecimal digits: equal to no integer, and 0.0 to no -0.0."""

    text: str


def same(a: float, b: float) -> bool:
    """Whether two floats are one: NaN is itself, and 0.0 is not -0.0."""
    return a == b if a and b else a.hex() == b.hex()


FLOAT, TRUE, FALSE = Constant(None), Constant(True), Constant(False)

SLOTS: list[Slot] = [Slot(index) for index in range(4096)]

# (operator, arguments with tensors as slots, names and values of keyword arguments, slots of the results; with plans,
# the record of the call)
RecordedCall = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...], Any, NodeInfo | None]


def slot(index: int) -> Slot:
    """The slot of a number."""
    while index >= len(SLOTS):
        SLOTS.append(Slot(len(SLOTS)))
    return SLOTS[index]


@dataclass
class Segment:
    """What was recorded between two flushes.

    Attributes:
        calls: in order.
        externals: slots of tensors that were there before.
        alive: slots of results whose memory somebody still holds.
        marked: places of the tensors that a mark takes, by its own in the calls.
    """

    calls: list[RecordedCall]
    externals: list[int]
    alive: list[int]
    marked: Mapping[int, Sequence[Any]]

    def run(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[float], begin: Callable[[int], None] | None = None,
        call: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:  # fmt: skip
        """Runs the calls in order.

        Args:
            tensors: the externals, then the tensors that take the values of what is alive.
            numbers: the floats among the arguments, in order.
            begin: called with the place of each call before it runs.
            call: makes one.
        """
        values: dict[int, Any] = dict(zip(self.externals, tensors, strict=False))
        given = iter(numbers)
        for place, (recorded, unread) in enumerate(zip(self.calls, self._unread(), strict=True)):
            func, args, kwargs, results, _ = recorded
            if begin is not None:
                begin(place)
            arguments = [_filled(part, values, given) for part in args]
            keywords = {name: _filled(part, values, given) for name, part in kwargs}
            _keep(results, call(func, arguments, keywords), values)
            for index in unread:
                del values[index]
        for index, destination in zip(self.alive, tensors[len(self.externals) :], strict=True):
            destination.copy_(values[index])

    def _unread(self) -> list[set[int]]:
        """For each call, the slots that no later one reads."""
        read, found = set(self.alive), []
        for _, args, kwargs, results, _ in reversed(self.calls):
            here = {leaf.index for leaf in leaves((args, kwargs)) if type(leaf) is Slot}
            here |= {leaf for leaf in leaves(results) if leaf is not None}
            found.append(here - read)
            read |= here
        return found[::-1]


def _filled(part: Any, values: dict[int, Any], numbers: Iterator[float]) -> Any:
    kind = type(part)
    if kind is Slot:
        return values[part.index]
    if kind is tuple:
        return [_filled(item, values, numbers) for item in part]
    if kind is Constant:
        return next(numbers) if part is FLOAT else part.value
    return float.fromhex(part.text) if kind is Exactly else part


def _keep(results: Any, found: Any, values: dict[int, Any]) -> None:
    if type(results) is int:
        values[results] = found
    elif results is not None:
        for item, value in zip(results, found, strict=True):
            _keep(item, value, values)


_running = threading.local()

Bind = Callable[[Sequence[torch.Tensor], Sequence[float]], Any]


def run_segment(tensors: list[torch.Tensor], numbers: list[float]) -> None:
    """The function that is captured: runs the recorded calls."""
    _running.segment.run(tensors, numbers, _running.call, _with_numbers)


def _with_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """A call that is captured: C++ may ask for the numbers that vary, as where Python makes it."""
    number = next((leaf for leaf in leaves((args, kwargs)) if is_host(leaf)), None)
    with nullcontext() if number is None else PythonCall(number.node.recorder, func, args, kwargs):
        return func(*args, **kwargs)


_take = partial(Snapshot, differentiable=False)  # tensors with a history are data here


class CapturedSegment:
    """A segment's graph.

    Args:
        varying: indices of the numbers that are inputs, as the floats that operators write are.
        replay: hears of the capture and of each call, see `capture_call.capture`.

    Attributes:
        traced: the graph, and what it was traced with.
        binds: for each input, what gives it.
        indices: for each input, that of the tensor, or of the number as ``~index``.
        constants: index of a number -> the value that the program is for.
        number: of the program, among those of its step.
    """

    number = 0

    def __init__(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], varying: frozenset[int],
        replay: Any = None,
    ) -> None:  # fmt: skip
        self.varying = varying
        args = [_without_history(t) for t in tensors], list(numbers)
        paths = frozenset(f"args[1][{index}]" for index in varying)
        _running.segment, _running.call = segment, replay and replay.call
        try:
            _, traced = capture(run_segment, args, {}, paths, False, False, _take, sync=replay)
        finally:
            del _running.segment, _running.call
        if traced.predicates or traced.storage_sizes:
            raise CaptureError("the segment decides on a number", remedy="")
        self.traced = traced
        by_id = {id(tensor): index for index, tensor in enumerate(args[0])}
        inputs = traced.inputs[: traced.n_inputs]
        self.indices = [_index(item, by_id) for item in inputs]
        self.binds = [_bind(index, bool(item.members)) for index, item in zip(self.indices, inputs, strict=True)]
        read = {~index for index in self.indices if index < 0}
        self.constants = {index: n for index, n in enumerate(numbers) if index not in read}

    def serves(self, numbers: Sequence[float]) -> bool:
        """Whether it was made for these numbers."""
        return all(same(numbers[index], value) for index, value in self.constants.items())

    def varying_with(self, numbers: Sequence[float]) -> frozenset[int]:
        """Indices of the numbers that are inputs of a program for these, too."""
        return self.varying | {i for i, value in self.constants.items() if not same(numbers[i], value)}


class SegmentProgram(CapturedSegment):
    """A segment's program.

    Attributes:
        program: graph and generated code, for people.
    """

    def __init__(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], varying: frozenset[int],
        options: Options,
    ) -> None:  # fmt: skip
        super().__init__(segment, tensors, numbers, varying)
        step = of_one_rank(self.traced, options, ())
        self.run = lower(step, options.backend)
        self.program = Program(step, self.run)
        del self.traced

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Runs it: writes what the segment writes, and the destinations."""
        self.run(*[bind(tensors, numbers) for bind in self.binds])


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """An alias that a capture may write; of a tensor that was made in inference mode, one that counts writes."""
    if not tensor.is_inference():
        return tensor.detach()
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).set_(*place)


def _index(item: Any, by_id: dict[int, int]) -> int:
    if isinstance(item.value, float):
        return ~item.source.key  # type: ignore[no-any-return]
    return by_id[id(item.members[0] if item.members else item.value)]


def _bind(index: int, is_flat: bool) -> Bind:
    if index < 0:
        return lambda tensors, numbers: numbers[~index]
    return lambda tensors, numbers: flat_memory(tensors[index]) if is_flat else tensors[index]
