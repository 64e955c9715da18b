"""Reductions, products of matrices among them, and operators that work along one dimension: all others can be split.

Over dimensions that are kept, results of reductions are split; over others, reduced once more over the ranks. Where
that is no matter of one operation, as for variances and norms, other calls on the parts are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call, R, can_decompose
from wholestep.spmd.expand.strategy import (
    Build,
    Decomposed,
    Dims,
    Emit,
    Rule,
    Strategy,
    alphabet,
    beside,
    linear,
    trailing,
)
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
        how: dict[str, Op] = {} if op is None else dict.fromkeys([letters[dim] for dim in dims], op)
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
    **dict.fromkeys(
        _SPREADS,
        reduction(emit=Decomposed(_by_distances), when=lambda c: c.values[0].is_floating_point() and can_decompose(c)),
    ),
    **dict.fromkeys(["aten.linalg_vector_norm", "aten._foreach_norm"], _norm),
}


def along(call: Call) -> Iterator[Strategy]:
    """Along ``dim``, which the results have too unless ``keepdim`` says that they do not."""
    count, dim = call.values[0].dim(), call.argument("dim", -1)
    if count == 0 or dim is None or call.results[0].dim() < count - 1:  # all elements in one, as `median()` does
        return
    dim = int(dim) % count
    names = [None if i == dim else a for i, a in enumerate(alphabet(count))]
    kept = call.results[0].dim() == count
    result = names if kept else [a for i, a in enumerate(names) if i != dim]
    yield from Dims([names] * len(call.values), [result] * len(call.results)).strategies(call)


def _extreme(op: Op) -> Rule:
    """Along a dimension, or of all elements."""

    def rule(call: Call) -> Iterator[Strategy]:
        yield from (reduction(op) if call.argument("dim") is None else along)(call)

    return rule


def _beside_dims(name: str) -> Rule:
    """`flip`, `roll`, Fourier transforms: along several dimensions; all when none is named."""

    def rule(call: Call) -> Iterator[Strategy]:
        dims = call.argument(name)
        if dims is not None and len(dims):
            yield from beside(call, *dims)

    return rule


def _matrices(call: Call) -> Iterator[Strategy]:
    """Linear algebra of matrices: by the dimensions before the last two, which all operands and results have."""
    count = call.values[0].dim() - 2
    letters = alphabet(count)

    def names(value: torch.Tensor) -> list[str | None]:
        return [letters[i] if i < count else None for i in range(value.dim())]

    if count > 0 and all(value.shape[:count] == call.values[0].shape[:count] for value in call.values):
        yield from Dims([names(v) for v in call.values], [names(v) for v in call.results]).strategies(call)


def _softmax(call: Call) -> Iterator[Strategy]:
    """Along a dimension by other calls."""
    if call.values[0].dim():
        dim = int(call.argument("dim")) % call.values[0].dim()
        yield from beside(call, dim)
        if can_decompose(call):
            yield Strategy((Shard(dim),) * len(call.values), (Shard(dim),), Decomposed())


RULES |= {
    **dict.fromkeys(["aten.cumsum", "aten.glu_backward"], linear(along)),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk",
                                     "kthvalue", "mode", "median", "nanmedian", "glu")],
        along,
    ),
    "wholestep_formulas.product_gradient": along,
    **dict.fromkeys(["aten._softmax", "aten._safe_softmax", "aten._log_softmax"], _softmax),
    **dict.fromkeys(["aten._softmax_backward_data", "aten._log_softmax_backward_data"], linear(_softmax)),
    "aten.max": _extreme("max"),
    "aten.min": _extreme("min"),
    **dict.fromkeys(["aten.flip", "aten.roll"], linear(_beside_dims("dims"))),
    **dict.fromkeys(["aten.tril", "aten.triu"], linear(lambda call: beside(call, -1, -2))),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh",
                                     "_linalg_solve_ex", "linalg_solve_triangular", "_linalg_det", "_linalg_slogdet",
                                     "linalg_lu_factor_ex", "_cdist_forward")],
        _matrices,
    ),
    **dict.fromkeys(["aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"], linear(_beside_dims("dim"))),
}  # fmt: skip


def contraction(spec: str, *, added: bool = False) -> Rule:
    """``"mk,kn->mn"``; letters that the result lacks are summed over. Linear in each operand.

    Args:
        added: to a first operand, which is broadcast to the result.
    """
    operands, result = spec.split("->")
    ins = operands.split(",")
    summed: dict[str, Op] = {letter: "sum" for names in ins for letter in names if letter not in result}

    def rule(call: Call) -> Iterator[Strategy]:
        first = [trailing(call.values[0], result, call.results[0].shape)] if added else []
        yield from Dims([*first, *ins], [result], summed, frozenset([0][: len(first)])).strategies(call)

    return linear(rule, *((0, i + 1) if added else (i,) for i in range(len(ins))))


RULES |= {
    "aten.mm": contraction("mk,kn->mn"),
    "aten.bmm": contraction("bmk,bkn->bmn"),
    "aten.mv": contraction("mk,k->m"),
    "aten.dot": contraction("k,k->"),
    "aten.vdot": contraction("k,k->"),
    "aten.addmm": contraction("mk,kn->mn", added=True),
    "aten.addmv": contraction("mk,k->m", added=True),
    "aten.baddbmm": contraction("bmk,bkn->bmn", added=True),
    "aten.addbmm": contraction("bmk,bkn->mn", added=True),
    "aten.addr": contraction("m,n->mn", added=True),
}
