"""Blocking collectives: those that complete where they start rather than beside the calls that follow.

Those are the ones that the program waits for before it does anything worth while, and all where no core is free. Of
these, what gathers then starts late.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from wholestep import comm
from wholestep.comm.ops.functional_collectives import BLOCKING, cores_are_busy
from wholestep.functional import base_name, is_collective, is_wait
from wholestep.ir import info, nbytes
from wholestep.lower.fusion.execution_order import Item
from wholestep.lower.plan.memory_plan import Plan
from wholestep.lower.plan.operator_facts import inplace_variant, out_variant
from wholestep.lower.plan.value_facts import KERNELS, device_key
from wholestep.nested import tensors_of

# Bytes that calls between start and wait touch, up to which they are not worth overlapping with: some 30 us, as long as
# it takes to wake another thread. The 20-layer MLP on two ranks takes 0.8 ms a step at once, 0.95 to 1.7 otherwise.
LITTLE = 1 << 18


def late_starts(items: list[Item], same_order: bool) -> list[Item]:
    """Where no core is free, gathers start right before they are waited for, or before the collective that follows.

    Collectives keep their order, so that ranks of which some have a core still issue the same ones. The arena of a
    small BERT under `FullyShard` falls to 0.85; to end reduce-scatters where they start saves nothing.

    Args:
        items: the units of execution, in order.
        same_order: see `Signature`.
    """
    if not same_order or any(_is_message(item.nodes[0]) for item in items):
        return items
    place = {item.nodes[0]: index for index, item in enumerate(items)}
    at, following = list(range(len(items))), len(items)
    for index in reversed(range(len(items))):
        start, waits = items[index].nodes[0], list(items[index].nodes[0].users)
        if is_collective(start.target):
            if len(waits) == 1 and is_wait(waits[0].target) and _grows(start) and _without_a_core(start):
                at[index] = min(following, place[waits[0]])
            following = at[index]
    return [items[index] for index in sorted(range(len(items)), key=lambda index: (at[index], at[index] == index))]


def blocking_collectives(plan: Plan) -> set[fx.Node]:
    """The calls that start collectives which had better not run beside what follows.

    Where ranks may issue collectives in other orders than this one, or messages, nothing that communicates may stand
    between start and wait: a rank that waited here might be waited for there.
    """
    calls = [node for item in plan.items for node in item.nodes]
    if not any(is_collective(node.target) for node in calls):
        return set()
    ordered = plan.step.signature.same_order and not any(_is_message(node) for node in calls)
    waits: dict[fx.Node, fx.Node] = {}
    for node in calls:
        users = list(node.users)
        if blocking_form(plan, node) is not None and len(users) == 1 and is_wait(users[0].target):
            waits[users[0]] = node
    found, begun = set(), {}
    touched = met = 0
    for node in calls:
        if is_collective(node.target):
            begun[node] = touched, met
            met += 1
        elif is_wait(node.target):
            start = waits.get(node)
            if start is not None and (ordered or met == begun[start][1] + 1):
                little = touched - begun[start][0] <= LITTLE
                found |= {start} if little or (ordered and _without_a_core(start)) else set()
            met += 1
        elif plan.reuse.how.get(node) in KERNELS:
            touched += _touched(node)
    return found


def blocking_form(plan: Plan, node: fx.Node) -> Any:
    """The function that runs a collective to its end as the plan has it run; None for any other call."""
    target: Any = node.target
    if not is_collective(target) or plan.reuse.how.get(node) not in ("collective", "out"):
        return None
    if plan.reuse.how[node] == "collective":
        return BLOCKING.get(inplace_variant(target))
    form = out_variant(target, device_key(info(node).value))
    return None if form is None else BLOCKING.get(form[0])


def _is_message(node: fx.Node) -> bool:
    return is_collective(node.target) and base_name(node.target) in ("send", "recv")  # type: ignore[arg-type]


def _without_a_core(start: fx.Node) -> bool:
    """True when no core is free to run a collective beside the program: the demo's GPT on two cores then takes 0.96."""
    group = start.args[-1]
    return comm.is_initialized() and isinstance(group, str) and cores_are_busy(group)


def _grows(start: fx.Node) -> bool:
    return nbytes(info(start).value) > nbytes([info(one).value for one in start.all_input_nodes])


def _touched(node: fx.Node) -> int:
    values = [info(one).value for one in (node, *node.all_input_nodes)]
    return sum(nbytes(one) for value in values for one in tensors_of(value))
