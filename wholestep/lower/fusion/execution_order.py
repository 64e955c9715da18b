"""The order of execution: which calls run one by one, and which together as a chain.

Two groupings change the order of nodes, never their bits:

- a `chain` is the optimizer's arithmetic on one parameter, run by one compiled kernel (see `chains`), with the product
  of matrices that is its gradient where nobody else reads that (see `blocked_matmuls`); one chain counts all steps;
  of forward and backward, elementwise calls in a row over large tensors of one shape;
- an `update` is a fused optimizer's call on one parameter, with the product that is its gradient (see there).

Random and other effectful nodes keep their order.
"""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from wholestep.functional import is_view, is_wait
from wholestep.ir import StepGraph, info, is_effectful, nbytes
from wholestep.lower.fusion.blocked_matmuls import product_of, product_of_update
from wholestep.lower.fusion.chains import chain_step, is_elementwise
from wholestep.lower.plan.operator_facts import is_sure_view
from wholestep.passes.grouping import grouped

LEAST = 1 << 16  # bytes that are worth a change of order
LARGE = 1 << 18  # elements from which calls of a forward or backward are a chain: memory is passed over once, 1 MB each


@dataclass
class Item:
    """One unit of execution: a single node, or a group that runs together."""

    kind: Literal["single", "chain", "update"]
    nodes: list[fx.Node]


def arrange(step: StepGraph) -> list[Item]:
    """Groups the calls of a graph, which is left as it is, and orders the groups.

    Each follows what it reads, as near to the original order as that allows.
    """
    nodes = [n for n in step.graph.nodes if n.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    keys = {node: key for node in nodes if (key := _key(node)) is not None}
    group_of: dict[fx.Node, list[fx.Node]] = {}
    kinds: dict[fx.Node, Any] = {}
    for members in grouped(nodes, keys, lambda node: node.all_input_nodes, lambda node: node.users, _near, _counts):
        first = members[0]
        group_of.update(dict.fromkeys(members, members))
        product = product_of(members, lambda node, members=members: group_of.get(node) is members)  # type: ignore[misc]
        if product is not None:  # a gradient that they alone read, which needs nothing of theirs
            group_of[product] = members
            members.append(product)
            members.sort(key=place.__getitem__)
        if len(members) > 1 or (keys[first][0] == "chain" and info(first).phase == "optimizer"):
            kinds[members[0]] = keys[first][0]
    items: list[Item] = []
    item_of: dict[fx.Node, int] = {}
    for node in (n for n in nodes if n not in item_of):
        members = group_of.get(node, [node])
        item_of.update(dict.fromkeys(members, len(items)))
        items.append(Item(kinds.get(node, "single"), members))
    rank = [float(place[item.nodes[-1]]) for item in items]
    move_forward(nodes, item_of, rank, {i for i, item in enumerate(items) if item.kind == "single"})
    before: list[set[int]] = [set() for _ in items]
    last_effect: int | None = None
    for node in nodes:
        mine = item_of[node]
        before[mine] |= {item_of[o] for o in node.all_input_nodes if o in item_of} - {mine}
        if is_effectful(node):
            before[mine] |= set() if last_effect is None else {last_effect}
            last_effect = mine
    return [items[i] for i in _topological(before, rank)]


def _key(node: fx.Node) -> tuple[str, Any] | None:
    """What the calls of a group share; None for a call of no group."""
    if _is_chained(node) and chain_step(node) is not None:
        return "chain", info(node).value.shape
    return ("update", node) if product_of_update(node) is not None else None


def _near(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that one would be in a group with: those it reads, and those of its phase that read the same."""
    yield from node.all_input_nodes
    shape, phase = getattr(info(node).value, "shape", None), info(node).phase
    for operand in node.all_input_nodes:
        if getattr(info(operand).value, "shape", None) == shape:  # not a number that many parameters meet
            yield from (user for user in operand.users if user.op != "output" and info(user).phase == phase)


def _counts(node: fx.Node) -> bool:
    """True for what counts an optimizer's steps: those of all parameters run together."""
    return isinstance(info(node).value, torch.Tensor) and not info(node).value.dim()


def _is_chained(node: fx.Node) -> bool:
    """True for what runs as a chain where it can: calls of an optimizer, and others that wait for memory."""
    value = info(node).value
    if not is_elementwise(node) or not isinstance(value, torch.Tensor):
        return False
    return info(node).phase == "optimizer" or value.numel() >= LARGE


def _topological(before: list[set[int]], rank: list[float]) -> list[int]:
    """The lowest rank first, among those whose predecessors have run."""
    sorter = graphlib.TopologicalSorter(dict(enumerate(before)))
    sorter.prepare()
    ready: list[tuple[float, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, (rank[index], index))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def move_forward(nodes: list[fx.Node], item_of: dict[fx.Node, int], rank: list[float], alone: set[int]) -> None:
    """Memory-aware scheduling: calls that free more than they allocate run at the earliest point their operands allow,
    and the views that they read with them.

    The gradient of a weight is the last to read a layer's input, and often smaller than it. Autograd asks for the
    gradient of that input first; run the other way round, the input's memory serves for it.

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
        if item_of[node] not in alone or info(node).phase != "backward" or not _may_move(node):
            continue
        bases = {base_of.get(operand, operand) for operand in node.all_input_nodes} & item_of.keys()
        there = max((rank[item_of[base]] for base in bases), default=-1.0)
        freed = 0
        for base in bases:
            others = [reader for reader in readers[base] if reader is not node]
            if all(reader in item_of and rank[item_of[reader]] <= there for reader in others):
                freed += nbytes(info(base).value)
        if freed < max(LEAST, nbytes(info(node).value)) or there + 0.5 >= rank[item_of[node]]:
            continue
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
