"""The sharding constraints that plans put into a whole step before its expansion: of parameters, gradients, results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import fx

from wholestep.ir import Phase, StepGraph, info, nbytes
from wholestep.spmd.expand.calls import R
from wholestep.spmd.expand.graph_edits import COPIES, Constraint, constrain, in_memory, readers, views_of
from wholestep.spmd.placements import Placement, Shard, normal
from wholestep.spmd.plans.global_view import matches
from wholestep.spmd.rules.pointwise import is_on_lists
from wholestep.torch_compat import OpOverload

# How much smaller what a parameter is used with must be for it to stay sharded: collectives have latency, and what is
# split otherwise than by rows may have to be put in order.
MUCH_SMALLER = 4


def constrain_parameters(
    step: StepGraph, *, placements: Sequence[Placement], again: bool, local: bool = False
) -> StepGraph:  # fmt: skip
    """Sharded parameters are replicated where they are computed with, in each forward and each backward on its own.

    Element-by-element readers, as the optimizer, read the part.

    Args:
        step: changed in place.
        placements: of the inputs between calls.
        again: gather in a backward what its forward had gathered, so that it is free between.
        local: in the local view, where what a parameter meets is each rank's own: all readers in a forward or backward
            read it whole.
    """
    stretch = _stretches(step, again)
    phases: dict[int, Phase] = {n: info(node).phase for node, n in reversed(stretch.items())}
    for (node, placement), number in itertools.product(_parameters(step, placements), sorted(phases)):
        if isinstance(placement, Shard):
            computes = partial(_computes, stretch, number, None if local else info(node).value.shape)
            constraint = constrain(node, Constraint(R), phases[number], computes)
            if constraint is not None:
                _move_late(constraint)
    return step


def cheaper_to_keep(step: StepGraph, *, placements: Sequence[Placement], again: bool) -> list[Placement]:
    """Of sharded parameters, leaves those out (as replicated) that stay: all that they are used with is far smaller.

    A wide layer on few rows of a batch is computed by parts of its weight, each on all rows.

    Args:
        placements: of the inputs between calls.
        again: whether a backward gathers anew.
    """
    stretch, found = _stretches(step, again), list(placements)
    for index, (node, item) in enumerate(zip(step.placeholders, step.signature.inputs, strict=True)):
        if item.kind != "parameter" or not isinstance(placements[index], Shard):
            continue
        value = info(node).value
        used = [r for r in readers(node) if _computes(stretch, stretch.get(r) or 0, value.shape, r)]
        gathered = nbytes(value) * (len({stretch[reader] for reader in used}) + 1)  # and the gradient, once
        if used and MUCH_SMALLER * sum(_beside(reader, node) for reader in used) <= gathered:
            found[index] = R
    return found


def _beside(reader: fx.Node, parameter: fx.Node) -> int:
    """Bytes of what a call reads besides a parameter and its views, and of what it gives."""
    own = views_of(parameter)
    return nbytes([info(node).value for node in (reader, *reader.all_input_nodes) if node not in own])


def constrain_gradients(step: StepGraph, *, placements: Sequence[Placement]) -> StepGraph:
    """Gradients are reduced, once, to where their parameters are, before anybody but a backward reads them.

    Args:
        step: changed in place.
        placements: of the inputs between calls.
    """
    nodes = {node.name: node for node in step.graph.nodes}
    where = {item.source: placement for item, placement in zip(step.signature.inputs, placements, strict=True)}
    done: set[fx.Node] = set()
    for gradient in step.signature.gradients:
        node = nodes[gradient.after]
        wanted = in_memory(where.get(gradient.parameter, R), gradient)
        if node.op == "call_function" and node not in done and wanted is not None:
            done.add(node)
            constrain(node, Constraint(wanted), "backward",
                      lambda reader: reader.op == "output" or info(reader).phase != "backward")  # fmt: skip
    return step


def split_batch(step: StepGraph) -> StepGraph:
    """The batch, which every rank holds whole, is split by rows where the step reads it.

    Args:
        step: changed in place.
    """
    for node, item in zip(step.placeholders, step.signature.inputs, strict=True):
        if item.kind == "batch" and isinstance(info(node).value, torch.Tensor) and info(node).value.dim():
            constrain(node, Constraint(Shard(0)), "forward", lambda reader: reader.op != "output")
    return step


def constrain_results(step: StepGraph, placements: Mapping[str, Placement], *, min_dims: int = 0) -> StepGraph:
    """What modules give in a forward is placed for those who read it outside.

    Args:
        step: changed in place.
        placements: by patterns of the modules' paths; the first that fits counts. Tensors without the dimension that
            is to be split stay as they are.
        min_dims: tensors of fewer dimensions stay as they are, too.
    """
    if not placements:
        return step
    calls = [node for node in step.graph.nodes if node.op == "call_function" and info(node).phase == "forward"]
    for node in calls:
        module, value = info(node).module, info(node).value
        placement = next((one for pattern, one in placements.items() if matches(module, pattern)), None)
        if placement is None or not isinstance(value, torch.Tensor) or value.dim() < min_dims:
            continue
        if isinstance(placement, Shard) and not -value.dim() <= placement.dim < value.dim():
            continue
        inside = [user for user in node.users if user.op == "call_function" and info(user).module == module]
        if not any(info(user).phase == "forward" for user in inside):
            placement = normal(placement, value.shape)
            constrain(node, Constraint(placement), "forward", lambda reader, home=module: (  # type: ignore[misc]
                reader.op == "output" or info(reader).module != home or info(reader).phase != "forward"))  # fmt: skip
    return step


def _parameters(step: StepGraph, placements: Sequence[Placement]) -> list[tuple[fx.Node, Placement]]:
    """Parameters as the step meets them, and as it leaves them, for those who read them after an update."""
    inputs, outputs = step.placeholders, step.outputs
    found = [(node, placement) for node, item, placement in zip(inputs, step.signature.inputs, placements, strict=True)
             if item.kind == "parameter"]  # fmt: skip
    by_node = dict(found)
    for output, index in step.signature.mutations.items():
        if inputs[index] in by_node and outputs[output].op == "call_function":
            found.append((outputs[output], by_node[inputs[index]]))
    return found


def _stretches(step: StepGraph, again: bool) -> dict[fx.Node, int]:
    """Numbers the stretches of forward and backward; the optimizer's calls are in none."""
    found: dict[fx.Node, int] = {}
    number, last = 1, "forward"
    for node in step.graph.nodes:
        phase = info(node).phase if node.op == "call_function" else "optimizer"
        if phase != "optimizer":
            number += phase != last and (again or phase == "forward")
            found[node], last = number, phase
    return found


def _move_late(constraint: fx.Node) -> None:
    """Moves a constraint, and the views of it, to right before the first call that reads it."""
    first = min(readers(constraint))
    for node in sorted(views_of(constraint)):  # nodes compare by their place in the graph
        first.prepend(node)


def _computes(stretch: Mapping[fx.Node, int], number: int, like: torch.Size | None, reader: fx.Node) -> bool:
    """True for a reader in a stretch, unless it gives values of the parameter's shape, each from those at its place."""
    if stretch.get(reader) != number or is_on_lists(reader.target):
        return False
    target, value = reader.target, info(reader).value
    pointwise = isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target in COPIES)
    return not (pointwise and isinstance(value, torch.Tensor) and value.shape == like)
