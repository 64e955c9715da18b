"""The memory plan of a program: liveness, then new values of inputs, then buffer reuse, then offsets in the arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep import comm
from wholestep.functional import base_name, is_collective
from wholestep.ir import StepGraph, info
from wholestep.lower.fusion.blocked_matmuls import rows_at_once
from wholestep.lower.fusion.execution_order import Item
from wholestep.lower.plan.arena import SHARED, Slot, peak, place
from wholestep.lower.plan.buffer_reuse import BufferReuse
from wholestep.lower.plan.liveness import Liveness
from wholestep.lower.plan.placement import Placement, Store
from wholestep.lower.plan.value_facts import origin_of
from wholestep.sizes import plain


@dataclass
class Plan:
    """What code is generated from.

    Attributes:
        items: the units of execution, in order.
        live: who reads what, and when; reuse: where each value lies, and how it gets there.
        last_use: root -> the last item that reads its memory; the number of items for what leaves the program.
        arena: bytes of the arena of each device.
        peak: the most bytes of arenas in use at once.
        slots: of the arenas; needed: the bytes of each at other sizes, as a function of the symbols.
    """

    step: StepGraph
    items: list[Item]
    live: Liveness
    reuse: Placement
    last_use: dict[fx.Node, int]
    arena: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    slots: list[Slot] = field(default_factory=list)
    needed: Callable[..., tuple[int, ...]] | None = None


def make_plan(step: StepGraph, items: list[Item], held: frozenset[str] = frozenset()) -> Plan:
    """Plans the memory of a program whose order is given.

    Args:
        held: names of results that somebody holds when the program runs again: the arena does not lend them memory.
    """
    live = Liveness(step, items, held)
    reuse = Placement(live)
    BufferReuse(reuse)
    plan = Plan(step, items, live, reuse, _last_uses(live, reuse))
    for store in reuse.stores:
        store.slot = _slot(store, plan)
    for node in filter(None, map(_in_shared_memory, live.nodes)):
        store = reuse.store[live.root[node]]
        if store.kind == "arena" and store.slot is not None:
            store.slot.device = SHARED
    slots = [store.slot for store in reuse.stores if store.kind in ("arena", "lent", "rows") and store.slot is not None]
    needed = [slot.nbytes for slot in slots]
    for slot in slots:
        slot.nbytes, slot.pieces = plain(slot.nbytes), plain(slot.pieces)
    plan.slots, plan.arena = slots, place(slots)
    plan.peak = min(peak(slots)[0], sum(plan.arena.values()))
    if (sizes := step.signature.sizes) is not None:
        plan.needed = sizes.function(map(repr, needed))
        sizes.specialized |= any(is_collective(node.target) for node in live.nodes)  # of whose places others know
    return plan


def _last_uses(live: Liveness, reuse: Placement) -> dict[fx.Node, int]:
    end = len(live.items)
    last = {root: made_in(root, live) for root in live.readers}
    for root, readers in live.readers.items():
        last[root] = max([last[root], *(live.item_of[r] for r in readers if r is not live.output)])
    for item, pairs in reuse.copies.items():
        for root in (live.root[node] for _, node in pairs):
            last[root] = max(last[root], item)
    return last | {live.root[node]: end for kind, node in live.returned if kind in ("value", "clone")}


def made_in(root: fx.Node, live: Liveness) -> int:
    """The item that first writes a value."""
    return live.item_of.get(origin_of(root)[0], 0)


def _slot(store: Store, plan: Plan) -> Slot | None:
    """How large a buffer is, when each value in it is written, and how long it is read; None where it has no memory."""
    value, live = info(store.values[0]).value, plan.live
    if not isinstance(value, torch.Tensor) or store.kind == "scratch":
        return None
    if store.kind == "rows":
        item, size = live.item_of[store.values[0]], rows_at_once(value) * value.shape[1] * value.itemsize
        return Slot(size, item, item, str(value.device), pieces=[(0, size, item)])
    pieces = []
    for node in store.values:
        held = info(node).value
        pieces.append((plan.reuse.offset.get(node, 0), held.numel() * held.itemsize, made_in(node, live)))
    # ranks may place things differently; what they meet over is as the transport saw it when they agreed
    touching = (user for node in store.values for user in (node, *live.readers[live.root[node]]))
    guest = store.kind != "lent" and not any(is_collective(user.target) for user in touching)
    start, end = min(start for *_, start in pieces), max(plan.last_use[node] for node in store.values)
    return Slot(value.numel() * value.itemsize, start, end, str(value.device), guest=guest, pieces=pieces)


def _in_shared_memory(node: fx.Node) -> fx.Node | None:
    """What a collective's transport takes from shared memory if it lies there: its operand, or it itself, in place."""
    name = base_name(node.target) if is_collective(node.target) else ""  # type: ignore[arg-type]
    if name not in ("all_reduce", "reduce_scatter", "all_gather") or not comm.is_initialized():
        return None
    given: Any = node if name == "all_reduce" else node.args[0]
    return given if comm.get_group(node.args[-1]).backend_name == "shm" else None  # type: ignore[arg-type]
