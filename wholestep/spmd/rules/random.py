"""Random operators: every rank draws for the whole tensor and keeps its part, as one device would have drawn it.

All ranks' generators are in one state when a step starts, and stay so: each draws the same numbers in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.placements import Shard
from wholestep.spmd.sharding import Build, Call, Row, Rule

aten = torch.ops.aten


def _drawn(call: Call) -> Iterator[Row]:
    """An operator that fills the shape of its first operand, whose elements it does not read."""
    for dim in range(call.values[0].dim()):
        yield Row((Shard(dim),), (Shard(dim),), _draw_whole)


def _draw_whole(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    whole = build.call(aten.new_empty.default, ins[0], list(call.values[0].shape))
    drawn = build.call(call.target, whole, *call.args[1:], **call.kwargs)
    if isinstance(info(drawn).value, (list, tuple)):
        drawn = build.pick(drawn, 0)
    dim = next(i for i, (a, b) in enumerate(zip(call.values[0].shape, info(ins[0]).value.shape, strict=True)) if a != b)
    return [build.cut(drawn, dim)]


RULES: dict[str, Rule] = dict.fromkeys(
    [
        "functional(aten.bernoulli_)",
        "functional(aten.uniform_)",
        "functional(aten.normal_)",
        "functional(aten.random_)",
        "functional(aten.exponential_)",
        "aten.rand_like",
        "aten.randn_like",
        "aten.randint_like",
    ],
    _drawn,
)
