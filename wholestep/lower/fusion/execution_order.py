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

from wholestep.ir import StepGraph, info, is_effectful
from wholestep.lower.fusion.blocked_matmuls import product_of, product_of_update
from wholestep.lower.fusion.chains import chain_step, is_elementwise
from wholestep.lower.fusion.memory_aware_order import move_forward
from wholestep.passes.grouping import grouped

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
