"""Marks in a whole step's graph that say where a value shall be: what plans write and the expansion obeys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import Phase, info, set_info
from wholestep.spmd.expand.graph_edits import Choice, reroute
from wholestep.spmd.placements import Placement, Shard


def place(value: Any) -> Any:
    """Its argument: the record of the node that calls it says the placement."""
    return value


def placed(node: fx.Node, placement: Placement, phase: Phase, chosen: Choice) -> fx.Node | None:
    """Has the chosen readers of a value, and of its views, read it as placed; None when there are none.

    Args:
        phase: for the records of the mark and of views that are made anew.
    """
    if not node.users:
        return None
    # a placeholder's mark comes after all placeholders; nodes compare by their place in the graph
    following = node.next if node.op == "call_function" else min(node.users)
    with node.graph.inserting_before(following):
        mark = node.graph.call_function(place, (node,))
    set_info(mark, replace(info(node), phase=phase, placement=placement))
    reroute(node, mark, lambda reader: reader is not mark and chosen(reader), phase)
    if mark.users:
        return mark
    node.graph.erase_node(mark)
    return None


Place = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset


def in_memory(placement: Placement, memory: torch.Tensor, place: Place) -> Placement | None:
    """A gradient's placement for the memory in which it lies, perhaps with its dimensions in another order."""
    size, stride, offset = place
    if not isinstance(placement, Shard):
        return placement
    fits = [dim for dim in range(memory.dim())
            if (memory.shape[dim], memory.stride(dim)) == (size[placement.dim], stride[placement.dim])]  # fmt: skip
    return Shard(fits[0]) if fits and offset == 0 and memory.numel() == math.prod(size) else None


def moved(place: Place, memory: torch.Tensor, part: torch.Tensor) -> Place:
    """Where a tensor lies in a part of its memory.

    Args:
        place: its size, stride and offset in the whole memory.
        part: what a rank holds of the memory, with as many dimensions.
    """
    if memory.shape == part.shape and memory.stride() == part.stride():
        return place
    sizes, strides = list(place[0]), list(place[1])
    for dim, (size, stride) in enumerate(zip(*place[:2], strict=True)):
        fits = [d for d in range(memory.dim()) if (memory.shape[d], memory.stride(d)) == (size, stride)]
        if fits:
            sizes[dim], strides[dim] = part.shape[fits[0]], part.stride(fits[0])
    return tuple(sizes), tuple(strides), place[2]
