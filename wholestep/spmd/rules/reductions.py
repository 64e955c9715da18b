"""Reductions: over dimensions that are kept, results are split; over others, reduced once more over the ranks.

Where that is no matter of one operation, as for variances and norms, other calls on the parts are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call, R, holds_on_all
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Build, Decomposed, Dims, Emit, Rule, Strategy, alphabet, linear
from wholestep.spmd.placements import Op, Partial, Placement, Shard

aten = torch.ops.aten


def reduced_dims(call: Call) -> list[int]:
    """The dimensions that a reduction is over: all where none is given."""
    dims = call.argument("dim")
    count = call.values[0].dim()
    if dims is None or dims == []:
        return list(range(count))
    return [dim % max(count, 1) for dim in ([dims] if isinstance(dims, int) else dims)]


def reduction(
    op: Op | None = None, emit: Emit | None = None, to: Placement = R, when: Callable[[Call], bool] = lambda call: True
) -> Rule:
    """Over whole dimensions; over split ones by an operation, or by other calls.

    Args:
        op: reduces what the ranks' own parts give.
        emit: writes the other calls.
        to: the placement of what they give.
        when: where they can be written.
    """

    def rule(call: Call) -> Iterator[Strategy]:
        shape, gone, keep = call.values[0].shape, reduced_dims(call), bool(call.argument("keepdim", False))
        letters = alphabet(len(shape))
        result = [None if i in gone else a for i, a in enumerate(letters) if keep or i not in gone]
        dims = [dim for dim in gone if dim < len(shape)]
        fit = [letters[dim] for dim in dims if op in ("sum", "product") or holds_on_all(call, shape[dim])]
        how: dict[str, Op] = dict.fromkeys(fit, op) if op is not None else {}
        yield from Dims([letters], [result] * len(call.results), how).strategies(call)
        for dim in dims if emit is not None and when(call) else ():
            yield Strategy((Shard(dim),), (to,) * len(call.results), emit)

    return rule


def _by_sum(call: Call, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over split dimensions is the sum of what each rank's elements add to it."""
    dims, keep = reduced_dims(call), bool(call.argument("keepdim", False))
    return x.sum(dims, keep, dtype=call.results[0].dtype) / math.prod(x.shape[dim] for dim in dims)


def _by_distances(call: Call, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A variance or deviation by the mean of all and the distances from it."""
    dims, keep, correction = reduced_dims(call), bool(call.argument("keepdim", False)), call.argument("correction")
    if correction is None:
        correction = int(bool(call.argument("unbiased", True)))
    mean, count = x.mean(dims, True), math.prod(x.shape[dim] for dim in dims)
    spread = (x - mean).square().sum(dims, keep) / max(0, count - correction)
    name = call.target._schema.name
    spread = spread.sqrt() if "std" in name else spread
    return (spread, mean if keep else mean.squeeze(dims)) if name.endswith("_mean") else spread


def _can_be_spread(call: Call) -> bool:
    return call.values[0].is_floating_point() and can_decompose(call)


def _masked_sum(call: Call) -> Iterator[Strategy]:
    """A sum of the elements that a mask, which may have fewer or shorter dimensions, chooses."""
    x, mask = call.values[:2]
    letters = alphabet(x.dim())
    last = list(zip(letters, x.shape, strict=True))[x.dim() - mask.dim() :]
    same = [a if n == m else None for (a, n), m in zip(last, mask.shape, strict=True)]
    yield from Dims([letters, same], [[]], dict.fromkeys(letters, "sum")).strategies(call)


def _norm(call: Call) -> Iterable[Strategy]:
    order = float(call.argument("ord", 2.0))
    if math.isinf(order):
        return reduction("max" if order > 0 else "min")(call)
    return reduction(emit=_root_of_powers)(call)


def _root_of_powers(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    """The ranks' powers are added up before the root is taken."""
    order = float(call.argument("ord", 2.0))
    dims = call.argument("dim")
    local = build.call(aten.linalg_vector_norm.default, ins[0], order, dims, bool(call.argument("keepdim", False)),
                       dtype=call.results[0].dtype)  # fmt: skip
    if order == 0:  # a count
        return [build.all_reduce(local)]
    powers = build.all_reduce(build.call(aten.pow.Tensor_Scalar, local, order))
    return [build.call(aten.pow.Tensor_Scalar, powers, 1 / order)]


_SPREADS = ("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")

RULES: dict[str, Rule] = {
    "wholestep_formulas.masked_sum": linear(_masked_sum),
    "aten.sum": linear(reduction("sum")),
    "aten.nansum": reduction("sum"),
    "aten.count_nonzero": reduction("sum"),
    "aten.mean": linear(reduction(emit=Decomposed(_by_sum), to=Partial())),
    "aten.amax": reduction("max"),
    "aten.amin": reduction("min"),
    "aten.prod": reduction("product"),
    **dict.fromkeys(["aten.any", "aten.all", "aten.logsumexp"], reduction(emit=Decomposed(), when=can_decompose)),
    **dict.fromkeys(["aten.argmax", "aten.argmin"], reduction()),
    **dict.fromkeys(_SPREADS, reduction(emit=Decomposed(_by_distances), when=_can_be_spread)),
    **dict.fromkeys(["aten.linalg_vector_norm", "aten._foreach_norm"], _norm),
}
