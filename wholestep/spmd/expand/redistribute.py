"""Redistribution along an axis: the collective for each pair of placements, its cost, and the calls that do it.

`RULES` is the table. Along an axis of n ranks, for a tensor of B bytes, a rank sends

- all-gather, reduce-scatter: (n - 1) / n B; all-reduce, which is one after the other: 2 (n - 1) / n B;
- all-to-all: (n - 1) / n² B, for each rank holds B / n and keeps a part of that.

Pieces that are shorter travel as long as the longest, so that every rank issues the very same collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.comm.ops.functional_collectives import piece_size
from wholestep.ir import NodeInfo, info, is_dense
from wholestep.spmd.expand.strategy import Build
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Opaque, Partial, Placement, Replicate, Shard, is_unequal, normal

aten = torch.ops.aten


@dataclass(kw_only=True)
class Change(Build):
    """A change of placement along one axis, at the insertion point of a graph.

    Attributes:
        shape: what the ranks of the axis hold together.
        names: of what is sent, for the record of the collective.
        unequal: whether ranks hold pieces of several sizes. No rank then leaves out a call that another one makes:
            passes that move collectives shall find the same graph on every rank.
    """

    shape: tuple[int, ...]
    unequal: bool
    names: tuple[str, ...]

    def send(self, name: str, *args: Any) -> fx.Node:
        """A collective with the names of what is sent."""
        return self.collective(name, *args, names=self.names)

    def mine(self, dim: int) -> tuple[int, int]:
        """This rank's piece."""
        return self.piece(self.shape[dim])

    def step(self, dim: int) -> int:
        return piece_size(self.shape[dim], self.group.size)

    def slice(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """Elements from start to stop of a dimension."""
        some = self.unequal or (start, stop) != (0, info(node).value.shape[dim])
        return self.call(aten.slice.Tensor, node, dim, start, stop) if some else node

    def pad(self, node: fx.Node, dim: int, before: int, after: int, value: float = 0) -> fx.Node:
        """More elements of a dimension, where there are to be more."""
        return super().pad(node, dim, before, after, value) if self.unequal or before or after else node

    def swap(self, node: fx.Node, dim: int) -> fx.Node:
        """Puts a dimension first, and the first one in its place."""
        return node if dim == 0 else self.call(aten.transpose.int, node, 0, dim)

    def dense(self, node: fx.Node) -> fx.Node:
        """The elements in the order in which they are read."""
        return self.clone(node) if self.unequal or not info(node).value.is_contiguous() else node


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        collective: its name; "" when nothing is sent, "none" where none would do.
        emit: adds the calls; takes the change, the local value, from and to.
    """

    collective: str
    emit: Callable[[Change, fx.Node, Any, Any], fx.Node]

    def sends(self, size: int, ranks: int) -> float:
        """Bytes that each rank sends for a whole of so many bytes."""
        once = size * (ranks - 1) / ranks
        others = {"": 0, "all_reduce": 2 * once, "all_to_all": once / ranks, "none": math.inf}
        return others.get(self.collective, once)


def _same(change: Change, node: fx.Node, src: Any, dst: Any) -> fx.Node:
    return node


def _slice(change: Change, node: fx.Node, src: Replicate, dst: Shard) -> fx.Node:
    return change.slice(node, dst.dim, *change.mine(dst.dim))


def _all_gather(change: Change, node: fx.Node, src: Shard, dst: Replicate) -> fx.Node:
    dim, (start, stop) = src.dim, change.mine(src.dim)
    padded = change.pad(node, dim, 0, change.step(dim) - (stop - start))
    rows = change.send("all_gather", change.dense(change.swap(padded, dim)))
    return change.dense(change.swap(change.slice(rows, 0, 0, change.shape[dim]), dim))


def _operation(change: Change, node: fx.Node, op: str) -> tuple[fx.Node, str]:
    """What is to be reduced, and how: the mean by a product before the sum, as DistributedDataParallel takes it.

    Of floats the reduction does both in one pass; halves are rounded between the two.
    """
    dtype = info(node).value.dtype
    if op != "avg" or not dtype.is_floating_point:
        return node, op
    if dtype in (torch.float32, torch.float64):
        return node, f"premul_sum:{1 / change.group.size!r}"
    return change.call(aten.mul.Tensor, node, 1 / change.group.size), "sum"


def _all_reduce(change: Change, node: fx.Node, src: Partial, dst: Replicate) -> fx.Node:
    """Of whatever order of dimensions: elements are reduced as they lie in memory."""
    size, stride = list(info(node).value.shape), list(info(node).value.stride())
    as_is = change.unequal or info(node).value.is_contiguous() or not is_dense(size, stride)
    if not as_is:
        node = change.call(aten.as_strided.default, node, [math.prod(size)], [1])
    done = change.send("all_reduce", *_operation(change, node, src.op))
    return done if as_is else change.call(aten.as_strided.default, done, size, stride)


def _reduce_scatter(change: Change, node: fx.Node, src: Partial, dst: Shard) -> fx.Node:
    dim, (start, stop) = dst.dim, change.mine(dst.dim)
    padded = change.pad(node, dim, 0, change.step(dim) * change.group.size - change.shape[dim])
    rows = change.send("reduce_scatter", *_operation(change, change.dense(change.swap(padded, dim)), src.op))
    return change.dense(change.swap(change.slice(rows, 0, 0, stop - start), dim))


def _all_to_all(change: Change, node: fx.Node, src: Shard, dst: Shard) -> fx.Node:
    if src == dst:
        return node
    ranks, old, new = change.group.size, src.dim, dst.dim
    start, stop = change.mine(old)
    node = change.pad(node, old, 0, change.step(old) - (stop - start))
    node = change.pad(node, new, 0, change.step(new) * ranks - change.shape[new])
    dims = len(change.shape)
    others = [dim for dim in range(dims) if dim != new]
    rows = change.dense(change.call(aten.permute.default, node, [new, *others]))
    sent = change.send("all_to_all", rows, [], [])
    sizes = list(info(sent).value.shape)
    blocks = change.call(aten.view.default, sent, [ranks, change.step(new), *sizes[1:]])  # from rank, new, others
    place = others.index(old)
    order = [1, *range(2, 2 + place), 0, *range(2 + place, dims + 1)]
    sizes[0], sizes[1 + place] = change.step(new), ranks * change.step(old)
    joined = change.call(aten.view.default, change.dense(change.call(aten.permute.default, blocks, order)), sizes)
    back = change.call(aten.permute.default, joined, [([new, *others]).index(dim) for dim in range(dims)])
    start, stop = change.mine(new)
    return change.dense(change.slice(change.slice(back, old, 0, change.shape[old]), new, 0, stop - start))


# What a rank other than the first contributes so that it adds nothing; None: the value itself.
_NEUTRAL: dict[str, float | None] = {"sum": 0, "product": 1, "avg": None, "max": None, "min": None}


def _as_part(change: Change, node: fx.Node, src: Replicate, dst: Partial) -> fx.Node:
    """By the same calls on every rank: another axis's rules decide by them."""
    neutral = _NEUTRAL[dst.op]
    if neutral is None:
        return node
    others = change.call(aten.new_full.default, node, [], change.group.rank != 0, dtype=torch.bool)
    return change.call(aten.masked_fill.Scalar, node, others, neutral)


def _embed(change: Change, node: fx.Node, src: Shard, dst: Partial) -> fx.Node:
    neutral = _NEUTRAL[dst.op]
    if neutral is None:
        return _all_gather(change, node, src, Replicate())
    start, stop = change.mine(src.dim)
    return change.pad(node, src.dim, start, change.shape[src.dim] - stop, neutral)


def _partial(change: Change, node: fx.Node, src: Partial, dst: Partial) -> fx.Node:
    if src == dst:
        return node
    return _as_part(change, _all_reduce(change, node, src, Replicate()), Replicate(), dst)


RULES: dict[tuple[type, type], Rule] = {
    (Replicate, Replicate): Rule("", _same),
    (Replicate, Shard): Rule("", _slice),
    (Replicate, Partial): Rule("", _as_part),
    (Shard, Replicate): Rule("all_gather", _all_gather),
    (Shard, Shard): Rule("all_to_all", _all_to_all),
    (Shard, Partial): Rule("", _embed),  # avg, max and min have no neutral element: gathered
    (Partial, Replicate): Rule("all_reduce", _all_reduce),
    (Partial, Shard): Rule("reduce_scatter", _reduce_scatter),
    (Partial, Partial): Rule("all_reduce", _partial),
}


def _refuse(change: Change, node: fx.Node, src: Any, dst: Any) -> fx.Node:
    raise AssertionError(f"{node} is {src} and cannot be {dst}")


def rule_of(src: Placement, dst: Placement) -> Rule:
    """The row for a change along one axis."""
    if src == dst:
        return RULES[Replicate, Replicate]
    if Opaque in (type(src), type(dst)):
        return Rule("none", _refuse)
    if isinstance(src, Shard) and isinstance(dst, Partial) and _NEUTRAL[dst.op] is None:
        return Rule("all_gather", _embed)
    return RULES[type(src), type(dst)]


def redistribute(
    graph: fx.Graph, node: fx.Node, shape: Sequence[int], src: Placement, dst: Placement, group: AxisGroup,
    record: NodeInfo, names: tuple[str, ...] = (),
) -> fx.Node:  # fmt: skip
    """Adds the calls that change a value's placement along an axis, at the graph's insertion point.

    Args:
        node: gives what this rank holds; its record has the fake value.
        shape: of what the ranks of the axis hold together.
        record: for the new nodes, but for their values.
        names: of what is sent, for the records of collectives.

    Raises:
        PlanError: a placement names a dimension that the tensor does not have.
    """
    src, dst = normal(src, shape), normal(dst, shape)
    unequal = is_unequal(src, shape, group) or is_unequal(dst, shape, group)
    change = Change(graph, record, group, shape=tuple(shape), unequal=unequal, names=names)
    return rule_of(src, dst).emit(change, node, src, dst)
