"""Dropout draws its masks as floats of 0 and 1: a forward that keeps them as booleans keeps a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from wholestep.aot_autograd.joint import Joint
from wholestep.aot_autograd.recompute_costs import rate
from wholestep.functional import Functionalized
from wholestep.ir import GETITEM, StepGraph, info, set_info
from wholestep.torch_compat import OpOverload, lazy_graph_module

aten = torch.ops.aten

FROM = 1 << 15  # elements: below, two conversions cost more than the bytes are worth


def narrow_masks(joint: Joint) -> Joint:
    """A joint graph whose backward reads each Bernoulli draw, and what follows from it alone, by way of booleans.

    The forward is as it was; the same bits reach the backward, since 0 and 1 survive the way there and back. The graph
    given is left alone.
    """
    joint = _copied(joint)
    for draw in [node for node in joint.step.graph.nodes if _is_draw(node)]:
        family = _family(draw)
        read = [node for node in family if any(_is_backward(user) for user in node.users)]
        if read:
            twins = _twins(joint.step.graph, draw, family)
            for node in read:
                for user in [user for user in node.users if _is_backward(user)]:
                    user.replace_input_with(node, twins[node])
    return joint


def _copied(joint: Joint) -> Joint:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.step.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    step = StepGraph(lazy_graph_module(joint.step.gm, graph), joint.step.signature, joint.step.stage)
    return replace(joint, step=step)


def _is_draw(node: fx.Node) -> bool:
    """True for a large float tensor that a Bernoulli operator of the forward has drawn."""
    call = node.args[0] if node.target is GETITEM else node
    target = call.target.op if isinstance(call, fx.Node) and isinstance(call.target, Functionalized) else node.target
    if not isinstance(target, OpOverload) or target._schema.name not in ("aten::bernoulli", "aten::bernoulli_"):
        return False
    value = info(node).value
    large = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() >= FROM
    return large and not _is_backward(node)


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).phase == "backward"


def _family(draw: fx.Node) -> list[fx.Node]:
    """The draw and what the forward computes from it and constants alone, in the graph's order."""
    family = {draw: None}
    for node in _after(draw):
        known = node.op == "call_function" and not _is_backward(node) and rate(node.target) is not None
        if known and node.all_input_nodes and all(operand in family for operand in node.all_input_nodes):
            family[node] = None
    return list(family)


def _after(node: fx.Node) -> Iterable[fx.Node]:
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _twins(graph: fx.Graph, draw: fx.Node, family: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Each of the family computed from the booleans."""
    record = info(draw)
    with graph.inserting_after(draw):
        mask = graph.call_function(aten._to_copy.default, (draw,), {"dtype": torch.bool})
    set_info(mask, replace(record, value=torch.empty_like(record.value, dtype=torch.bool)))
    with graph.inserting_after(mask):
        last = graph.call_function(aten._to_copy.default, (mask,), {"dtype": record.value.dtype})
    twins = {draw: set_info(last, replace(record))}
    for node in family[1:]:
        with graph.inserting_after(last):
            last = twins[node] = graph.node_copy(node, twins.__getitem__)
    return twins
