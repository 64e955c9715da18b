"""Means and variances: over split dimensions, by the mean of all and the distances from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Decomposed, Dims, Rule, Strategy
from wholestep.spmd.placements import Shard
from wholestep.spmd.rules.reductions import names_of, reduced_dims


def _variance(call: Call) -> Iterator[Strategy]:
    letters, result, gone = names_of(call)
    yield from Dims([letters], [result] * len(call.results)).strategies(call)
    if call.values[0].is_floating_point() and can_decompose(call):
        for letter in gone:
            by_distances = Decomposed(partial(_by_distances, call))
            yield Strategy((Shard(letters.index(letter)),), (R,) * len(call.results), by_distances)


def _by_distances(call: Call, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    dims, keep, correction = reduced_dims(call), bool(call.argument("keepdim", False)), call.argument("correction")
    if correction is None:
        correction = int(bool(call.argument("unbiased", True)))
    mean, count = x.mean(dims, True), math.prod(x.shape[dim] for dim in dims)
    spread = (x - mean).square().sum(dims, keep) / max(0, count - correction)
    name = call.target._schema.name
    spread = spread.sqrt() if "std" in name else spread
    return (spread, mean if keep else mean.squeeze(dims)) if name.endswith("_mean") else spread


RULES: dict[str, Rule] = dict.fromkeys(["aten.var", "aten.std", "aten.var_mean", "aten.std_mean"], _variance)
