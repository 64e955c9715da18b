"""Peak memory of a program and the values that make it up, from its plan alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from wholestep.ir import StepGraph, info
from wholestep.lower.backends.aten import plan_of
from wholestep.lower.plan.arena import peak
from wholestep.lower.plan.memory_plan import Plan, made_in
from wholestep.lower.plan.placement import Store


@dataclass(frozen=True)
class Usage:
    """Memory besides the inputs, when there is most of it.

    Attributes:
        live: the buffers that are held then: all values that lie in one over time, that which it has then, its bytes.
        at: what runs then; None for a program without calls.
        arena: bytes of the arenas, which are kept between calls; some of it may be idle at that moment.
    """

    live: list[tuple[list[fx.Node], fx.Node, int]]
    at: fx.Node | None
    arena: int


def peak_usage(step: StepGraph) -> Usage:
    """Plans the memory of a program as the `aten` backend does, and finds the fullest moment."""
    with torch.no_grad():
        plan = plan_of(step)
    values: dict[Store, list[fx.Node]] = {}
    for node in plan.live.nodes:
        if node in plan.reuse.store and isinstance(info(node).value, torch.Tensor):
            values.setdefault(plan.reuse.store[node], []).append(node)
    held = [(s, s.slot) for s in plan.reuse.stores if s.slot is not None and s.kind != "rows" and s in values]
    _, moment = peak([slot for _, slot in held])
    now = [(values[store], slot.nbytes) for store, slot in held if slot.start <= moment <= slot.end]
    at = plan.items[moment].nodes[-1] if moment < len(plan.items) else None
    live = [(nodes, _value_at(nodes, moment, plan), nbytes) for nodes, nbytes in now]
    return Usage(live, at, sum(plan.arena.values()))


def fullest(step: StepGraph) -> list[tuple[fx.Node, int]]:
    """The values in memory at the fullest moment of a program, each with the bytes of its buffer."""
    return [(value, nbytes) for _, value, nbytes in peak_usage(step).live]


def _value_at(nodes: list[fx.Node], moment: int, plan: Plan) -> fx.Node:
    """Which of the values that lie in one buffer over time is there at a moment."""
    roots = [plan.live.root[node] for node in nodes]
    there = [root for root in roots if made_in(root, plan.live) <= moment <= plan.last_use[root]]
    return [*roots[:1], *there][-1]
