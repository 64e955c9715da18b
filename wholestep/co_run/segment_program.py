"""The compiled program of a segment: captured, lowered and bound to the segment's tensors and numbers by position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture import Call, Snapshot
from wholestep.co_run.segment import Segment, same
from wholestep.errors import CaptureError
from wholestep.pipeline import Options, capture, lowered, of_one_rank
from wholestep.trace.record.inputs import flat_memory

_running = threading.local()

Bind = Callable[[Sequence[torch.Tensor], Sequence[float]], Any]


def run_segment(tensors: list[torch.Tensor], numbers: list[float]) -> None:
    """The step that is captured."""
    _running.segment.run(tensors, numbers)


class SegmentSnapshot(Snapshot):
    """A snapshot of a segment: tensors with a history are data here."""

    differentiable = False


def _take(fn: Any, args: Any, kwargs: Any, names: Any = frozenset(), varying: frozenset[str] = frozenset()) -> Snapshot:
    return SegmentSnapshot(Call(fn, args, kwargs), varying=varying)


class SegmentProgram:
    """A segment's program.

    Attributes:
        constants: index of a number -> the value that the program was made for.
    """

    def __init__(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], options: Options,
        varying: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.varying = varying
        args = [t.detach() for t in tensors], list(numbers)
        paths = frozenset(f"args[1][{index}]" for index in varying)
        _running.segment = segment
        try:
            _, traced = capture(run_segment, args, {}, paths, False, False, _take)
        finally:
            del _running.segment
        if traced.predicates or traced.storage_sizes:
            raise CaptureError("the segment decides on a number", remedy="")
        by_id = {id(tensor): index for index, tensor in enumerate(args[0])}
        self._binds = [_bind(item, by_id) for item in traced.inputs[: traced.n_inputs]]
        read = {i.source.key for i in traced.inputs if isinstance(i.value, float)}
        self.constants = {index: n for index, n in enumerate(numbers) if index not in read}
        step = of_one_rank(traced, options, ())
        self.run = lowered(step, options.backend)

    def serves(self, numbers: Sequence[float]) -> bool:
        """Whether it was made for these numbers."""
        return all(same(numbers[index], value) for index, value in self.constants.items())

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Runs it: writes what the segment writes, and the destinations."""
        self.run(*[bind(tensors, numbers) for bind in self._binds])


def _bind(item: Any, by_id: dict[int, int]) -> Bind:
    if isinstance(item.value, float):
        number = item.source.key
        return lambda tensors, numbers: numbers[number]
    if item.members:
        member = by_id[id(item.members[0])]
        return lambda tensors, numbers: flat_memory(tensors[member])
    index = by_id[id(item.value)]
    return lambda tensors, numbers: tensors[index]
