"""Operators that pick or place elements by index tensors.

Where the dimension that is picked from is split, each rank serves the indices in its own piece and gives zeros for
the others: an addend. That which is placed into is split along other dimensions alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.strategy import (
    Build,
    Dims,
    Names,
    Rule,
    Strategy,
    alphabet,
    linear,
    linear_strategies,
    trailing,
)
from wholestep.spmd.placements import Op, Partial, Shard

aten = torch.ops.aten


def _is_number(value: torch.Tensor) -> bool:
    return value.dtype != torch.bool


# This rank's indices ----------------------------------------------------------------------------------------------


def own(build: Build, index: fx.Node, length: int) -> tuple[fx.Node, fx.Node]:
    """Indices counted from where this rank's piece starts, and which are others'."""
    start, stop = build.piece(length)
    others = build.call(aten.logical_or.default, build.call(aten.lt.Scalar, index, start),
                        build.call(aten.ge.Scalar, index, stop))  # fmt: skip
    return build.call(aten.sub.Scalar, index, start), others


def _own(build: Build, index: fx.Node, length: int, instead: int) -> tuple[fx.Node, fx.Node]:
    """Indices into this rank's piece, and which are others': those become ``instead``."""
    # negative ones count from the end
    local, others = own(build, build.call(aten.remainder.Scalar, index, max(1, length)), length)
    return build.call(aten.masked_fill.Scalar, local, others, instead), others


def _picked(
    build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int, at: int = 1, after: int | None = None
) -> list[fx.Node]:
    """Picks what is here of the first operand; zeros for the rest.

    Args:
        dim: that is picked from.
        at: which operand has the indices.
        after: how many dimensions the result has after those of the indices; None: it has those of the indices alone.
    """
    local, others = _own(build, ins[at], call.values[0].shape[dim], 0)
    made = build.same(call, [*ins[:at], local, *ins[at + 1 :]])
    if after is not None:
        others = build.call(aten.view.default, others, [*info(others).value.shape, *[1] * after])
    return [build.call(aten.masked_fill.Scalar, made, others, 0)]


# Tables -----------------------------------------------------------------------------------------------------------


def _embedding_backward(call: Call) -> Iterator[Strategy]:
    count = call.values[1].dim()
    if not call.argument("scale_grad_by_freq"):
        for dim in range(count):
            yield Strategy((Shard(dim), Shard(dim)), (Partial(),))
    yield Strategy((Shard(count), R), (Shard(1),))
    yield Strategy((R, R), (Shard(0),), _own_rows_of_table)


def _own_rows_of_table(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    length, padding = int(call.argument("num_weights")), int(call.argument("padding_idx"))
    start, stop = build.piece(length)
    local, _ = _own(build, ins[1], length, stop - start)
    if padding >= 0:
        local = build.call(aten.masked_fill.Scalar, local, build.call(aten.eq.Scalar, ins[1], padding), stop - start)
    made = build.same(call, ins, indices=local, num_weights=stop - start + 1, padding_idx=stop - start)
    return [build.call(aten.slice.Tensor, made, 0, 0, stop - start)]


# Along one dimension ----------------------------------------------------------------------------------------------


def along(*, rows: bool, puts: bool = False, adds: bool = False, is_linear: bool = True) -> Rule:
    """Picks elements along a dimension, or whole rows: then the indices have that dimension alone.

    Args:
        puts: elements, or one value, there instead.
        adds: onto what is there.
        is_linear: in both tensors.
    """

    def rule(call: Call) -> Iterator[Strategy]:
        count = call.values[0].dim()
        if count == 0 or not (rows or call.values[1].dim()):
            return
        dim = int(call.argument("dim")) % count
        beside, other = ([at if i == dim else a for i, a in enumerate(alphabet(count))] for at in (None, "along"))
        index: Names = ["along"] * call.values[1].dim() if rows else other
        rest: list[Names] = [other if value.dim() == count else [] for value in call.values[2:]]
        how: dict[str, Op] = {"along": "sum"} if adds else {}
        dims = Dims([beside, index, *rest], [beside if puts else other], how, frozenset([0] if puts else []))
        yield from dims.strategies(call)
        if _is_number(call.values[0]) and not puts:
            emit = partial(_picked, dim=dim, after=count - 1 - dim if rows else None)
            yield Strategy((Shard(dim), *[R] * (len(call.values) - 1)), (Partial(),), emit)
        if is_linear and (not puts or len(call.values) == 3):
            yield from linear_strategies(call, [(0, 2) if puts else (0,)])

    return rule


# Several at once: x[:, i, j] --------------------------------------------------------------------------------------


def _several(call: Call) -> Iterator[Strategy]:
    """Picks by several indices, or by the one of an embedding, or puts there what is the last operand."""
    whole, indices = call.values[0], call.argument("indices")
    indices = indices if isinstance(indices, (list, tuple)) else [indices]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    values = [info(indices[dim]).value for dim in places]
    if not places or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return
    puts, shape = len(call.values) > 1 + len(places), torch.broadcast_shapes(*[value.shape for value in values])
    letters, inner = alphabet(whole.dim()), [f"i{k}" for k in range(len(shape))]
    names = [None if dim in places else a for dim, a in enumerate(letters)]
    rest = [a for dim, a in enumerate(letters) if dim not in places]
    at = places[0] if places == list(range(places[0], places[-1] + 1)) else 0  # the indices' own among the others
    picked = [*rest[:at], *inner, *rest[at:]]
    ins = [names, *[trailing(value, inner, shape) for value in values]]
    if puts:
        sizes = dict(zip((*letters, *inner), (*whole.shape, *shape), strict=True))
        ins.append(trailing(call.values[-1], picked, [sizes[name] for name in picked]))
    how: dict[str, Op] = dict.fromkeys(inner, "sum") if puts and call.argument("accumulate") else {}
    yield from Dims(ins, [names if puts else picked], how, frozenset([0] if puts else [])).strategies(call)
    for number, dim in enumerate(places if _is_number(whole) and not puts else [], 1):
        emit = partial(_picked, dim=dim, at=number, after=len(rest) - at if inner else 0)
        yield Strategy((Shard(dim), *[R] * (len(call.values) - 1)), (Partial(),), emit)
    yield from linear_strategies(call, [(0, len(call.values) - 1) if puts else (0,)])


def _sought(call: Call) -> Iterator[Strategy]:
    """Each element on its own, against values that are whole."""
    first = "self" if "self" in call.by_name(call.values) else "elements"
    for dim in range(call.results[0].dim()):
        yield Strategy(call.placed(**{first: Shard(dim)}), (Shard(dim),))


RULES: dict[str, Rule] = {
    "aten.embedding_dense_backward": linear(_embedding_backward),
    "aten.gather": along(rows=False),
    "aten.index_select": along(rows=True),
    "aten.scatter": along(rows=False, puts=True),
    "aten.scatter_add": along(rows=False, puts=True, adds=True),
    "aten.scatter_reduce": along(rows=False, puts=True, is_linear=False),
    "aten.index_add": along(rows=True, puts=True, adds=True),
    "aten.index_copy": along(rows=True, puts=True),
    "aten.index_fill": along(rows=True, puts=True, is_linear=False),
    **dict.fromkeys(["aten.index", "aten.index_put", "aten.embedding"], _several),
    **dict.fromkeys(["aten.bucketize", "aten.isin"], _sought),
}
