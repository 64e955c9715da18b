"""Bool masks for dropout: it draws them as floats of 0 and 1; as booleans they are a quarter of the saved bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from wholestep.aot_autograd.recompute_costs import rate
from wholestep.functional import Functionalized
from wholestep.ir import GETITEM, StepGraph, copy_graph, info, set_info
from wholestep.torch_compat import OpOverload, lazy_graph_module

aten = torch.ops.aten

FROM = 1 << 15  # elements: below, two conversions cost more than the bytes are worth


def with_bool_masks(step: StepGraph) -> StepGraph:
    """A graph whose backward reads each Bernoulli draw, and what follows from it alone, by way of booleans.

    The forward is as it was; the same bits reach the backward, since 0 and 1 survive the way there and back. The graph
    given is left alone.
    """
    graph, _ = copy_graph(step.graph.nodes)
    for draw in [node for node in graph.nodes if _is_draw(node)]:
        following = _following(draw)
        read = [node for node in following if any(_is_backward(user) for user in node.users)]
        copies = _from_booleans(graph, draw, following) if read else {}
        for node in read:
            for user in [user for user in node.users if _is_backward(user)]:
                user.replace_input_with(node, copies[node])
    return StepGraph(lazy_graph_module(step.gm, graph), step.signature, step.stage)


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


def _following(draw: fx.Node) -> list[fx.Node]:
    """The draw and what the forward computes from it and constants alone, in the graph's order."""
    following = {draw: None}
    node = draw.next
    while node.op != "root":
        known = node.op == "call_function" and not _is_backward(node) and rate(node.target) is not None
        if known and node.all_input_nodes and following.keys() >= set(node.all_input_nodes):
            following[node] = None
        node = node.next
    return list(following)


def _from_booleans(graph: fx.Graph, draw: fx.Node, following: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The draw and what follows from it, computed from booleans."""
    record = info(draw)
    with graph.inserting_after(draw):
        mask = graph.call_function(aten._to_copy.default, (draw,), {"dtype": torch.bool})
    set_info(mask, replace(record, value=torch.empty_like(record.value, dtype=torch.bool)))
    with graph.inserting_after(mask):
        last = graph.call_function(aten._to_copy.default, (mask,), {"dtype": record.value.dtype})
    copies = {draw: set_info(last, replace(record))}
    for node in following[1:]:
        with graph.inserting_after(last):
            last = copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies
