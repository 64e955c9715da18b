"""The naive expansion: every rank gathers all inputs, runs the whole program, and keeps its parts of what stays.

Right by construction and as slow as one device: what tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from wholestep.ir import StepGraph, info, set_info
from wholestep.spmd.global_view import View, cut
from wholestep.spmd.placements import Placement, Replicate
from wholestep.spmd.redistribute import redistribute
from wholestep.spmd.rewrite import call, copy_step, part_value

aten = torch.ops.aten


def naive_expand(step: StepGraph, view: View) -> StepGraph:
    """The graph of one rank, for a step in the global view.

    Args:
        step: of the whole step, left as it is.
        view: says where inputs, and what the step leaves behind, lie when no step runs.
    """
    step = copy_step(step, "naive_expand")
    everywhere = [Replicate()] * len(view.lines)
    inputs = list(zip(step.placeholders, step.signature.inputs, strict=True))
    head = next(node for node in step.graph.nodes if node.op != "placeholder")
    wholes = {item.name: info(node).value for node, item in inputs}
    for node, item in inputs:
        value = wholes[item.name]
        placements = view.placements(item, value) if isinstance(value, torch.Tensor) else everywhere
        if placements != tuple(everywhere) and isinstance(value, torch.Tensor):
            with step.graph.inserting_before(head):
                _gather(node, item.source, placements, view)
    out = next(node for node in reversed(step.graph.nodes) if node.op == "output")
    stays = {index: step.signature.inputs[into] for index, into in step.signature.mutations.items()}
    outputs = list(step.outputs)
    with step.graph.inserting_before(out):
        for index, item in (stays | step.signature.homes).items():
            placements = view.placements(item, info(outputs[index]).value)
            if placements != tuple(everywhere):
                outputs[index] = _keep(outputs[index], placements, view)
    out.args = (tuple(outputs),)
    step.graph.lint()
    step.gm.recompile()
    return step


def _gather(node: fx.Node, source: str, placements: Sequence[Placement], view: View) -> None:
    """Makes an input the rank's part, and all its readers read the whole."""
    whole = info(node).value
    part = cut(whole.shape, placements, view.lines)
    readers = list(node.users)
    set_info(node, replace(info(node), value=part_value(whole, part), placement=part))
    everywhere = [Replicate()] * len(view.lines)
    gathered = redistribute(
        node.graph, node, whole.shape, placements, everywhere, view.lines, phase="forward", placement=(source,)
    )
    if info(gathered).value.stride() != whole.stride():
        layout = {"dtype": whole.dtype, "device": whole.device}
        empty = call(node.graph, aten.new_empty_strided.default, gathered, list(whole.shape), list(whole.stride()),
                     phase="forward", keywords=layout)  # fmt: skip
        gathered = call(node.graph, aten.copy.default, empty, gathered, phase="forward")
    for reader in readers:
        reader.replace_input_with(node, gathered)


def _keep(node: fx.Node, placements: Sequence[Placement], view: View) -> fx.Node:
    """The rank's part of a value that stays, in memory of its own."""
    shape = info(node).value.shape
    everywhere = [Replicate()] * len(view.lines)
    mine = redistribute(node.graph, node, shape, everywhere, placements, view.lines, phase="optimizer")
    layout = {"memory_format": torch.contiguous_format}
    kept = call(node.graph, aten.clone.default, mine, phase="optimizer", keywords=layout)
    return set_info(kept, replace(info(kept), placement=cut(shape, placements, view.lines)))
