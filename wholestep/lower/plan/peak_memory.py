"""What a program's memory holds at its fullest moment, from its plan alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from wholestep.ir import StepGraph, info
from wholestep.lower.backends.aten import plan_of
from wholestep.lower.plan.liveness import Plan


@dataclass(frozen=True)
class Usage:
    """Memory besides the inputs, when there is most of it.

    Attributes:
        live: the pieces of memory that are held then: all values that lie in one over time, and its bytes.
        at: what runs then; None for a program without calls.
        arena: bytes of the arenas, which are kept between calls; some of it may be idle at that moment.
    """

    live: list[tuple[list[fx.Node], int]]
    at: fx.Node | None
    arena: int


@dataclass(frozen=True)
class _Life:
    nodes: list[fx.Node]
    nbytes: int
    first: int
    last: int


def usage(step: StepGraph) -> Usage:
    """Plans the memory of a program as the `aten` backend does, and finds the fullest moment."""
    with torch.no_grad():
        plan = plan_of(step)
    lives = _lives(plan)
    changes = [0] * (len(plan.items) + 2)
    for life in lives:
        changes[life.first] += life.nbytes
        changes[life.last + 1] -= life.nbytes
    level = most = fullest = 0
    for position, change in enumerate(changes):
        level += change
        if level > most:
            most, fullest = level, position
    live = [(life.nodes, life.nbytes) for life in lives if life.first <= fullest <= life.last]
    at = plan.items[fullest].nodes[-1] if fullest < len(plan.items) else None
    return Usage(live, at, sum(plan.arena.values()))


def _lives(plan: Plan) -> list[_Life]:
    """Every piece of memory that is not an input's: a buffer of the arena, or what a call allocates."""
    made = {node: index for index, item in enumerate(plan.items) for node in item.nodes}
    end = len(plan.items)
    slots: dict[int, list[fx.Node]] = {}
    others: dict[fx.Node, list[fx.Node]] = {}
    for node, store in plan.store.items():
        if node in made and isinstance(info(node).value, torch.Tensor):
            if store.kind in ("slot", "lent"):
                slots.setdefault(store.index, []).append(node)
            elif store.kind in ("call", "fresh"):
                others.setdefault(plan.root[node], []).append(node)
    found = [
        _Life(nodes, plan.slots[index].nbytes, plan.slots[index].start, min(plan.slots[index].end, end))
        for index, nodes in slots.items()
    ]
    for root, nodes in others.items():
        value, first = info(root).value, min(made[node] for node in nodes)
        if isinstance(value, torch.Tensor):
            last = plan.last_item.get(root, first)
            found.append(_Life(nodes, value.numel() * value.itemsize, first, min(last, end)))
    return found
