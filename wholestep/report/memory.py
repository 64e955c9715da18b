"""Peak memory of a rank, by what it is for: parameters, gradients, states, activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import fx

from wholestep.ir import InputKind, StepGraph, info
from wholestep.lower.plan.peak_memory import peak_usage
from wholestep.report.traffic import collective_name, origin

Kind = Literal["parameters", "gradients", "states", "activations", "buffers", "batch", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_INPUTS: dict[InputKind, Kind] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "grad": "gradients",
    "state": "states",
    "tensor": "other",
    "batch": "batch",
}


GATHERING = ("all_gather", "share_rows")


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds when it holds most.

    Attributes:
        by_class: what is held then: inputs of the step, and what it computes. Parameters that were gathered for use
            count as parameters, buckets of gradients as gradients, what the optimizer computes in passing as other.
        phase, where, module: what runs then.
        arena: bytes that the program keeps between calls for its intermediate values; those that are live at the peak
            are counted in `by_class`.
    """

    by_class: dict[Kind, int]
    phase: str
    where: str
    module: str
    arena: int

    @property
    def total(self) -> int:
        """All classes together."""
        return sum(self.by_class.values())


def memory_of(step: StepGraph) -> Memory:
    """The memory of a graph as the `aten` backend runs it."""
    held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for node, item in zip(step.placeholders, step.signature.inputs, strict=True):
        value = info(node).value
        if isinstance(value, torch.Tensor):
            held[_INPUTS[item.kind]] += value.numel() * value.itemsize
    found = peak_usage(step)
    kinds = {node.name: item.kind for node, item in zip(step.placeholders, step.signature.inputs, strict=True)}
    gradients = {name for g in step.signature.gradients for name in (g.before, g.after)}
    for nodes, nbytes in found.live:
        held[_class_of(nodes, gradients, kinds)] += nbytes
    phase, place = (info(found.at).phase, origin(found.at)) if found.at is not None else ("forward", ("", ""))
    return Memory(held, phase, *place, found.arena)


def _class_of(nodes: list[fx.Node], gradients: set[str | None], kinds: dict[str, InputKind]) -> Kind:
    """What a piece of memory is for, by the values that lie in it over time."""
    sent = [(collective_name(node), node) for node in nodes]
    if any(name in GATHERING and kinds.get(_behind(node).name) == "parameter" for name, node in sent):
        return "parameters"
    phases = {info(node).phase for node in nodes}
    if any(node.name in gradients for node in nodes) or any(name and info(n).phase == "backward" for name, n in sent):
        return "gradients"
    return "other" if phases == {"optimizer"} else "activations"


def _behind(node: fx.Node) -> fx.Node:
    """The value that a chain of calls begins with."""
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
