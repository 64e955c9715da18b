"""Sharding constraints: calls in a whole step's graph that say how a value shall be placed for its readers.

Plans write them; the expansion brings the value there by the collective that this takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from wholestep.ir import Gradient, Phase, info, set_info
from wholestep.spmd.expand.graph_edits import Choice, reroute
from wholestep.spmd.placements import Partial, Placement, Shard


@dataclass(frozen=True)
class Constraint:
    """What the record of a constraint's node says.

    Attributes:
        to: the placement for the readers.
        addends: in the local view: what the ranks' own values are to one another; they are reduced.
        names: of the parameters whose gradients are reduced, for buckets and reports.
    """

    to: Placement
    addends: Partial | None = None
    names: tuple[str, ...] = ()


def sharding_constraint(value: Any) -> Any:
    """Its argument: the record of the node that calls it has the `Constraint`."""
    return value


def constrain(node: fx.Node, constraint: Constraint, phase: Phase, chosen: Choice) -> fx.Node | None:
    """Has the chosen readers of a value, and of its views, read it as constrained; None when there are none.

    Args:
        phase: for the records of the constraint and of views that are made anew.
    """
    if not node.users:
        return None
    # a placeholder's constraint comes after all placeholders; nodes compare by their place in the graph
    following = node.next if node.op == "call_function" else min(node.users)
    with node.graph.inserting_before(following):
        made = node.graph.call_function(sharding_constraint, (node,))
    set_info(made, replace(info(node), phase=phase, placement=constraint))
    reroute(node, made, lambda reader: reader is not made and chosen(reader), phase)
    if made.users:
        return made
    node.graph.erase_node(made)
    return None


def in_memory(placement: Placement, gradient: Gradient) -> Placement | None:
    """A gradient's placement for the memory in which it lies, perhaps with its dimensions in another order."""
    if not isinstance(placement, Shard):
        return placement
    dim = gradient.dims[placement.dim]
    return None if dim is None else Shard(dim)
