"""The program of one rank for a segment: expanded by the plans, agreed on by all ranks, run on what this rank has."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from wholestep.capture import InitialState
from wholestep.co_run.places import place_of
from wholestep.co_run.segment import CapturedSegment, Segment
from wholestep.co_run.shards import Shards
from wholestep.ir import LASTING_KINDS, Input, InputKind, StepGraph, dead_code, info
from wholestep.lower import lower
from wholestep.pipeline import Options, of_one_rank
from wholestep.runtime import Program
from wholestep.tensor_parts import Part
from wholestep.trace import Recorder, gradient_memory, note_gradient

_replaying = threading.local()


class Named(NamedTuple):
    """A tensor that the step can see: what it is for, and where it is found."""

    kind: InputKind
    source: str
    tensor: torch.Tensor


# By the place of the tensor.
Names = Mapping[Any, Named]


@dataclass(frozen=True)
class Mark:
    """Called in a segment with tensors of which note is taken when the segment is captured.

    Attributes:
        event: "segment begins", with parameters, each followed by the gradient that earlier segments have left each
            rank's own; "backward begins", with the gradients that there are before; "backward ends", with parameters,
            each followed by the gradient that it has left.
        before: when a backward ends, for each parameter which of the gradients before was its own.
    """

    event: Literal["segment begins", "backward begins", "backward ends"]
    before: tuple[int | None, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> None:
        _replaying.record.note(self, tensors)


class Replay:
    """Gives the calls of a segment, while it is captured, the records that they had in the step."""

    def __init__(self, segment: Segment, names: Names) -> None:
        self._segment, self._names, self._place = segment, names, 0
        self._backwards: list[list[tuple[torch.Tensor, Any]]] = []

    def begin(self, recorder: Recorder) -> None:
        """The capture begins."""
        self._recorder, _replaying.record = recorder, self

    def again(self) -> bool:
        """Whether it is to be done once more."""
        return False

    def call(self, place: int) -> None:
        """One of the calls begins."""
        self._recorder.builder.replayed, self._place = self._segment.calls[place][-1], place

    def note(self, mark: Mark, tensors: Sequence[torch.Tensor]) -> None:
        """See `Mark`."""
        if mark.event == "backward begins":
            self._backwards.append([(grad, gradient_memory(self._recorder, grad)) for grad in tensors])
            return
        ends = mark.event == "backward ends"
        there = self._backwards.pop() if ends and self._backwards else []  # none where it began in an earlier segment
        before = mark.before if ends else (None,) * (len(tensors) // 2)
        for index, place, grad in zip(before, self._segment.marked[self._place][::2], tensors[1::2], strict=True):
            if _is_parameter(self._names.get(place)):
                old, memory = there[index] if index is not None and there else (None, None)
                if not ends:
                    self._recorder.inputs.ref(grad)
                note_gradient(self._recorder, self._names[place].source, old, memory, grad)


def _write_results_directly(step: StepGraph, destinations: Collection[Any]) -> None:
    """The new content of a destination is a result, not a copy of it, which would be somebody who reads it."""
    (output,) = (node for node in step.graph.nodes if node.op == "output")
    for node in step.outputs:
        if node.target is torch.ops.aten.copy.default and node.all_input_nodes[0].name in destinations:
            output.replace_input_with(node, node.all_input_nodes[-1])
    dead_code(step)


def _write_reduced(step: StepGraph) -> None:
    """What is reduced of the gradients that earlier segments have left each rank's own is their new content."""
    (output,) = (node for node in step.graph.nodes if node.op == "output")
    signature, left = step.signature, {gradient.after for gradient in step.signature.gradients}
    for place, node in enumerate(step.placeholders):
        if node.name in left and node.users and place not in signature.mutations.values():
            signature.mutations[signature.n_outputs] = place
            signature.n_outputs += 1
            output.args = ((*output.args[0], node),)  # type: ignore[misc]


def _is_parameter(named: Named | None) -> bool:
    return named is not None and named.kind == "parameter"


class RankProgram(CapturedSegment):
    """A segment's program on one rank.

    Attributes:
        contract: what the ranks have agreed on.
        unreduced: of the leaves that its marks name, in order, those whose gradients it leaves each rank's own.
    """

    def __init__(
        self, segment: Segment, tensors: Sequence[torch.Tensor], numbers: Sequence[float], varying: frozenset[int],
        options: Options, names: Names, shards: Shards,
    ) -> None:  # fmt: skip
        places = [place_of(tensor) for tensor in tensors]
        super().__init__(segment, tensors, numbers, varying, Replay(segment, names))
        self._shards, self._executor = shards, options.executor
        step = self.traced.step
        inputs = [self._input(node, item, index, places, names) for node, item, index in
                  zip(step.placeholders, step.signature.inputs, self.indices, strict=False)]  # fmt: skip
        step.signature.inputs = inputs
        first, spread = len(segment.externals), options.executor.view is not None
        pairs = zip(step.placeholders, self.indices, strict=False)
        _write_results_directly(step, {node.name for node, index in pairs if index >= first})
        _write_reduced(step)
        written = {self.indices[into]: out for out, into in step.signature.mutations.items()}
        self._results = [(index, written[index]) for index in range(first, len(tensors))] if spread else []
        for index, out in self._results:
            kind, source, _ = names.get(places[index], Named("tensor", "", tensors[index]))
            del step.signature.mutations[out]
            carried = () if kind not in ("grad", "state") else None
            step.signature.state_outputs[out] = Input("", source, kind, carried)
        step.signature.of_part = True
        there, last = {node.name for node in step.graph.nodes}, {g.parameter: g.after for g in step.signature.gradients}
        unread = {source for source, after in last.items() if after not in there} if options.executor.reduces else ()
        program = of_one_rank(self.traced, options, ())
        self.run = lower(program, options.backend)
        self._placements = [program.signature.state_outputs[out].placements for _, out in self._results]
        leaves = dict.fromkeys(
            place for at, places in segment.marked.items() if segment.calls[at][0] != Mark("backward begins")
            for place in places[::2]
        )  # fmt: skip
        unreduced = {*program.signature.unreduced, *unread}
        self.unreduced = [i for i, p in enumerate(leaves) if p in names and names[p].source in unreduced]
        self.program = Program(program, self.run)
        self._agree(inputs, [tensors[i] if i >= 0 else numbers[~i] for i in self.indices], places, names)
        del self.traced, _replaying.record  # their aliases would count as somebody who sees the whole of a part

    def _input(self, node: fx.Node, item: Input, index: int, places: Sequence[Any], names: Names) -> Input:
        name, memory = item.name, "memory of " if item.source.startswith("memory of ") else ""
        lines = [info(user).where for user in node.users if user.op != "output"]
        where = next((f", for the call at {line}" for line in lines if line), "")
        if index < 0:
            return Input(name, f"number {~index}{where}", "number")
        held = self._shards.held.get(places[index][0])
        named = names.get(places[index])
        if named is not None and (held is None or held.placements is None):
            return Input(name, memory + named.source, named.kind)
        return Input(name, f"value {index} of the step{where}", "tensor", held.placements if held is not None else None)

    def _agree(self, inputs: Sequence[Input], values: Sequence[Any], places: Sequence[Any], names: Names) -> None:
        lasting = [(Input("", n.source, n.kind), n.tensor) for n in names.values() if n.kind in LASTING_KINDS]
        pairs: list[tuple[Input, Any]] = sorted(lasting, key=lambda pair: pair[0].source)  # whatever the segment reads
        for item, index, value in zip(inputs, self.indices, values, strict=True):
            named = names.get(places[index]) if index >= 0 else None
            if named is not None and item.kind not in LASTING_KINDS:
                pairs.append((Input("", named.source, named.kind), self._shards.own(named.tensor)))
            elif index < 0:
                pairs.append((item, value))
        parts = {id(t): held.part for _, t in pairs if isinstance(t, torch.Tensor) and (held := self._shards.of(t))}
        both = [item for item, _ in pairs], [tensor for _, tensor in pairs]
        unpack = self.program.packed.unpack
        contract = self._executor.start(self.traced.step, unpack, *both, parts, InitialState(None))
        at = {item.source: ~index for item, index in zip(inputs, self.indices, strict=True)}
        self.contract = replace(contract, numbers=tuple([(at[item.source], item) for _, item in contract.numbers]))

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Runs it: what it writes and leaves is there afterwards, or this rank's part of it."""
        values: list[Any] = []
        for bind, index, part in zip(self.binds, self.indices, self.program.placements, strict=True):
            value = bind(tensors, numbers)
            values.append(self._shards.local(value, part if isinstance(part, Part) else None) if index >= 0 else value)
        outputs = self.run(*values)
        for (index, out), placements in zip(self._results, self._placements, strict=True):
            part = self.program.kept[out]
            if isinstance(part, Part):
                self._shards.add(tensors[index], outputs[out], part, placements)
            else:
                tensors[index].copy_(outputs[out])
