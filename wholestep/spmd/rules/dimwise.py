"""Operators that work along one dimension, or on some of the last ones: all others can be split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Build, Decomposed, Dims, Rule, Strategy, alphabet, beside, linear
from wholestep.spmd.placements import Op, Shard
from wholestep.spmd.rules.reductions import reduction

aten = torch.ops.aten


def along(call: Call) -> Iterator[Strategy]:
    """Along ``dim``, which the results have too unless ``keepdim`` says that they do not."""
    count = call.values[0].dim()
    if count == 0 or call.results[0].dim() < count - 1:  # all elements in one, as `median()` does
        return
    dim = int(call.argument("dim", -1)) % count
    names = [None if i == dim else a for i, a in enumerate(alphabet(count))]
    kept = call.results[0].dim() == count
    result = names if kept else [a for i, a in enumerate(names) if i != dim]
    yield from Dims([names] * len(call.values), [result] * len(call.results)).strategies(call)


def _extreme(op: Op) -> Rule:
    """Along a dimension, or of all elements."""

    def rule(call: Call) -> Iterator[Strategy]:
        yield from (reduction(op) if call.argument("dim") is None else along)(call)

    return rule


def _product_gradient(call: Call) -> Iterator[Strategy]:
    """Along a dimension, which all operands have; that of the product of all elements runs whole."""
    if call.argument("dim") is not None:
        yield from along(call)


def _beside_dims(name: str) -> Rule:
    """`flip`, `roll`, Fourier transforms: along several dimensions; all when none is named."""

    def rule(call: Call) -> Iterator[Strategy]:
        dims = call.argument(name)
        if dims is not None and len(dims):
            yield from beside(call, *dims)

    return rule


def _softmax(call: Call) -> Iterator[Strategy]:
    """Along a dimension by other calls."""
    if call.values[0].dim():
        dim = int(call.argument("dim")) % call.values[0].dim()
        yield from beside(call, dim)
        if can_decompose(call):
            yield Strategy((Shard(dim),) * len(call.values), (Shard(dim),), Decomposed())


def _triangle(call: Call) -> Iterator[Strategy]:
    """The diagonal of a piece of rows or columns is shifted by where the piece starts."""
    count = call.values[0].dim()
    yield from beside(call, -1, -2)
    for dim in (count - 2, count - 1):
        yield Strategy((Shard(dim),), (Shard(dim),), _shifted_triangle)


def _shifted_triangle(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    whole, mine = call.values[0].shape, info(ins[0]).value.shape
    rows = mine[-1] == whole[-1]
    start, _ = build.piece(whole[-2 if rows else -1])
    diagonal = int(call.argument("diagonal", 0))
    return [build.same(call, ins, diagonal=diagonal + (start if rows else -start))]


def _matrices(call: Call) -> Iterator[Strategy]:
    """Linear algebra of matrices: by the dimensions before the last two, which all operands and results have."""
    count = call.values[0].dim() - 2
    letters = alphabet(count)

    def names(value: torch.Tensor) -> list[str | None]:
        return [letters[i] if i < count else None for i in range(value.dim())]

    if count > 0 and all(value.shape[:count] == call.values[0].shape[:count] for value in call.values):
        yield from Dims([names(v) for v in call.values], [names(v) for v in call.results]).strategies(call)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.cumsum", "aten.glu_backward"], linear(along)),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk",
                                     "kthvalue", "mode", "median", "nanmedian", "glu")],
        along,
    ),
    **dict.fromkeys(["aten._softmax", "aten._safe_softmax", "aten._log_softmax"], _softmax),
    **dict.fromkeys(["aten._softmax_backward_data", "aten._log_softmax_backward_data"], linear(_softmax)),
    "aten.max": _extreme("max"),
    "aten.min": _extreme("min"),
    "wholestep_formulas.product_gradient": _product_gradient,
    **dict.fromkeys(["aten.flip", "aten.roll"], linear(_beside_dims("dims"))),
    **dict.fromkeys(["aten.tril", "aten.triu"], linear(_triangle)),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh",
                                     "_linalg_solve_ex", "linalg_solve_triangular", "_linalg_det", "_linalg_slogdet",
                                     "linalg_lu_factor_ex", "_cdist_forward")],
        _matrices,
    ),
    **dict.fromkeys(["aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"], linear(_beside_dims("dim"))),
}  # fmt: skip
