"""Chooses the strategy of each call that communicates the fewest bytes, given the placements of its operands.

Greedy, call by call. Two things keep it from short sight: nothing that every rank holds whole is split unless another
operand is split alike or the gradient's own value was (so that plans alone begin a split), and addends among the
results are charged with the reduction that they still need. Every rank chooses alike: only sizes decide.

Slice propagation: what cheap calls make of factories and of the step's inputs is whole on every rank where no plan
shards it: masks, positions, a parameter times its decay. Where a reader beside sharded operands wants a slice, it is
computed from slices of their operands, by the rule of each call, and so on up to the factories, which make the slice
alone; what nobody then reads whole is dropped. Nothing is sent, and every rank's graph stays alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.fake_layouts import key_of
from wholestep.ir import info, is_effectful, nbytes
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.graph_edits import COPIES, is_view
from wholestep.spmd.expand.redistribute import rule_of
from wholestep.spmd.expand.strategy import Build, Strategy
from wholestep.spmd.placements import Partial, Placement, Replicate, Shard
from wholestep.spmd.rules import strategies
from wholestep.torch_compat import OpOverload

aten = torch.ops.aten


@dataclass
class ShardedValue:
    """A value of the whole step, and the nodes of this rank that give it or its parts.

    Attributes:
        value: fake tensor of the whole shape.
        first: the placement in which it was made.
        source: the call that gives it, where a slice of it may be computed from slices of its operands.
        versions: all placements in which it is at hand.
    """

    value: torch.Tensor
    first: Placement
    node: fx.Node
    source: fx.Node | None = None
    nbytes: int = field(init=False)
    versions: dict[Placement, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes, self.versions = nbytes(self.value), {self.first: self.node}

    def nearest(self, wanted: Placement, ranks: int) -> tuple[float, Placement]:
        """Bytes to send for a placement, and the version to start from."""
        if wanted in self.versions:
            return 0, wanted
        costs = [(rule_of(have, wanted).sends(self.nbytes, ranks), i) for i, have in enumerate(self.versions)]
        cost, index = min(costs)
        return cost, list(self.versions)[index]


def replicated(call: Call) -> Strategy:
    """The call on whole operands."""
    return Strategy((R,) * len(call.operands), (R,) * len(call.results))


class Choices:
    """Chooses strategies for calls; what was chosen for equal calls on operands placed alike is chosen again.

    Args:
        pending: how much of the reduction that addends among the results still need is charged where they are made.
    """

    def __init__(self, pending: float) -> None:
        self._pending = pending
        self._known: dict[Any, Strategy] = {}

    def best(self, call: Call, sharded: Sequence[ShardedValue], preferred: Placement | None) -> Strategy:
        """The best strategy for a call.

        Args:
            sharded: the operands.
            preferred: where the first result would best be, as far as that is free.
        """
        places = [id(one) for one in sharded]
        lie = tuple([(places.index(id(one)), *one.versions) for one in sharded])
        key = call.target, key_of((call.args, call.kwargs), []), lie, preferred
        with contextlib.suppress(KeyError, TypeError):  # not met before, or with an argument that has no hash
            return self._known[key]
        strategy = self._choose(call, sharded, preferred)
        if _serves_all(strategy):
            with contextlib.suppress(TypeError):
                self._known[key] = strategy
        return strategy

    def _choose(self, call: Call, sharded: Sequence[ShardedValue], preferred: Placement | None) -> Strategy:
        offered, whole = list(strategies(call)), replicated(call)
        # a rule may say how a call runs on whole operands
        best = next((one for one in offered if one.ins == whole.ins and one.emit is not None), whole)
        cost = _cost(best, call, sharded, self._pending)
        for strategy in offered:
            is_preferred = preferred is not None and bool(strategy.outs) and strategy.outs[0] == preferred
            if is_preferred or _is_offered(strategy, sharded):
                other = _cost(strategy, call, sharded, self._pending)
                if other < cost or (is_preferred and other == cost):
                    best, cost = strategy, other
        return best


def _serves_all(strategy: Strategy) -> bool:
    """False for a strategy whose calls may be made of nodes of one call: a function with a closure."""
    emit = strategy.emit.func if isinstance(strategy.emit, partial) else strategy.emit
    return getattr(emit, "__closure__", None) is None


def _is_offered(strategy: Strategy, sharded: Sequence[ShardedValue]) -> bool:
    """True when some operand is split, or all that the strategy takes as addends are such."""
    if any(isinstance(p, Shard) and p in h.versions for p, h in zip(strategy.ins, sharded, strict=True)):
        return True
    parts = [(p, h) for p, h in zip(strategy.ins, sharded, strict=True) if isinstance(p, Partial)]
    return bool(parts) and all(p in h.versions and Replicate() not in h.versions for p, h in parts)


def _cost(strategy: Strategy, call: Call, sharded: Sequence[ShardedValue], pending: float) -> float:
    ranks = call.group.size
    seen: set[tuple[int, Placement]] = set()
    total = 0.0
    for wanted, one in zip(strategy.ins, sharded, strict=True):
        if (id(one), wanted) not in seen:
            seen.add((id(one), wanted))
            total += one.nearest(wanted, ranks)[0]
    made = sum(nbytes(v) for v, p in zip(call.results, strategy.outs, strict=True) if isinstance(p, Partial))
    return total + pending * made * (ranks - 1) / ranks


# Operators whose result is alike everywhere: they make the slice by its sizes.
_FILLED = (aten.full, aten.zeros, aten.ones, aten.new_full, aten.new_zeros, aten.new_ones)
_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def is_factory(node: fx.Node) -> bool:
    """True for a call that reads no element of an operand."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in (*_FILLED, aten.arange)


def is_cheap(node: fx.Node) -> bool:
    """True for a call of one result that may be made again, for fewer elements."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or is_effectful(node):
        return False
    light = torch.Tag.pointwise in node.target.tags or node.target in (*COPIES, aten._to_copy.default)
    return isinstance(info(node).value, torch.Tensor) and (light or is_view(node) or is_factory(node))


def slice_strategy(node: fx.Node, call: Call, wanted: Shard) -> Strategy | None:
    """The strategy that makes a slice out of slices and whole values, and sends nothing."""
    if is_factory(node):
        bounds = call.argument("start", 0), call.argument("step", 1)  # of integers, the same however they are counted
        ranges = call.target in _RANGES
        known = all(type(one) is int for one in bounds) and not call.results[0].is_floating_point()
        made = Strategy((R,) * len(call.operands), (wanted,), _range if ranges else None)
        return made if known or not ranges else None
    silent = (one for one in strategies(call) if one.emit is None or is_view(node))
    fits = (one for one in silent if one.outs == (wanted,) and set(map(type, one.ins)) <= {Replicate, Shard})
    return next(fits, None)


def _range(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    first, step, whole = call.argument("start", 0), call.argument("step", 1), call.results[0]
    start, stop = build.piece(whole.shape[0])
    args, keywords = (first + start * step, first + stop * step, step), {"dtype": whole.dtype, "device": whole.device}
    return [build.as_recorded(aten.arange.start_step, args, keywords, [stop - start])]
