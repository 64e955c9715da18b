"""Means and variances: over split dimensions, each rank's own are joined by one collective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, some_hold_none
from wholestep.spmd.expand.strategy import Build, Dims, Placement, Rule, Strategy
from wholestep.spmd.placements import Shard
from wholestep.spmd.rules.reductions import names_of, reduced_dims

aten = torch.ops.aten


def _moments(build: Build, call: Call, node: fx.Node, dims: list[int], count: int) -> tuple[fx.Node, fx.Node]:
    """The mean over dimensions, which keep their places, and the sum of the squared distances from it.

    The ranks' own are joined as Chan, Golub and LeVeque do (1979), which loses no digits to a large mean.

    Args:
        node: gives what this rank has of the call's operand.
        count: of the elements that each mean is of.
    """
    mine = info(node).value
    number = math.prod(mine.shape[dim] for dim in dims)
    if any(some_hold_none(call, 0, dim) for dim in dims):  # the mean of nothing would be nan
        mean = build.call(aten.sum.dim_IntList, node, dims, True)
        mean = build.call(aten.div.Scalar, mean, max(1, number))
    else:
        mean = build.call(aten.mean.dim, node, dims, True)
    squares = build.call(aten.sum.dim_IntList, _squared(build, build.call(aten.sub.Tensor, node, mean)), dims, True)
    counts = build.call(aten.full_like.default, mean, number)
    ours = build.call(aten.stack.default, [mean, squares, counts])
    all_ours = build.all_gather(build.call(aten.unsqueeze.default, ours, 0))
    means, within, numbers = (build.call(aten.select.int, all_ours, 1, i) for i in range(3))
    mean = build.call(aten.div.Scalar, _total(build, build.call(aten.mul.Tensor, means, numbers)), count)
    between = _squared(build, build.call(aten.sub.Tensor, means, mean))
    parts = build.call(aten.add.Tensor, within, build.call(aten.mul.Tensor, between, numbers))
    return mean, _total(build, parts)


def _squared(build: Build, node: fx.Node) -> fx.Node:
    return build.call(aten.mul.Tensor, node, node)


def _total(build: Build, node: fx.Node) -> fx.Node:
    return build.call(aten.sum.dim_IntList, node, [0])


def _variance(call: Call) -> Iterator[Strategy]:
    letters, result, gone = names_of(call)
    outs: list[Placement] = [R] * len(call.results)
    yield from Dims([letters], [result] * len(outs)).strategies(call)
    if call.values[0].is_floating_point():
        for letter in gone:
            yield Strategy((Shard(letters.index(letter)),), tuple(outs), _of_moments)


def _of_moments(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    dims = reduced_dims(call)
    count = math.prod(call.values[0].shape[dim] for dim in dims)
    mean, squares = _moments(build, call, ins[0], dims, count)
    correction = call.argument("correction")
    if correction is None:
        correction = int(bool(call.argument("unbiased", True)))
    spread = build.call(aten.div.Scalar, squares, max(0, count - correction))
    name = call.target._schema.name
    if "std" in name:
        spread = build.call(aten.sqrt.default, spread)
    nodes = [spread, mean] if name.endswith("_mean") else [spread]
    keep = bool(call.argument("keepdim", False))
    return nodes if keep or not dims else [build.call(aten.squeeze.dims, one, dims) for one in nodes]


RULES: dict[str, Rule] = dict.fromkeys(["aten.var", "aten.std", "aten.var_mean", "aten.std_mean"], _variance)
