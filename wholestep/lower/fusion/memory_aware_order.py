"""Memory-aware scheduling: calls that free more than they allocate run at the earliest point their operands allow.

The gradient of a weight is the last to read a layer's input, and often smaller than it. Autograd asks for the gradient
of that input first; run the other way round, the input's memory serves for it.
"""

from __future__ import annotations

import torch
from torch import fx

from wholestep.functional import is_view, is_wait
from wholestep.ir import info, is_effectful, nbytes
from wholestep.lower.plan.operator_facts import is_sure_view

LEAST = 1 << 16  # bytes that are worth a change of order


def move_forward(nodes: list[fx.Node], item_of: dict[fx.Node, int], rank: list[float], alone: set[int]) -> None:
    """Schedules such calls earlier, and the views that they read.

    Args:
        nodes: the calls, in the order of the graph.
        item_of: which unit of execution a node is in.
        rank: of each unit; units run in the order of their ranks where nothing else says so. Changed.
        alone: units of a single node.
    """
    base_of: dict[fx.Node, fx.Node] = {}  # view -> the value whose memory it shows
    for node in nodes:
        if is_sure_view(node.target) and isinstance(info(node).value, torch.Tensor):
            base_of[node] = base_of.get(node.all_input_nodes[0], node.all_input_nodes[0])
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in [*nodes, *(n for n in nodes[0].graph.nodes if n.op == "output")] if nodes else []:
        for base in {base_of.get(operand, operand) for operand in node.all_input_nodes}:
            if node.op == "output" or not is_sure_view(node.target):
                readers.setdefault(base, []).append(node)
    for node in nodes:
        if item_of[node] in alone and info(node).phase == "backward" and _may_move(node):
            _move(node, base_of, readers, item_of, rank)


def _move(
    node: fx.Node,
    base_of: dict[fx.Node, fx.Node],
    readers: dict[fx.Node, list[fx.Node]],
    item_of: dict[fx.Node, int],
    rank: list[float],
) -> None:
    bases = {base_of.get(operand, operand) for operand in node.all_input_nodes}
    there = max((rank[item_of[base]] for base in bases if base in item_of), default=-1.0)
    freed = 0
    for base in bases & item_of.keys():
        others = [reader for reader in readers[base] if reader is not node]
        if all(reader in item_of and rank[item_of[reader]] <= there for reader in others):
            freed += nbytes(info(base).value)
    if freed < LEAST or freed < nbytes(info(node).value) or there + 0.5 >= rank[item_of[node]]:
        return
    rank[item_of[node]] = there + 0.5
    for operand in node.all_input_nodes:
        while operand in base_of:
            rank[item_of[operand]] = min(rank[item_of[operand]], there + 0.25)
            operand = operand.all_input_nodes[0]


def _may_move(node: fx.Node) -> bool:
    value = info(node).value
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    return not (is_effectful(node) or is_view(node.target) or is_wait(node.target))  # a wait is as late as may be
