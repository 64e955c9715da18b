"""The placements of a step's tensors along one axis between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.ir import Input, StepGraph, info
from wholestep.spmd.expand.calls import R
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, normal, split_evenly
from wholestep.tensor_parts import Part

PlacementOf = Callable[[Input, torch.Tensor], Placement]


@dataclass(frozen=True)
class StatePlacements:
    """The placements of tensors along one axis between steps.

    Attributes:
        inputs: of each input of the step.
        outputs: of those outputs that stay: new contents of inputs, gradients and states that the step makes; None
            for values that the next graph of the step takes as they are.
    """

    inputs: Sequence[Placement]
    outputs: Mapping[int, Placement | None]


def state_placements(step: StepGraph, placement_of: PlacementOf, group: AxisGroup) -> StatePlacements:
    """Asks a plan for all inputs and outputs of a step, by their whole shapes."""

    def ask(item: Input, node: fx.Node) -> Placement:
        value, part = info(node).value, info(node).placement
        if not isinstance(value, torch.Tensor):
            return R
        if isinstance(part, Part):
            with value.fake_mode:  # type: ignore[attr-defined]
                value = value.new_empty(part.shape)
        wanted = normal(placement_of(item, value), value.shape, item.source)
        return split_evenly(wanted, info(node).value.shape, group)

    pairs = zip(step.signature.inputs, step.placeholders, strict=True)
    inputs = [ask(i, node) if i.placements is None else i.placements[0] for i, node in pairs]
    kept = {index: ask(item, step.outputs[index]) if item.placements is None else None
            for index, item in step.signature.state_outputs.items()}  # fmt: skip
    return StatePlacements(inputs, kept | {index: inputs[into] for index, into in step.signature.mutations.items()})
