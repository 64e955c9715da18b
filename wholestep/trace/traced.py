"""What a traced run of a step gives, and how it asks to be traced again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from wholestep.ir import StepGraph
from wholestep.trace.numbers.decisions import Predicate
from wholestep.trace.numbers.many_sizes import ManySizes
from wholestep.trace.outputs.collect_outputs import OutputCollector
from wholestep.trace.outputs.leaks import Watch
from wholestep.trace.outputs.output_records import Derivative, Differentiated, NewValue, OutputAlias
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.recorder import Recorder

# Traces the backward of a step, given what its forward left behind; see `aot_autograd.differentiate`.
Differentiate = Callable[
    [Recorder, OutputCollector, list[Any], Callable[[], AbstractContextManager[Any]]], Differentiated | None
]


class SharedMemory(Exception):  # noqa: N818 - a request, not an error
    """Memory of inputs has to be an input itself: several share it of which one is written, or the step reads more of
    it than they hold. Trace again, knowing that."""

    def __init__(self, memories: frozenset[int]) -> None:
        super().__init__(f"{len(memories)} shared memories")
        self.memories = memories


class ReentrantCheckpoint(Exception):  # noqa: N818 - a request, not an error
    """A checkpoint's backward would run another one inside; trace again, with checkpoints of the other kind."""


@dataclass
class Traced:
    """One traced run of a step.

    Attributes:
        step: the graph; its placeholders are the first of `inputs`.
        inputs: those after the placeholders serve results and predicates alone.
        aliases: the tensors that outlive the step.
        result: what the step returned, as capture describes it.
        effects: changes of Python objects, as capture describes them.
        new_values: where to find the new values that result and effects hold, in the order in which they count them.
        predicates: decisions of Python's that are known before the step.
        versions: input index -> how many in-place writes eager execution counts.
        fingerprint: equal for programs that compute the same.
        watch: tells what of the trace is alive when it shall not be.
        derivative: what makes results differentiable; the graph is then a joint one, and its last placeholders, the
            tangents, are not in `inputs`.
        storage_sizes: (input index, bytes on entry, bytes afterwards) where the step asks for or changes an input's
            storage.
        answers: (input index, one of `QUESTIONS`, the answer) where the step asks for it; the offset also where several
            inputs are views of one memory.
        grad_mode: what the step leaves grad mode at, None when that is what it found.
        refused: (input, output, why) of each input whose new history cannot be differentiated.
        many: the sizes that it serves, where one program may serve many.
    """

    step: StepGraph
    inputs: list[TracedInput]
    aliases: list[OutputAlias]
    result: Any
    effects: list[Any]
    new_values: list[NewValue]
    predicates: list[Predicate]
    versions: dict[int, int]
    fingerprint: str
    watch: Watch
    derivative: Derivative | None = None
    storage_sizes: list[tuple[int, int, int]] = field(default_factory=list)
    answers: list[tuple[int, str, Any]] = field(default_factory=list)
    grad_mode: bool | None = None
    refused: list[tuple[int, int, str]] = field(default_factory=list)
    many: ManySizes | None = None

    @property
    def n_inputs(self) -> int:
        """How many placeholders are inputs; those after them are tangents."""
        return len(self.step.signature.inputs) - (len(self.derivative.outputs) if self.derivative else 0)
