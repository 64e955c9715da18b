"""The backward of a program: one program for each combination of strides of its tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wholestep.aot_autograd import Partitioned
from wholestep.aot_autograd.tangent_layouts import (
    CannotSpecializeError,
    Result,
    SpecializedBackward,
    Strides,
    reads_by_memory,
    specialized,
    without_last_views,
)
from wholestep.cached_property import cached_property
from wholestep.ir import StepGraph, info
from wholestep.patches import suspended
from wholestep.torch_compat import no_modes
from wholestep.trace.outputs.output_records import View

Run = Callable[..., Sequence[Any]]

# Of a tangent: shape, strides, dtype and device.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]

# Tangents of other layouts beyond these are copied into the one that the backward was traced with.
MAX_LAYOUTS = 32


@dataclass
class Served:
    """A backward program for tangents of certain strides.

    Attributes:
        graph, run: saved values, then the tangents that are given -> what follows from them.
        results: where each gradient is then found.
        layouts: what tangents are copied into first (None for one that is None, where it need not be zeros);
            None where they are read as they are.
        plain: whether the outputs are all gradients in their order.
        consume: runs it on values that it may let go of as soon as they are read, where the backend can.
    """

    graph: StepGraph
    run: Run
    results: tuple[Result, ...]
    layouts: tuple[Layout | None, ...] | None = None
    plain: bool = False
    consume: Callable[[list[Any]], Sequence[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.consume = consuming(self.run)

    def gradients(self, outputs: Sequence[Any], tangents: Sequence[Any], count: int) -> list[Any]:
        """The gradients in order, of what the program gave and the tangents; None where nothing follows."""
        found: list[Any] = [None] * count
        for result in self.results:
            base = outputs[result.output] if result.output is not None else tangents[result.tangent]  # type: ignore[index]
            found[result.place] = viewed(base, result.views) if result.views else base
        return found


class Backward:
    """The backward of a program, and what it needs of the forward.

    Args:
        lower: makes a program of a backward graph.
        exact: whether tangents are read as they are, as in eager; else copied into the layout that was traced.

    Attributes:
        halves: both graphs.
        saved: see `Partitioned.places`.
        served: strides of the tangents (None for one that is None) -> the program for them; with storage offsets,
            where it depends on these.
        reasons: why more than one was made.
    """

    def __init__(self, halves: Partitioned, lower: Callable[[StepGraph], Run], exact: bool) -> None:
        self.halves, self.lower, self.exact, self.saved = halves, lower, exact, halves.places
        self.served: dict[tuple[Any, ...], Served] = {}
        self.reasons: list[str] = []
        values = [info(node).value for node in halves.backward.placeholders[len(self.saved) :]]
        self._traced = tuple((tuple(v.shape), tuple(v.stride()), v.dtype, v.device) for v in values)
        if not exact:
            _ = self.first  # the user's compiler fails, if it does, before anything has run

    @cached_property
    def first(self) -> Served:
        """The program for tangents as they were traced, made when it is asked for."""
        results = tuple([Result(place, place) for place in range(len(self.halves.backward.outputs))])
        made = self._lowered(SpecializedBackward(self.halves.backward, results))
        self.served[self.traced(self._traced)] = made
        return made

    @property
    def run(self) -> Run:
        """The program for tangents as they were traced."""
        return self.first.run

    @cached_property
    def by_memory(self) -> bool:
        """Whether it depends on the storage offsets of tangents."""
        return reads_by_memory(self.halves)

    def serve(self, strides: tuple[Strides, ...], offsets: tuple[int, ...] = ()) -> Served:
        """The program for tangents of these strides, and of these storage offsets; made if there is none."""
        offsets = offsets if any(offsets) else ()
        found = self.served.get((strides, offsets) if offsets else strides)
        return found if found is not None else self._made(strides, offsets)

    def _made(self, strides: tuple[Strides, ...], offsets: tuple[int, ...]) -> Served:
        plain = tuple([self._plain(place, stride) for place, stride in enumerate(strides)])
        found = self._anew(plain, offsets) if offsets else None  # None where eager would copy them first
        found = found or self._known(plain)
        if found is None and self.exact and len(self.reasons) < MAX_LAYOUTS:
            found = self._anew(plain)
        found = found or self._copied(plain)
        if len(self.served) < 4 * MAX_LAYOUTS:
            self.served[(strides, offsets) if offsets else strides] = found
        return found

    def _known(self, strides: tuple[Strides, ...]) -> Served | None:
        return self.first if strides == self.traced(self._traced) else self.served.get(strides)

    def _copied(self, strides: tuple[Strides, ...]) -> Served:
        """A program for copies in the layout of the trace, zeros among them if it must be."""
        there = self.traced(strides)
        found = self._known(there) or self._anew(there)
        if found is not None:
            pairs = zip(strides, self._traced, strict=True)
            return replace(found, layouts=tuple([None if s is None else traced for s, traced in pairs]))
        return replace(self.first, layouts=self._traced)

    def traced(self, tangents: Sequence[object]) -> tuple[Strides, ...]:
        """The strides of the trace; None for tangents that are None."""
        return tuple([None if a is None else stride for a, (_, stride, *_) in zip(tangents, self._traced, strict=True)])

    def _plain(self, place: int, stride: Strides) -> Strides:
        """Strides in which those of dimensions of size 1, which address nothing, are as they were traced."""
        if stride is None:
            return None
        size, traced, *_ = self._traced[place]
        return tuple([t if n == 1 else s for n, s, t in zip(size, stride, traced, strict=True)])

    def _lowered(self, made: SpecializedBackward) -> Served:
        made = without_last_views(self.halves, made) if self.exact else made
        plain = [Result(place, place) for place in range(len(self.halves.backward.outputs))]
        with suspended(), no_modes():  # in a backward that is traced, too
            run = self.lower(made.graph)
        return Served(made.graph, run, made.results, plain=list(made.results) == plain)

    def _anew(self, strides: tuple[Strides, ...], offsets: tuple[int, ...] = ()) -> Served | None:
        try:
            served = self._lowered(specialized(self.halves, strides, offsets))
        except CannotSpecializeError:
            return None
        if offsets:
            return served
        self.served[strides] = served
        differing = [
            f"gradient of output {output}: expected strides {list(traced)}, "
            f"found {'none' if found is None else f'strides {list(found)}'}"
            for output, found, (_, traced, *_) in zip(self.halves.tangents, strides, self._traced, strict=True)
            if found != traced
        ]
        self.reasons.append("; ".join(differing))
        return served


def consuming(run: Run) -> Callable[[list[Any]], Sequence[Any]]:
    """A program as a function of a list of values that it may let go of as soon as they are read, where it can."""
    return getattr(run, "consume", None) or (lambda values: run(*values))


def viewed(base: torch.Tensor, views: Sequence[View]) -> torch.Tensor:
    """A view of a tensor; offsets of `as_strided` count from the tensor's first element."""
    view = base
    for op, args, index in views:
        if op is torch.ops.aten.as_strided.default:
            args = (*args[:2], (args[2] if len(args) > 2 else 0) + view.storage_offset())
        view = op(view, *args) if index is None else op(view, *args)[index]
    return view
