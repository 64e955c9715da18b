"""The order of execution: which calls run one by one, and which together as a chain.

Two groupings change the order of nodes, never their bits:

- a `chain` is the optimizer's arithmetic on one parameter, run by one compiled kernel (see `chains`), with the product
  of matrices that is its gradient where nobody else reads that (see `blocked_matmuls`); one chain counts all steps;
  of forward and backward, elementwise calls in a row over large tensors of one shape;
- an `update` is a fused optimizer's call on one parameter, with the product that is its gradient (see there).

Random and other effectful nodes keep their order.
"""

from __future__ import annotations

import functools
import graphlib
import heapq
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from wholestep.functional import is_collective
from wholestep.ir import StepGraph, info, is_effectful
from wholestep.lower.fusion.blocked_matmuls import product_of, product_of_update
from wholestep.lower.fusion.chains import chain_step, is_elementwise
from wholestep.lower.fusion.memory_aware_order import move_forward

LARGE = 1 << 18  # elements from which calls of a forward or backward are a chain: memory is passed over once, 1 MB each


@dataclass
class Item:
    """One unit of execution: a single node, or a group that runs together."""

    kind: Literal["single", "chain", "update"]
    nodes: list[fx.Node]


def arrange(step: StepGraph) -> list[Item]:
    """Groups the calls of a graph, which is left as it is, and orders the groups."""
    nodes = [n for n in step.graph.nodes if n.op == "call_function"]
    grouping = _Grouping(nodes)
    for node in nodes:
        grouping.visit(node)
    return grouping.ordered()


class _Grouping:
    """Grows and joins groups node by node, so that the graph of groups never gets a cycle.

    Sets of groups are bits of an int. `direct[g]` are the groups whose members are operands of g's members,
    `indirect[g]` those that g depends on through a node of no group. A group that joined another one
    stays as a bit that leads to it.
    """

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self.group_of: dict[fx.Node, int] = {}
        self.members: list[list[fx.Node]] = []
        self.keys: list[Any] = []
        self.direct: list[int] = []
        self.indirect: list[int] = []
        self.taint: dict[fx.Node, int] = {}
        self.counts: dict[int, None] = {}  # the group of an optimizer's counts of steps, one for each parameter
        self.effects = 0  # what the last call in the order of effects depends on: the next one follows it

    def visit(self, node: fx.Node) -> None:
        """Puts a node into a group of its own, an old one, or none."""
        value = info(node).value
        if has_order(node):
            self.effects |= self._reached(node.all_input_nodes)
            self.taint[node] = self.effects
            return
        if _is_chained(node) and chain_step(node) is not None:
            key: Any = ("chain", value.shape)
        elif product_of_update(node) is not None:
            key = ("update", node)
        else:
            self.taint[node] = self._reached(node.all_input_nodes)
            return
        mine = self._open(node, key)
        phase = info(node).phase
        near = {self.group_of[o]: None for o in node.all_input_nodes if o in self.group_of}
        counts = key[0] == "chain" and not value.dim()  # those of all parameters run together
        if counts:
            near |= self.counts
        for operand in node.all_input_nodes:
            if key[0] == "chain" and getattr(info(operand).value, "shape", None) != value.shape:
                continue  # parameters that meet the same number have nothing else in common
            near |= {self.group_of[u]: None for u in operand.users if u in self.group_of and info(u).phase == phase}
        for group in near:
            if group != mine and self.keys[group] == key and self.members[group]:
                mine = self._merge(group, mine)
        if counts:
            self.counts = {mine: None}

    def _reached(self, operands: Iterable[fx.Node]) -> int:
        return functools.reduce(operator.or_, (self.taint.get(operand, 0) for operand in operands), 0)

    def _open(self, node: fx.Node, key: Any) -> int:
        group = len(self.members)
        self.members.append([node])
        self.keys.append(key)
        inside = [o for o in node.all_input_nodes if o in self.group_of]
        self.direct.append(sum(1 << g for g in {self.group_of[o] for o in inside}))
        outside = [o for o in node.all_input_nodes if o not in self.group_of]
        self.indirect.append(self._reached(outside))
        self.group_of[node] = group
        self.taint[node] = 1 << group
        return group

    def _closure(self, mask: int) -> int:
        """All groups that a set of groups depends on, itself included."""
        seen, todo = 0, mask
        while todo:
            group = (todo & -todo).bit_length() - 1
            seen |= 1 << group
            todo = (todo | self.direct[group] | self.indirect[group]) & ~seen
        return seen

    def _may_merge(self, a: int, b: int) -> bool:
        """False when a dependency leads from one to the other by way of a third."""
        from_a = self._closure(self.indirect[a] | self.direct[a] & ~(1 << b))
        from_b = self._closure(self.indirect[b] | self.direct[b] & ~(1 << a))
        return not (from_a >> b & 1 or from_b >> a & 1)

    def _merge(self, a: int, b: int) -> int:
        """Joins b to a if that makes no cycle; returns the group that b's nodes are in now."""
        if not self._may_merge(a, b):
            return b
        self.members[a] += self.members[b]
        for node in self.members[b]:
            self.group_of[node] = a
            self.taint[node] = 1 << a
        both = ~(1 << a | 1 << b)
        self.direct[a] = (self.direct[a] | self.direct[b]) & both
        self.indirect[a] = (self.indirect[a] | self.indirect[b]) & both
        self.members[b], self.direct[b], self.indirect[b] = [], 1 << a, 0
        return a

    def _add_products(self) -> None:
        """Takes gradients that only a group reads into it, which depends on what they depend on as it is."""
        for group, (key, members) in enumerate(zip(self.keys, self.members, strict=True)):
            if key[0] in ("chain", "update"):
                product = product_of(members, lambda node, group=group: self.group_of.get(node) == group)  # type: ignore[misc]
                if product is not None:
                    self.group_of[product] = group
                    members.append(product)

    def ordered(self) -> list[Item]:
        """Sorts items so that each follows what it reads, as near to the original order as that allows."""
        place = {node: i for i, node in enumerate(self.nodes)}
        self._add_products()
        for members in self.members:
            members.sort(key=place.__getitem__)
        items: list[Item] = []
        item_of: dict[fx.Node, int] = {}
        for node in self.nodes:
            group = self.group_of.get(node, -1)
            alone = group >= 0 and len(self.members[group]) < 2
            if group < 0 or (alone and (self.keys[group][0] != "chain" or info(node).phase != "optimizer")):
                item_of[node] = len(items)
                items.append(Item("single", [node]))
            elif self.members[group][0] is node:
                for member in self.members[group]:
                    item_of[member] = len(items)
                items.append(Item(self.keys[group][0], self.members[group]))
        rank = [float(place[item.nodes[-1]]) for item in items]
        move_forward(self.nodes, item_of, rank, {i for i, item in enumerate(items) if item.kind == "single"})
        before: list[set[int]] = [set() for _ in items]
        last_effect: int | None = None
        for node in self.nodes:
            mine = item_of[node]
            before[mine] |= {item_of[o] for o in node.all_input_nodes if o in item_of} - {mine}
            if has_order(node):
                if last_effect is not None:
                    before[mine].add(last_effect)
                last_effect = mine
        return [items[i] for i in _topological(before, rank)]


def _is_chained(node: fx.Node) -> bool:
    """True for what runs as a chain where it can: calls of an optimizer, and others that wait for memory."""
    value = info(node).value
    if not is_elementwise(node) or not isinstance(value, torch.Tensor):
        return False
    return info(node).phase == "optimizer" or value.numel() >= LARGE


def has_order(node: fx.Node) -> bool:
    """True for calls that run in the order of the graph, whether they read one another or not."""
    return is_effectful(node) or is_collective(node.target)


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
