"""Norms: over split dimensions, the ranks' powers are added up before the root is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call, R, holds_on_all
from wholestep.spmd.expand.strategy import Build, Dims, Rule, Strategy
from wholestep.spmd.placements import Shard
from wholestep.spmd.rules.reductions import names_of

aten = torch.ops.aten


def _norm(call: Call) -> Iterator[Strategy]:
    letters, result, gone = names_of(call)
    yield from Dims([letters], [result]).strategies(call)
    order = float(call.argument("ord", 2.0))
    if order in (math.inf, -math.inf):
        fit = [a for a in gone if holds_on_all(call, call.values[0].shape[letters.index(a)])]
        how = dict.fromkeys(fit, "max" if order > 0 else "min")
        yield from Dims([letters], [result], how).strategies(call)  # type: ignore[arg-type]
        return
    for letter in gone:
        yield Strategy((Shard(letters.index(letter)),), (R,), _root_of_powers)


def _root_of_powers(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    order = float(call.argument("ord", 2.0))
    dims = call.argument("dim")
    local = build.call(aten.linalg_vector_norm.default, ins[0], order, dims, bool(call.argument("keepdim", False)),
                       dtype=call.results[0].dtype)  # fmt: skip
    if order == 0:  # a count
        return [build.all_reduce(local)]
    powers = build.all_reduce(build.call(aten.pow.Tensor_Scalar, local, order))
    return [build.call(aten.pow.Tensor_Scalar, powers, 1 / order)]


RULES: dict[str, Rule] = dict.fromkeys(["aten.linalg_vector_norm", "aten._foreach_norm"], _norm)
