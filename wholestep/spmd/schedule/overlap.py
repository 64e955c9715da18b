"""Collectives start as early and are waited for as late as data and decisions allow, with a cap on memory in flight."""

from __future__ import annotations

from collections import deque

import torch
from torch import fx

from wholestep.functional import Decided, is_wait
from wholestep.ir import StepGraph, info, is_communication, is_effectful
from wholestep.spmd.expand.graph_edits import COPIES, copy_step, is_view
from wholestep.spmd.schedule.coalesce import Collective, found

aten = torch.ops.aten
collectives = torch.ops.wholestep

MIB = 1 << 20


def wait_late(step: StepGraph) -> StepGraph:
    """Moves waits, and the views and copies that are made of what they give, to right before who reads them.

    Args:
        step: left as it is.
    """
    step = copy_step(step, "wait_late")
    late: set[fx.Node] = set()
    for node in step.graph.nodes:
        sources = node.all_input_nodes
        passed_on = len(sources) == 1 and sources[0] in late and (is_view(node) or _is_light(node))
        if node.target is collectives.wait.default or passed_on:
            late.add(node)
    for node in sorted(late, reverse=True):  # nodes compare by their place in the graph
        if node.users:
            min(node.users).prepend(node)
    return step


def wait_for_decisions(step: StepGraph) -> StepGraph:
    """Moves waits for what is in flight to before the decisions at which the program may end.

    Args:
        step: left as it is.
    """
    step = copy_step(step, "wait_for_decisions")
    flying: list[fx.Node] = []
    for node in step.graph.nodes:
        if isinstance(node.target, Decided):
            for wait in (wait for start in flying for wait in start.users if node < wait):
                node.prepend(wait)
            flying = []
        elif is_communication(node) and not is_wait(node.target):
            flying.append(node)
    return step


def _is_light(node: fx.Node) -> bool:
    """True for a copy, and for what turns one number into another."""
    if node.op != "call_function" or is_effectful(node):
        return False
    values = [info(one).value for one in (node, *node.all_input_nodes)]
    # not by the count of elements: of an uneven piece one rank may hold a single one, and all are to move alike
    return node.target in COPIES or all(isinstance(v, torch.Tensor) and not v.dim() for v in values)


def start_early(step: StepGraph, *, in_flight: int = 64 * MIB) -> StepGraph:
    """Moves each start to right after what it sends is made, or after a wait that makes room for it; in their order.

    Args:
        step: left as it is.
        in_flight: results of collectives that were moved, and not waited for, hold at most so many bytes. A collective
            that alone gives more stays where it is.
    """
    step = copy_step(step, "start_early")
    flying: deque[Collective] = deque()
    in_air = 0
    previous: fx.Node | None = None
    for one in found(step):
        size = one.gives
        if size > in_flight:
            previous = one.start
            continue
        chain = _chain(one.start)
        waited = None
        while flying and in_air + size > in_flight:
            landed = flying.popleft()
            waited, in_air = landed.wait, in_air - landed.gives
        sources = [node for member in chain for node in member.all_input_nodes if node not in chain]
        after = max(node for node in (*sources, previous, waited, *step.placeholders[-1:]) if node is not None)
        if after < chain[0]:
            for node in reversed(chain):
                after.append(node)
        flying.append(one)
        in_air += size
        previous = one.start
    step.graph.lint()
    step.gm.recompile()
    return step


def _chain(start: fx.Node) -> list[fx.Node]:
    """A start, after the views and copies that nobody else reads and that make what it sends."""
    chain = [start]
    while True:
        sources = chain[0].all_input_nodes
        source = sources[0] if len(sources) == 1 else None
        if source is None or source.op != "call_function" or len(source.users) != 1:
            return chain
        if not is_view(source) and source.target not in COPIES:
            return chain
        chain.insert(0, source)
