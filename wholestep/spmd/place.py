"""Marks in a whole step's graph that say where a value shall be: what plans write and the expansion obeys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from wholestep.ir import Phase, info, set_info
from wholestep.spmd.placements import Placement
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
