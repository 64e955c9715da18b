"""The naive expansion: every rank gathers all inputs, runs the whole program, and keeps its parts of what stays.

Right by construction and as slow as one device: what tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from wholestep.ir import Input, NodeInfo, StepGraph, info, set_info
from wholestep.spmd.expand.graph_edits import Writer, copy_step, kept, part_of_whole
from wholestep.spmd.expand.redistribute import redistribute
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Replicate, Shard, normal
from wholestep.spmd.plans.global_view import owner_of

aten = torch.ops.aten


def naive_expand(
    step: StepGraph, *, group: AxisGroup, placement_of: Callable[[Input, torch.Tensor], Placement]
) -> StepGraph:
    """The step of one rank of a line, which holds parts of some inputs; see `expand`.

    Args:
        step: left as it is.
        line: the ranks.
        placement_of: where an input, and what the step leaves behind, is between the calls of the step.
    """
    step = copy_step(step, "naive_expand")

    def placement(item: Input, value: torch.Tensor) -> Placement:
        return normal(placement_of(item, value), value.shape, item.source)

    places: list[Placement] = [Replicate()] * len(step.signature.inputs)
    for index, (node, item) in enumerate(zip(step.placeholders, step.signature.inputs, strict=True)):
        if isinstance(info(node).value, torch.Tensor):
            places[index] = placement(item, info(node).value)
            if isinstance(places[index], Shard):
                _gather(node, item.source, places[index], group)
    sources = [item.source for item in step.signature.inputs]
    split = {source for source, place in zip(sources, places, strict=True) if isinstance(place, Shard)}
    outputs, (out,) = list(step.outputs), (node for node in step.graph.nodes if node.op == "output")
    with step.graph.inserting_before(out):
        for index, home in step.signature.state_outputs.items():
            whole = info(outputs[index])
            wanted = placement(home, whole.value)
            outputs[index] = kept(_cut(outputs[index], wanted, group), whole, wanted, group, owner_of(home) in split)
        for index, into in step.signature.mutations.items():
            outputs[index] = _cut(outputs[index], places[into], group)
    out.args = (tuple(outputs),)
    step.graph.lint()
    step.gm.recompile()
    return step


def _gather(node: fx.Node, source: str, placement: Placement, group: AxisGroup) -> None:
    """Makes an input the rank's part, and all its readers read the whole."""
    assert isinstance(placement, Shard)
    record, readers = info(node), list(node.users)
    whole: torch.Tensor = record.value
    body = next(other for other in node.graph.nodes if other.op != "placeholder")
    with node.graph.inserting_before(body):
        set_info(node, part_of_whole(record, placement, group))
        gathered = _redistributed(node, whole, placement, Replicate(), group, NodeInfo(None, placement=(source,)))
        if info(gathered).value.stride() != whole.stride():
            layout = {"dtype": whole.dtype, "device": whole.device}
            place = list(whole.shape), list(whole.stride())
            write = Writer(node.graph, NodeInfo(None))
            empty = write.call(aten.new_empty_strided.default, gathered, *place, **layout)
            gathered = write.call(aten.copy.default, empty, gathered)
    for reader in readers:
        reader.replace_input_with(node, gathered)


def _cut(node: fx.Node, placement: Placement, group: AxisGroup) -> fx.Node:
    """The rank's part of a value, in memory of its own."""
    if not isinstance(placement, Shard):
        return node
    mine = _redistributed(node, info(node).value, Replicate(), placement, group, NodeInfo(None, "optimizer"))
    return Writer(node.graph, NodeInfo(None, "optimizer")).clone(mine)


def _redistributed(
    node: fx.Node, whole: torch.Tensor, old: Placement, new: Placement, group: AxisGroup, record: NodeInfo
) -> fx.Node:
    made = NodeInfo(None, record.phase)
    return redistribute(node.graph, node, whole.shape, old, new, group, made, record.placement or ())
