"""Parameters that a wrapper in the step divides among ranks: gathered in forward and backward, as in the eager wrapper.

Each rank runs its own batch. While the step is traced, parameters, gradients and optimizer states are whole; in eager,
Python outside of the wrapped modules sees parts. So what reads them there must give of a part what it gives of the
whole: elementwise calls with numbers and other parts, and norms of gradients, which the wrapper has of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.errors import UnsupportedError
from wholestep.functional import base_name
from wholestep.ir import GETITEM, Gradient, Input, StepGraph, info
from wholestep.nested import tensors_of
from wholestep.spmd.expand.calls import R
from wholestep.spmd.expand.graph_edits import COPIES, in_memory, is_view
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Shard
from wholestep.spmd.plans.global_view import StatePlacements, owner_of, state_placements
from wholestep.spmd.plans.sharding_constraints import constrain_parameters
from wholestep.spmd.rules.pointwise import is_on_lists
from wholestep.torch_compat import OpOverload

NORMS = "linalg_vector_norm", "_foreach_norm", "norm"


def divided_by(step: StepGraph, group: AxisGroup) -> DividedParameters:
    """The parameters of a step that wrappers divide over a group.

    Raises:
        UnsupportedError: what reads them means another thing of a part, or is not served.
    """
    nodes = list(zip(step.placeholders, step.signature.inputs, strict=True))
    how = {item.source: item.shard for _, item in nodes if item.shard and item.shard[0] == group.name}
    shapes = {item.source: info(node).value.shape for node, item in nodes if item.source in how}

    def placement_of(item: Input, value: torch.Tensor) -> Placement:
        source = item.source if item.kind == "parameter" else owner_of(item)
        return Shard(0) if source in how and value.shape == shapes[source] else R

    for source, (_, dim, *_) in how.items():
        if dim:
            _refuse(f"divided along dimension {dim}", source)
    again = {source: again for source, (_, _, again, _) in how.items()}
    found = DividedParameters(step, again, state_placements(step, placement_of, group))
    found.check({node: _module_of(item) for node, item in nodes if item.source in how})
    return found


@dataclass
class DividedParameters:
    """Parameters that are divided by rows.

    Attributes:
        again: source -> whether a backward gathers it again.
        placements: of them, their gradients and their states between steps.
    """

    step: StepGraph
    again: dict[str, bool]
    placements: StatePlacements

    def place(self, gradients: Sequence[Gradient]) -> Placement:
        """Where a gradient is to be after its backward: by rows, where it lies so in its memory."""
        divided = gradients[0].parameter in self.again
        return (in_memory(Shard(0), gradients[0]) or R) if divided else R

    def gathered(self) -> StepGraph:
        """The step, with parameters whole for the readers of a forward or backward."""
        step = self.step
        for again in (False, True):
            chosen = [place if self.again.get(item.source) is again else R
                      for item, place in zip(step.signature.inputs, self.placements.inputs, strict=True)]  # fmt: skip
            step = constrain_parameters(step, placements=chosen, again=again, local=True)
        return step

    def check(self, modules: Mapping[fx.Node, str]) -> None:
        """Refuses what would be another thing than in eager.

        Args:
            modules: the paths of those in whose forward parameters are whole, with a dot; "" where that is not known.

        Raises:
            UnsupportedError: naming the call.
        """
        if not self.again:
            return
        own = [g for g in self.step.signature.gradients if g.parameter in self.again]
        for gradient in own:
            again = {g.after for g in own if g.parameter == gradient.parameter} - {gradient.after}
            if gradient.before is not None or again:
                _refuse("gradients of several backwards", gradient.parameter)
        named = {node.name: node for node in self.step.graph.nodes}
        gradients = {named[g.after] for g in own if g.after in named}
        places = zip(self.step.placeholders, self.placements.inputs, strict=True)
        parts = gradients | {node for node, place in places if place != R}
        for node in self.step.graph.nodes:  # in order: what is made of parts alone is one
            if node.op != "call_function" or node in gradients or parts.isdisjoint(node.all_input_nodes):
                continue
            record, graded = info(node), not gradients.isdisjoint(node.all_input_nodes)
            read = [one for one in node.all_input_nodes if one in parts]
            within = all(one in modules and f"{record.module}.".startswith(modules[one]) for one in read)
            if record.phase == "backward" or (record.phase == "forward" and record.module and within and not graded):
                continue
            if _of_part(node, parts):
                parts.add(node)
                gradients |= {node} if graded else set()
            elif base_name(node.target) not in NORMS or not graded:
                _refuse(f"{node.target} of a part, which is not that of the whole", record.where)


def _module_of(item: Input) -> str:
    assert item.shard is not None
    path = re.sub(r"^\w+\['(\w+)'\]", r"\1", item.source)
    is_path = path.endswith(f".{item.shard[3]}") and "[" not in path  # and not by way of a hook, say
    return path.removesuffix(item.shard[3]) if is_path else ""


def _of_part(node: fx.Node, parts: set[fx.Node]) -> bool:
    """Whether a call gives of parts the part of what it gives of whole ones."""
    if node.target is GETITEM:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    name, others = base_name(node.target), [info(one).value for one in node.all_input_nodes if one not in parts]
    pointwise = torch.Tag.pointwise in node.target.tags or node.target in COPIES
    pointwise |= is_on_lists(node.target) and name not in NORMS
    return is_view(node) or (pointwise and all(not tensor.dim() for value in others for tensor in tensors_of(value)))


def _refuse(what: str, where: str) -> None:
    raise UnsupportedError(f"fully_shard with {what}", "compile without fullgraph=True", where=where)
