"""Reductions: over dimensions that are kept, results are split; over others, reduced once more over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from wholestep.spmd.expand.calls import Call, R, holds_on_all
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Decomposed, Dims, Names, Rule, Strategy, alphabet, linear
from wholestep.spmd.placements import Op, Shard

aten = torch.ops.aten


def reduced_dims(call: Call) -> list[int]:
    """The dimensions that a reduction is over: all where none is given."""
    dims = call.argument("dim")
    count = call.values[0].dim()
    if dims is None or dims == []:
        return list(range(count))
    return [dim % max(count, 1) for dim in ([dims] if isinstance(dims, int) else dims)]


def names_of(call: Call) -> tuple[Names, Names, list[str]]:
    """Letters of operand and result, and those that are reduced over."""
    letters = alphabet(call.values[0].dim())
    gone = reduced_dims(call)
    keep = bool(call.argument("keepdim", False))
    result = [None if i in gone else a for i, a in enumerate(letters) if keep or i not in gone]
    return letters, result, [letters[i] for i in gone if i < len(letters)]


def reduction(op: Op | None) -> Rule:
    """Over whole dimensions, or by ``op`` over split ones."""

    def rule(call: Call) -> Iterator[Strategy]:
        letters, result, gone = names_of(call)
        shape, always = call.values[0].shape, op in ("sum", "product")
        fit = [a for a in gone if always or holds_on_all(call, shape[letters.index(a)])]
        how = dict.fromkeys(fit, op) if op is not None else {}
        yield from Dims([letters], [result] * len(call.results), how).strategies(call)  # type: ignore[arg-type]

    return rule


def _mean(call: Call) -> Iterator[Strategy]:
    """A mean over split dimensions is the sum of what each rank's elements add to it."""
    letters, result, gone = names_of(call)
    yield from Dims([letters], [result]).strategies(call)
    by_sum = Decomposed(partial(_by_sum, call))
    yield from Dims([letters], [result], dict.fromkeys(gone, "sum"), emit=by_sum).strategies(call)


def _by_sum(call: Call, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    dims, keep = reduced_dims(call), bool(call.argument("keepdim", False))
    return x.sum(dims, keep, dtype=call.results[0].dtype) / math.prod(x.shape[dim] for dim in dims)


def _masked_sum(call: Call) -> Iterator[Strategy]:
    """A sum of the elements that a mask, which may have fewer or shorter dimensions, chooses."""
    x, mask = call.values[:2]
    letters = alphabet(x.dim())
    last = list(zip(letters, x.shape, strict=True))[x.dim() - mask.dim() :]
    same = [a if n == m else None for (a, n), m in zip(last, mask.shape, strict=True)]
    yield from Dims([letters, same], [[]], dict.fromkeys(letters, "sum")).strategies(call)


def _any_or_all(call: Call) -> Iterator[Strategy]:
    letters, result, gone = names_of(call)
    yield from Dims([letters], [result]).strategies(call)
    for letter in gone if can_decompose(call) else ():
        yield Strategy((Shard(letters.index(letter)),), (R,), Decomposed())


RULES: dict[str, Rule] = {
    "wholestep_formulas.masked_sum": linear(_masked_sum),
    "aten.sum": linear(reduction("sum")),
    "aten.nansum": reduction("sum"),
    "aten.count_nonzero": reduction("sum"),
    "aten.mean": linear(_mean),
    "aten.amax": reduction("max"),
    "aten.amin": reduction("min"),
    "aten.prod": reduction("product"),
    **dict.fromkeys(["aten.any", "aten.all"], _any_or_all),
    **dict.fromkeys(["aten.argmax", "aten.argmin"], reduction(None)),
}
