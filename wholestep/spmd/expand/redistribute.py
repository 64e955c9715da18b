"""Redistribution on a mesh: the changes along single axes that it takes, their calls and their cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from wholestep.ir import NodeInfo, Phase
from wholestep.spmd.expand.axis_redistribute import Change, rule_of
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Replicate, Shard, is_unequal, local_shape, normal


def changes(src: Sequence[Placement], dst: Sequence[Placement]) -> Iterator[tuple[int, Placement, Placement]]:
    """The changes along single axes, in order, that lead from some placements to others: (axis, from, to).

    Axes that split one dimension together are undone from the last and done from the first.
    """
    tangled: set[int] = set()
    for dim in {p.dim for p in (*src, *dst) if isinstance(p, Shard)}:
        before, after = ({i for i, p in enumerate(side) if p == Shard(dim)} for side in (src, dst))
        if before != after and len(before | after) > 1:
            tangled |= before | after
    now = list(src)
    for axis in sorted(tangled, reverse=True):
        if isinstance(now[axis], Shard):
            yield axis, now[axis], Replicate()
            now[axis] = Replicate()
    for axis in [*(i for i in range(len(now)) if i not in tangled), *sorted(tangled)]:
        if now[axis] != dst[axis]:
            yield axis, now[axis], dst[axis]


def redistribute(
    graph: fx.Graph,
    node: fx.Node,
    shape: Sequence[int],
    src: Sequence[Placement],
    dst: Sequence[Placement],
    groups: Sequence[AxisGroup],
    *,
    phase: Phase,
    names: tuple[str, ...] = (),
    **record: Any,
) -> fx.Node:
    """Adds the calls that change a value's placements, at the graph's insertion point.

    Args:
        node: gives what this rank holds; its record has the fake value.
        shape: of the whole tensor.
        src, dst, groups: one for each axis of the mesh.
        phase, record: for the records of the new nodes.
        names: of what is sent, for the records of collectives.

    Raises:
        PlanError: a placement names a dimension that the tensor does not have.
    """
    now = [normal(p, shape) for p in src]
    for axis, old, new in changes(now, [normal(p, shape) for p in dst]):
        others: list[Placement] = [Replicate() if i == axis else p for i, p in enumerate(now)]
        whole, group = local_shape(shape, others, groups), groups[axis]
        unequal = group.uneven or is_unequal(old, whole, group) or is_unequal(new, whole, group)
        change = Change(graph, NodeInfo(None, phase, **record), group, shape=whole, unequal=unequal, names=names)
        node = rule_of(old, new).emit(change, node, old, new)
        now[axis] = new
    return node


def bytes_sent(
    shape: Sequence[int], itemsize: int, src: Sequence[Placement], dst: Sequence[Placement], groups: Sequence[AxisGroup]
) -> float:
    """Bytes that a rank sends for a change of placements, by the best known algorithm of each collective.

    Args:
        shape: of the whole tensor.
        itemsize: bytes of one element.
    """
    now, total = [normal(p, shape) for p in src], 0.0
    for axis, old, new in changes(now, [normal(p, shape) for p in dst]):
        size = float(itemsize)
        for length in shape:
            size *= length
        for i, (placement, group) in enumerate(zip(now, groups, strict=True)):
            size /= group.size if i != axis and isinstance(placement, Shard) else 1
        total += rule_of(old, new).sends(round(size), groups[axis].size)
        now[axis] = new
    return total
