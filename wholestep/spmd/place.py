"""Marks in a whole step's graph that say where a value shall be: what plans write and the expansion obeys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import Phase, info, set_info
from wholestep.spmd.placements import Placement, Shard
from wholestep.spmd.rewrite import Choice, reroute


def place(value: Any) -> Any:
    """Its argument: the record of the node that calls it says the placement."""
    return value


def placed(node: fx.Node, placement: Placement, phase: Phase, chosen: Choice) -> fx.Node | None:
    """Has the chosen readers of a value, and of its views, read it as placed; None when there are none.

    Args:
        phase: for the records of the mark and of views that are made anew.
    """
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    with node.graph.inserting_before(following):
        mark = node.graph.call_function(place, (node,))
    set_info(mark, replace(info(node), phase=phase, placement=placement))
    reroute(node, mark, lambda reader: reader is not mark and chosen(reader), phase)
    if mark.users:
        return mark
    node.graph.erase_node(mark)
    return None


def in_memory(
    placement: Placement, memory: torch.Tensor, place: tuple[Sequence[int], Sequence[int], int]
) -> Placement | None:
    """A gradient's placement for the memory in which it lies, perhaps with its dimensions in another order."""
    size, stride, offset = place
    if not isinstance(placement, Shard):
        return placement
    fits = [dim for dim in range(memory.dim())
            if (memory.shape[dim], memory.stride(dim)) == (size[placement.dim], stride[placement.dim])]  # fmt: skip
    return Shard(fits[0]) if fits and offset == 0 and memory.numel() == math.prod(size) else None
