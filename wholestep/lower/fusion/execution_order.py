"""The order of execution: which calls run one by one, and which together as a chain or tile by tile.

Three groupings change the order of nodes, never their bits:

- a `chain` is the optimizer's arithmetic on one parameter, run by one compiled kernel (see `chains`), with the product
  of matrices that is its gradient where nobody else reads that (see `blocked_matmuls`); one chain counts all steps;
- an `update` is a fused optimizer's call on one parameter, with the product that is its gradient (see there);
- a `tile` group is a chain of other operators over big tensors of one shape. It runs on 64 K elements after another,
  so that memory is passed over once instead of once for each operator.

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

from wholestep.functional import Decided, base_name, is_collective
from wholestep.ir import StepGraph, info, is_effectful
from wholestep.lower.fusion.blocked_matmuls import product_of, product_of_update
from wholestep.lower.fusion.chains import chain_step
from wholestep.lower.fusion.memory_aware_order import move_forward
from wholestep.lower.plan.operator_facts import aten, inplace_variant, is_pointwise, out_variant
from wholestep.nested import leaves

TILE = 1 << 16  # elements of one tile: 256 KB a tensor in float32, so that a chain's tensors stay in the cache
TILE_FROM = 1 << 18  # elements from which a chain is tiled: 1 MB in float32

# Operators that may be tiled if their vector and scalar code agree (see `_same_bits`).
TILE_OPS = {
    "add", "sub", "mul", "div", "neg", "abs", "sqrt", "lerp", "addcmul", "addcdiv", "maximum", "minimum",
    "relu", "threshold_backward", "clamp_min", "clamp_max", "where",
}  # fmt: skip


def tileable(node: fx.Node) -> bool:
    """True for elementwise calls over big contiguous CPU tensors of one shape (and single numbers)."""
    value, op = info(node).value, node.target
    if not is_pointwise(op) or not isinstance(value, torch.Tensor) or base_name(op) not in TILE_OPS:  # type: ignore[arg-type]
        return False
    if value.numel() < TILE_FROM or value.device.type != "cpu" or not value.is_contiguous():
        return False
    if value.dtype not in (torch.float32, torch.float64) or node.kwargs.get("alpha", 1) != 1:
        return False
    for operand in (info(o).value for o in node.all_input_nodes):
        if isinstance(operand, torch.Tensor) and operand.dim():
            if operand.shape != value.shape or not operand.is_contiguous() or operand.device.type != "cpu":
                return False
        elif not isinstance(operand, (torch.Tensor, int, float)):
            return False
    writable = out_variant(op, "CPU") is not None or inplace_variant(op) is not None  # type: ignore[arg-type]
    return writable and _same_bits(op, node)


_SAME_BITS: dict[Any, bool] = {}


def _same_bits(op: Any, node: fx.Node) -> bool:
    """True when an operator's vector code and the scalar code of its loop ends agree bit by bit.

    Tiles put the loop's end elsewhere than the whole tensor does. Tried once per operator and dtypes, on
    4096 random values, whole against slices shorter than a vector.
    """
    values = [info(a).value if isinstance(a, fx.Node) else a for a in node.args]
    key = (op, *((v.dtype, v.dim() > 0) if isinstance(v, torch.Tensor) else type(v) for v in values))
    if key not in _SAME_BITS:
        generator = torch.Generator().manual_seed(0)
        low = 0.1 if op is aten.sqrt.default else -0.5
        trial: list[Any] = [0.37 if isinstance(a, fx.Node) else a for a in node.args]
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                trial[index] = (torch.rand(4096, generator=generator) + low).to(value.dtype)
                trial[index] = trial[index] if value.dim() else trial[index][0]
        keywords = {k: 0.37 if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()}
        parts = [
            op(*[a[i : i + 7] if isinstance(a, torch.Tensor) and a.dim() else a for a in trial], **keywords)
            for i in range(0, 4096, 7)
        ]
        _SAME_BITS[key] = bool(torch.equal(op(*trial, **keywords), torch.cat(parts)))
    return _SAME_BITS[key]


@dataclass
class Item:
    """One unit of execution: a single node, or a group that runs together."""

    kind: Literal["single", "chain", "update", "tile"]
    nodes: list[fx.Node]

    @property
    def by_pieces(self) -> bool:
        """True when all nodes work on one piece of their operands after another."""
        return self.kind in ("chain", "tile")


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
        self.decisions = _decisions(nodes)
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
        if info(node).phase == "optimizer" and chain_step(node) is not None:
            key: Any = ("chain", value.shape, value.dtype)
        elif product_of_update(node) is not None:
            key = ("update", node)
        elif tileable(node):
            key = ("tile", value.shape, value.dtype)
        else:
            self.taint[node] = self._reached([*node.all_input_nodes, *self._decided_before(node)])
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

    def _decided_before(self, node: fx.Node) -> list[fx.Node]:
        """The decisions on what a call reads."""
        if not self.decisions or isinstance(node.target, Decided):
            return []
        return [one for operand in node.all_input_nodes for one in self.decisions.get(operand, ())]

    def _reached(self, operands: Iterable[fx.Node]) -> int:
        return functools.reduce(operator.or_, (self.taint.get(operand, 0) for operand in operands), 0)

    def _open(self, node: fx.Node, key: Any) -> int:
        group = len(self.members)
        self.members.append([node])
        self.keys.append(key)
        inside = [o for o in node.all_input_nodes if o in self.group_of]
        self.direct.append(sum(1 << g for g in {self.group_of[o] for o in inside}))
        outside = [o for o in node.all_input_nodes if o not in self.group_of]
        self.indirect.append(self._reached([*outside, *self._decided_before(node)]))
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
            if group < 0 or (len(self.members[group]) < 2 and self.keys[group][0] != "chain"):
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
            awaited = [*node.all_input_nodes, *self._decided_before(node)]
            before[mine] |= {item_of[o] for o in awaited if o in item_of} - {mine}
            if has_order(node):
                if last_effect is not None:
                    before[mine].add(last_effect)
                last_effect = mine
        return [items[i] for i in _topological(before, rank)]


def _decisions(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By operand, the decisions on it: what reads it has, beyond them, the shape which was planned."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        on = leaves(node.args[0]) if isinstance(node.target, Decided) else ()
        for operand in (one for one in on if isinstance(one, fx.Node) and one.op == "call_function"):
            found.setdefault(operand, []).append(node)
    return found


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
