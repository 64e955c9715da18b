"""Slice propagation: of masks, positions and their like, a reader that wants its slice has that slice computed.

What cheap calls make of factories and of the step's inputs is whole on every rank where no plan shards it: masks,
positions, a parameter times its decay. Where a reader beside sharded operands wants a slice, it is computed from slices
of their operands, by the rule of each call, and so on up to the factories, which make the slice alone; what nobody then
reads whole is dropped. Nothing is sent, and every rank's graph stays alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from wholestep.ir import info, is_effectful
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.graph_edits import COPIES, is_view
from wholestep.spmd.expand.strategy import Build, Strategy
from wholestep.spmd.placements import Replicate, Shard
from wholestep.spmd.rules import strategies
from wholestep.torch_compat import OpOverload

aten = torch.ops.aten

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
