"""Softmax and its kin: along one dimension. Where that one is split, maximum and sum go over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, some_hold_none
from wholestep.spmd.expand.strategy import Build, Dims, Emit, Rule, Strategy, beside, linear_strategies
from wholestep.spmd.placements import Shard
from wholestep.spmd.rules.reductions import names_of, reduced_dims

aten = torch.ops.aten


def along(emit: Emit, *, is_linear: bool = False) -> Rule:
    """Rows beside a dimension ``dim``, and along it by other calls."""

    def rule(call: Call) -> Iterator[Strategy]:
        if call.values[0].dim() == 0:
            return
        dim = int(call.argument("dim")) % call.values[0].dim()
        yield from beside(call, dim)
        yield Strategy((Shard(dim),) * len(call.values), (Shard(dim),), emit)
        if is_linear:
            yield from linear_strategies(call, [(0,)])

    return rule


def largest(build: Build, call: Call, node: fx.Node, dims: Sequence[int]) -> fx.Node:
    """The maximum over dimensions of the call's whole operand, which keep their places."""
    count = call.values[0].dim()
    gone = {dim % count for dim in dims} if count else set()
    if any(some_hold_none(call, 0, dim) for dim in gone):  # one more that is never the largest
        pads = [pad for dim in reversed(range(count)) for pad in (0, int(dim in gone))]
        node = build.call(aten.constant_pad_nd.default, node, pads, -math.inf)
    return build.all_reduce(build.call(aten.amax.default, node, list(dims), True), "max")


def total(build: Build, node: fx.Node, dims: Sequence[int]) -> fx.Node:
    """The sum over dimensions of the whole, which keep their places."""
    return build.all_reduce(build.call(aten.sum.dim_IntList, node, list(dims), True))


def _accumulated_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _softmax(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    dim, result = int(call.argument("dim")), call.results[0].dtype
    x = build.cast(ins[0], _accumulated_in(result))
    top = largest(build, call, x, [dim])
    powers = build.call(aten.exp.default, build.call(aten.sub.Tensor, x, top))
    return [build.cast(build.call(aten.div.Tensor, powers, total(build, powers, [dim])), result)]


def _safe_softmax(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    """Zeros where all elements along the dimension are -inf."""
    dim, result = int(call.argument("dim")), call.results[0].dtype
    x = build.cast(ins[0], _accumulated_in(result))
    top = largest(build, call, x, [dim])
    none = build.call(aten.eq.Scalar, top, -math.inf)
    top = build.call(aten.masked_fill.Scalar, top, none, 0)
    powers = build.call(aten.exp.default, build.call(aten.sub.Tensor, x, top))
    below = build.call(aten.masked_fill.Scalar, total(build, powers, [dim]), none, 1)
    return [build.cast(build.call(aten.div.Tensor, powers, below), result)]


def _log_softmax(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    dim, result = int(call.argument("dim")), call.results[0].dtype
    x = build.cast(ins[0], _accumulated_in(result))
    x = build.call(aten.sub.Tensor, x, largest(build, call, x, [dim]))
    powers = total(build, build.call(aten.exp.default, x), [dim])
    return [build.cast(build.call(aten.sub.Tensor, x, build.call(aten.log.default, powers)), result)]


def _softmax_backward(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    grad, output = (build.cast(one, _accumulated_in(info(one).value.dtype)) for one in ins)
    weighted = build.call(aten.mul.Tensor, grad, output)
    below = build.call(aten.mul.Tensor, output, total(build, weighted, [int(call.argument("dim"))]))
    return [build.cast(build.call(aten.sub.Tensor, weighted, below), call.results[0].dtype)]


def _log_softmax_backward(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    grad, output = (build.cast(one, _accumulated_in(info(one).value.dtype)) for one in ins)
    summed = total(build, grad, [int(call.argument("dim"))])
    below = build.call(aten.mul.Tensor, build.call(aten.exp.default, output), summed)
    return [build.cast(build.call(aten.sub.Tensor, grad, below), call.results[0].dtype)]


def _logsumexp_rows(call: Call) -> Iterator[Strategy]:
    letters, result, gone = names_of(call)
    yield from Dims([letters], [result]).strategies(call)
    for letter in gone:
        yield Strategy((Shard(letters.index(letter)),), (R,), _logsumexp)


def _logsumexp(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    dims = reduced_dims(call)
    top = largest(build, call, ins[0], dims)
    infinite = build.call(aten.eq.Scalar, build.call(aten.abs.default, top), math.inf)
    top = build.call(aten.masked_fill.Scalar, top, infinite, 0)
    powers = build.call(aten.exp.default, build.call(aten.sub.Tensor, ins[0], top))
    logs = build.call(aten.log.default, total(build, powers, dims))
    found = build.call(aten.add.Tensor, logs, top)
    return [found if call.argument("keepdim") else build.call(aten.squeeze.dims, found, dims)]


RULES: dict[str, Rule] = {
    "aten._softmax": along(_softmax),
    "aten._safe_softmax": along(_safe_softmax),
    "aten._log_softmax": along(_log_softmax),
    "aten._softmax_backward_data": along(_softmax_backward, is_linear=True),
    "aten._log_softmax_backward_data": along(_log_softmax_backward, is_linear=True),
    "aten.logsumexp": _logsumexp_rows,
}
