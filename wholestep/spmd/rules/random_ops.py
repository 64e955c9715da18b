"""Random operators: every rank draws for the whole tensor and keeps its part, as one device would have drawn it.

All ranks' generators are in one state when a step starts, and stay so: each draws the same numbers in one order.
Not here are those that draw more or fewer numbers as values say, such as `poisson`: they need whole operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.strategy import Build, Rule, Strategy
from wholestep.spmd.placements import Partial, Shard

aten = torch.ops.aten


def _filled(call: Call) -> Iterator[Strategy]:
    """An operator that fills the shape of its first operand, whose elements it does not read, as they lie in memory."""
    others = [R] * (len(call.values) - 1)
    for dim in range(call.values[0].dim()):
        yield Strategy((Shard(dim), *others), (Shard(dim),), partial(_fill_whole, dim=dim))
    for placement in (R, Partial()):
        yield Strategy((placement, *others), (R,), partial(_fill_whole, dim=None))


def _fill_whole(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int | None) -> list[fx.Node]:
    whole = call.values[0]
    memory = build.call(aten.new_empty_strided.default, ins[0], list(whole.shape), list(whole.stride()))
    drawn = _drawn(build, call, [memory, *ins[1:]])
    return [drawn if dim is None else build.shard(drawn, dim)]


def _drawn(build: Build, call: Call, ins: Sequence[fx.Node]) -> fx.Node:
    made = build.same(call, ins)
    return build.pick(made, 0) if isinstance(info(made).value, (list, tuple)) else made


def _by_parameters(call: Call) -> Iterator[Strategy]:
    """Operands of the result's shape say the distribution of each element: those of others' are made up."""
    shape = call.results[0].shape
    if all(value.shape == shape and value.is_contiguous() for value in call.values):
        for dim in range(len(shape)):
            yield Strategy((Shard(dim),) * len(call.values), (Shard(dim),), partial(_draw_amid, dim=dim))


def _by_rows(call: Call) -> Iterator[Strategy]:
    """`multinomial`: rows of weights."""
    if call.values[0].dim() == 2:
        yield Strategy((Shard(0),), (Shard(0),), partial(_draw_amid, dim=0))


def _draw_amid(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    start, stop = build.piece(call.values[0].shape[dim])
    whole = [build.pad(one, dim, start, call.values[0].shape[dim] - stop, 1) for one in ins]
    return [build.shard(_drawn(build, call, whole), dim)]


def _dropout(call: Call) -> Iterator[Strategy]:
    for dim in range(call.values[0].dim()):
        yield Strategy((Shard(dim),), (Shard(dim), Shard(dim)), partial(_drop, dim=dim))


def _drop(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    ones = build.call(aten.new_ones.default, ins[0], list(call.values[0].shape))
    made = build.same(call, [ones])
    scale, mask = (build.shard(build.pick(made, i), dim) for i in range(2))
    return [build.call(aten.mul.Tensor, ins[0], scale), mask]


_FILLS = ["bernoulli_", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"]

RULES: dict[str, Rule] = {
    **{f"functional(aten.{name})": _filled for name in _FILLS},
    **dict.fromkeys(["aten.rand_like", "aten.randn_like", "aten.randint_like"], _filled),
    **dict.fromkeys(["aten.bernoulli", "aten.normal"], _by_parameters),
    "aten.multinomial": _by_rows,
    "aten.native_dropout": _dropout,
}
