"""Which way of running a call moves the fewest bytes, given where its operands are.

Greedy, call by call. Two things keep it from short sight: nothing that every rank holds whole is split unless another
operand is split alike or the gradient's own value was (so that plans alone begin a split), and addends among the
results are charged with the reduction that they still need. Every rank chooses alike: only sizes decide, and where
ranks hold unequal parts those of the largest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.ir import info, nbytes
from wholestep.spmd.expand.axis_redistribute import rule_of
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.fake_evaluate import meta
from wholestep.spmd.expand.strategy import Row
from wholestep.spmd.placements import Partial, Placement, Replicate, Shard
from wholestep.spmd.rules import rows


@dataclass
class Held:
    """A value of the whole step, and the nodes of this rank that give it or its parts.

    Attributes:
        value: fake tensor of the whole shape.
        first: the placement in which it was made.
        most: bytes that count in choices: where ranks hold unequal parts, of the largest.
        versions: all placements in which it is at hand.
    """

    value: torch.Tensor
    first: Placement
    node: fx.Node
    most: int
    versions: dict[Placement, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = {self.first: self.node}

    def nearest(self, wanted: Placement, ranks: int) -> tuple[float, Placement]:
        """Bytes to send for a placement, and the version to start from."""
        if wanted in self.versions:
            return 0, wanted
        costs = [(rule_of(have, wanted).sends(self.most, ranks), i) for i, have in enumerate(self.versions)]
        cost, index = min(costs)
        return cost, list(self.versions)[index]


def replicated(call: Call) -> Row:
    """The call on whole operands."""
    return Row((R,) * len(call.operands), (R,) * len(call.results))


def choose(
    call: Call, rows: Iterable[Row], held: Sequence[Held], wish: Placement | None = None, pending: float = 1.0
) -> Row:
    """The best row for a call.

    Args:
        rows: one of whole operands may be among them, which then says how the call runs on these.
        held: of the operands.
        wish: where the first result would best be, as far as that is free.
        pending: how much of the reduction that addends among the results still need is charged here.
    """
    offered = list(rows)
    best = next((row for row in offered if row.ins == replicated(call).ins and row.emit is not None), replicated(call))
    cost = _cost(best, call, held, pending)
    for row in offered:
        wished = wish is not None and bool(row.outs) and row.outs[0] == wish
        if not wished and not _is_offered(row, held):
            continue
        other = _cost(row, call, held, pending)
        if other < cost or (wished and other == cost):
            best, cost = row, other
    return best


class Choices:
    """Chooses rows for calls; what was chosen for equal calls on operands that lie alike is chosen again.

    Args:
        pending: see `choose`.
    """

    def __init__(self, pending: float) -> None:
        self._pending = pending
        self._known: dict[Any, Row] = {}

    def best(self, call: Call, held: Sequence[Held], wish: Placement | None) -> Row:
        """The best row for a call; see `choose`."""
        places = [id(one) for one in held]
        lie = tuple([(places.index(id(one)), *one.versions) for one in held])
        ends = tuple([(_key(end.args), _key(end.kwargs)) for end in call.ends or ()])
        key = (call.target, _key(call.args), _key(call.kwargs), ends, lie, wish)
        try:
            return self._known[key]
        except (KeyError, TypeError):  # not met before, or with an argument that has no hash
            row = choose(call, rows(call), held, wish, self._pending)
        if _serves_all(row):
            with contextlib.suppress(TypeError):
                self._known[key] = row
        return row


def _key(argument: Any) -> Any:
    """What rules see of an argument."""
    if isinstance(argument, fx.Node):
        value = info(argument).value
        return meta(value) if isinstance(value, torch.Tensor) else fx.Node
    if isinstance(argument, (list, tuple)):
        return tuple([_key(one) for one in argument])
    if isinstance(argument, dict):
        return tuple([(name, _key(one)) for name, one in argument.items()])
    return type(argument), argument


def _serves_all(row: Row) -> bool:
    """False for a row whose calls may be made of nodes of one call: a function that remembers what is around it."""
    emit = row.emit.func if isinstance(row.emit, partial) else row.emit
    return getattr(emit, "__closure__", None) is None


def _is_offered(row: Row, held: Sequence[Held]) -> bool:
    """True when some operand is split, or all that the row takes as addends are such."""
    if any(isinstance(p, Shard) and p in h.versions for p, h in zip(row.ins, held, strict=True)):
        return True
    parts = [(p, h) for p, h in zip(row.ins, held, strict=True) if isinstance(p, Partial)]
    return bool(parts) and all(p in h.versions and Replicate() not in h.versions for p, h in parts)


def _cost(row: Row, call: Call, held: Sequence[Held], pending: float) -> float:
    ranks = call.line.size
    seen: set[tuple[int, Placement]] = set()
    total = 0.0
    for wanted, one in zip(row.ins, held, strict=True):
        if (id(one), wanted) not in seen:
            seen.add((id(one), wanted))
            total += one.nearest(wanted, ranks)[0]
    most = call.most
    made = sum(nbytes(v) for v, p in zip(most.results, row.outs, strict=True) if isinstance(p, Partial))
    taken = sum(nbytes(v) for v, p in zip(most.values, row.ins, strict=True) if isinstance(p, Partial))
    grown = made - taken if taken else 0  # addends are best reduced before they become more
    return total + max(pending * made, grown) * (ranks - 1) / ranks
