"""The compiled program of a segment: captured, lowered and bound to the segment's tensors and numbers by position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from wholestep.capture import snapshot
from wholestep.co_run.segment import Segment, same
from wholestep.errors import CaptureError
from wholestep.lower import lower
from wholestep.pipeline import Options, capture, of_one_rank
from wholestep.trace.record.inputs import flat_memory

_running = threading.local()

Bind = Callable[[Sequence[torch.Tensor], Sequence[float]], Any]


def run_segment(tensors: list[torch.Tensor], numbers: list[float]) -> None:
    """The step that is captured."""
    _running.segment.run(tensors, numbers, _running.call)


_take = partial(snapshot, differentiable=False)  # tensors with a history are data here


class CapturedSegment:
    """A segment's graph.

    Args:
        varying: indices of the numbers that are inputs, as the floats that operators write are.
        replay: hears of the capture and of each call, see `pipeline.capture`.

    Attributes:
        traced: the graph, and what it was traced with.
        binds: for each input, what gives it.
        indices: for each input, that of the tensor, or of the number as ``~index``.
        constants: index of a number -> the value that the program is for.
    """

    def __init__(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], varying: frozenset[int],
        replay: Any = None,
    ) -> None:  # fmt: skip
        self.varying = varying
        args = [_without_history(t) for t in tensors], list(numbers)
        paths = frozenset(f"args[1][{index}]" for index in varying)
        _running.segment, _running.call = segment, replay and replay.call
        try:
            _, traced = capture(run_segment, args, {}, paths, "none", False, _take, sync=replay)
        finally:
            del _running.segment, _running.call
        if traced.predicates or traced.storage_sizes:
            raise CaptureError("the segment decides on a number", remedy="")
        self.traced = traced
        by_id = {id(tensor): index for index, tensor in enumerate(args[0])}
        inputs = traced.inputs[: traced.n_inputs]
        self.binds = [_bind(item, by_id) for item in inputs]
        self.indices = [_index(item, by_id) for item in inputs]
        read = {~index for index in self.indices if index < 0}
        self.constants = {index: n for index, n in enumerate(numbers) if index not in read}

    def serves(self, numbers: Sequence[float]) -> bool:
        """Whether it was made for these numbers."""
        return all(same(numbers[index], value) for index, value in self.constants.items())

    def varying_with(self, numbers: Sequence[float]) -> frozenset[int]:
        """Indices of the numbers that are inputs of a program for these, too."""
        return self.varying | {i for i, value in self.constants.items() if not same(numbers[i], value)}


class SegmentProgram(CapturedSegment):
    """A segment's program."""

    def __init__(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], varying: frozenset[int],
        options: Options,
    ) -> None:  # fmt: skip
        super().__init__(segment, tensors, numbers, varying)
        step = of_one_rank(self.traced, options, ())
        del self.traced
        self.run = lower(step, options.backend)

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


def _bind(item: Any, by_id: dict[int, int]) -> Bind:
    if isinstance(item.value, float):
        number = item.source.key
        return lambda tensors, numbers: numbers[number]
    if item.members:
        member = by_id[id(item.members[0])]
        return lambda tensors, numbers: flat_memory(tensors[member])
    index = _index(item, by_id)
    return lambda tensors, numbers: tensors[index]
