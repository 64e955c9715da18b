"""Collectives that run to their end where they start: the program does next to nothing before it waits for them."""

from __future__ import annotations

from typing import Any

from torch import fx

from wholestep.comm.at_once import AT_ONCE
from wholestep.ir import fake_tensors, info
from wholestep.lower.lives import Plan
from wholestep.lower.ops import inplace_variant, is_collective, is_wait, out_variant
from wholestep.lower.values import device_key

# Bytes that calls between start and wait touch, up to which they are not worth overlapping with: some 30 us, as long as
# it takes to wake another thread. The 20-layer MLP on two ranks takes 0.8 ms a step at once, 0.95 to 1.7 otherwise.
LITTLE = 1 << 18
_NOTHING = ("host", "view", "skip", "wait", "pick")


def prompt_starts(plan: Plan) -> set[fx.Node]:
    """The starts of collectives between which and their waits little is done."""
    waits: dict[fx.Node, fx.Node] = {}
    for item in plan.items:
        for node in item.nodes:
            users = list(node.users)
            if form_at_once(plan, node) is not None and len(users) == 1 and is_wait(users[0].target):
                waits[users[0]] = node
    found, open_ = set(), dict.fromkeys(waits.values(), -1)
    done = 0
    for item in plan.items:
        for node in item.nodes:
            if node in open_:
                open_[node] = done
            elif node in waits and done - open_[waits[node]] <= LITTLE:
                found.add(waits[node])
            elif plan.how.get(node) not in _NOTHING and not is_collective(node.target):
                done += _touched(node)
    return found


def form_at_once(plan: Plan, node: fx.Node) -> Any:
    """The function that runs a collective to its end as the plan has it run; None for any other call."""
    target: Any = node.target
    if not is_collective(target) or plan.how.get(node) not in ("collective", "out"):
        return None
    if plan.how[node] == "collective":
        return AT_ONCE.get(inplace_variant(target))
    form = out_variant(target, device_key(info(node).value))
    return None if form is None else AT_ONCE.get(form[0])


def _touched(node: fx.Node) -> int:
    values = [info(one).value for one in (node, *node.all_input_nodes)]
    return sum(one.numel() * one.itemsize for value in values for one in fake_tensors(value))
