"""Operators that pick or place elements by index tensors.

Where the dimension that is picked from is split, each rank serves the indices in its own piece and gives zeros for
the others: an addend. Where that which is placed into is split, each rank's piece gets one more row, which takes what
belongs to others and is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, some_hold_none
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


def _letters(count: int, dim: int, at_dim: str | None = None) -> list[str | None]:
    return [at_dim if i == dim else a for i, a in enumerate(alphabet(count))]


def _dim(call: Call) -> int:
    return int(call.argument("dim")) % max(1, call.values[0].dim())


# This rank's indices ----------------------------------------------------------------------------------------------


def _own(build: Build, index: fx.Node, length: int, instead: int) -> tuple[fx.Node, fx.Node]:
    """Indices into this rank's piece, and which are others': those become ``instead``."""
    start, stop = build.piece(length)
    index = build.call(aten.remainder.Scalar, index, max(1, length))  # negative ones count from the end
    others = build.call(aten.logical_or.default, build.call(aten.lt.Scalar, index, start),
                        build.call(aten.ge.Scalar, index, stop))  # fmt: skip
    local = build.call(aten.masked_fill.Scalar, build.call(aten.sub.Scalar, index, start), others, instead)
    return local, others


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
    made = build.same(call, [_with_some(build, call, ins[0], dim), *ins[1:at], local, *ins[at + 1 :]])
    if after is not None:
        others = build.call(aten.view.default, others, [*info(others).value.shape, *[1] * after])
    return [build.call(aten.masked_fill.Scalar, made, others, 0)]


def _with_some(build: Build, call: Call, node: fx.Node, dim: int) -> fx.Node:
    """What the call's first operand is here, with something to pick where a rank may have nothing of it."""
    return _longer(build, node, dim) if some_hold_none(call, 0, dim) else node


def _placed(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int, at: int = 1) -> list[fx.Node]:
    here = info(ins[0]).value.shape[dim]
    local, _ = _own(build, ins[at], call.values[0].shape[dim], here)
    made = build.same(call, [_longer(build, ins[0], dim), *ins[1:at], local, *ins[at + 1 :]])
    return [build.call(aten.slice.Tensor, made, dim, 0, here)]


def _longer(build: Build, node: fx.Node, dim: int) -> fx.Node:
    """One more row at the end of a dimension."""
    pads = [0, 0] * (info(node).value.dim() - 1 - dim) + [0, 1]
    return build.call(aten.constant_pad_nd.default, node, pads)


# Tables -----------------------------------------------------------------------------------------------------------


def _embedding(call: Call) -> Iterator[Strategy]:
    count = call.values[1].dim()
    for dim in range(count):
        yield Strategy((R, Shard(dim)), (Shard(dim),))
    yield Strategy((Shard(1), R), (Shard(count),))
    yield Strategy((Shard(0), R), (Partial(),), partial(_picked, dim=0, after=1))


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


def picking(*, rows: bool) -> Rule:
    """Picks elements along a dimension, or whole rows: then the indices have that dimension alone."""

    def rule(call: Call) -> Iterator[Strategy]:
        count, dim = call.values[0].dim(), _dim(call)
        if count == 0 or not (rows or call.values[1].dim()):
            return
        result = _letters(count, dim, "along")
        index: Names = ["along"] * call.values[1].dim() if rows else result
        yield from Dims([_letters(count, dim), index], [result]).strategies(call)
        if _is_number(call.values[0]):
            picked = partial(_picked, dim=dim, after=count - 1 - dim if rows else None)
            yield Strategy((Shard(dim), R), (Partial(),), picked)

    return rule


def placing(*, rows: bool, adds: bool = False, is_linear: bool = True) -> Rule:
    """Places elements along a dimension, or whole rows, of a tensor or one value; with ``adds`` onto what is there."""

    def rule(call: Call) -> Iterator[Strategy]:
        count, dim = call.values[0].dim(), _dim(call)
        if count == 0 or not (rows or call.values[1].dim()):
            return
        beside, source = _letters(count, dim), _letters(count, dim, "along")
        index: Names = ["along"] * call.values[1].dim() if rows else source
        rest: list[Names] = [source if value.dim() == count else [] for value in call.values[2:]]
        how: dict[str, Op] = {"along": "sum"} if adds else {}
        yield from Dims([beside, index, *rest], [beside], how, frozenset([0])).strategies(call)
        if _is_number(call.values[0]):
            yield Strategy((Shard(dim), *[R] * (len(call.values) - 1)), (Shard(dim),), partial(_placed, dim=dim))
        if is_linear and len(call.values) == 3:
            yield from linear_strategies(call, [(0, 2)])

    return rule


# Several at once: x[:, i, j] --------------------------------------------------------------------------------------


def _plan(call: Call) -> tuple[list[int], list[str | None], list[str], list[Any]] | None:
    """Indexed dimensions; names for the operand, for the indices together, and for what they pick."""
    indices = call.argument("indices")
    places = [dim for dim, index in enumerate(indices) if index is not None]
    values = [info(indices[dim]).value for dim in places]
    if not places or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return None
    names = [None if dim in places else a for dim, a in enumerate(alphabet(call.values[0].dim()))]
    inner = [f"i{k}" for k in range(max(value.dim() for value in values))]
    if places == list(range(places[0], places[-1] + 1)):
        picked = [*names[: places[0]], *inner, *names[places[-1] + 1 :]]
    else:
        picked = [*inner, *[a for dim, a in enumerate(names) if dim not in places]]
    return places, names, inner, picked


def _index(call: Call) -> Iterator[Strategy]:
    plan = _plan(call)
    if plan is None:
        return
    places, names, inner, picked = plan
    shape = torch.broadcast_shapes(*[value.shape for value in call.values[1:]])
    yield from Dims([names, *[trailing(v, inner, shape) for v in call.values[1:]]], [picked]).strategies(call)
    if _is_number(call.values[0]):
        after = len(picked) - picked.index(inner[-1]) - 1 if inner else 0
        for number, dim in enumerate(places):
            ins = tuple(Shard(dim) if i == 0 else R for i in range(len(call.values)))
            yield Strategy(ins, (Partial(),), partial(_picked, dim=dim, at=1 + number, after=after))
    yield from linear_strategies(call, [(0,)])


def _index_put(call: Call) -> Iterator[Strategy]:
    plan = _plan(call)
    if plan is None:
        return
    places, names, inner, picked = plan
    whole, *indices, _ = call.values
    shape = torch.broadcast_shapes(*[value.shape for value in indices])
    outer = dict(zip(alphabet(whole.dim()), whole.shape, strict=True)) | dict(zip(inner, shape, strict=True))
    values = trailing(call.values[-1], picked, [outer[str(name)] for name in picked])
    how: dict[str, Op] = dict.fromkeys(inner, "sum") if call.argument("accumulate") else {}
    yield from Dims([names, *[trailing(v, inner, shape) for v in indices], values], [names], how,
                    frozenset([0])).strategies(call)  # fmt: skip
    if _is_number(whole):
        for number, dim in enumerate(places):
            ins = tuple(Shard(dim) if i == 0 else R for i in range(len(call.values)))
            yield Strategy(ins, (Shard(dim),), partial(_placed, dim=dim, at=1 + number))
    yield from linear_strategies(call, [(0, len(call.values) - 1)])


def _sought(call: Call) -> Iterator[Strategy]:
    """Each element on its own, against values that are whole."""
    first = "self" if "self" in call.by_name(call.values) else "elements"
    for dim in range(call.results[0].dim()):
        yield Strategy(call.placed(**{first: Shard(dim)}), (Shard(dim),))


RULES: dict[str, Rule] = {
    "aten.embedding": linear(_embedding),
    "aten.embedding_dense_backward": linear(_embedding_backward),
    "aten.gather": linear(picking(rows=False)),
    "aten.index_select": linear(picking(rows=True)),
    "aten.scatter": placing(rows=False),
    "aten.scatter_add": placing(rows=False, adds=True),
    "aten.scatter_reduce": placing(rows=False, is_linear=False),
    "aten.index_add": placing(rows=True, adds=True),
    "aten.index_copy": placing(rows=True),
    "aten.index_fill": placing(rows=True, is_linear=False),
    "aten.index": _index,
    "aten.index_put": _index_put,
    **dict.fromkeys(["aten.bucketize", "aten.isin"], _sought),
}
