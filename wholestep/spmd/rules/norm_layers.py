"""Layers that bring values to mean 0 and variance 1, and their gradients, over split dimensions too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, holds_on_all
from wholestep.spmd.expand.strategy import Build, Rule, Strategy, linear_strategies
from wholestep.spmd.placements import Partial, Placement, Shard
from wholestep.spmd.rules.mean_variance import moments

aten = torch.ops.aten


def present(call: Call, *placements: Placement) -> tuple[Placement, ...]:
    """Placements of those gradients that are asked for."""
    return tuple(p for p, value in zip(placements, call.result, strict=True) if isinstance(value, torch.Tensor))


def chosen(call: Call, *nodes: fx.Node | None) -> list[fx.Node]:
    """Those gradients that are asked for."""
    return [n for n, value in zip(nodes, call.result, strict=True) if isinstance(value, torch.Tensor) and n is not None]


# Over the last dimensions: layer norm, root mean square norm --------------------------------------------------------


def _leading(call: Call) -> int:
    """How many dimensions are not normalised over."""
    return call.by_name(call.values)["input"].dim() - len(call.argument("normalized_shape"))


def _over_last(call: Call) -> Iterator[Strategy]:
    lead, count = _leading(call), len(call.results)
    for dim in range(lead):
        yield Strategy(call.placed(input=Shard(dim)), (Shard(dim),) * count)
    if count == 3:
        for dim in range(len(call.argument("normalized_shape"))):
            ins = call.placed(input=Shard(lead + dim), weight=Shard(dim), bias=Shard(dim))
            yield Strategy(ins, (Shard(lead + dim), R, R), _layer_norm)


def _layer_norm(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    given, x = call.by_name(ins), call.by_name(ins)["input"]
    work, result = call.results[-1].dtype, info(x).value.dtype
    dims = list(range(_leading(call), info(x).value.dim()))
    count = math.prod(call.argument("normalized_shape"))
    both = moments(build, call, build.cast(x, work), dims, count)
    eps = float(call.argument("eps"))
    spread = build.call(aten.div.Scalar, both.squares, count)
    scale = build.call(aten.rsqrt.default, build.call(aten.add.Scalar, spread, eps))
    out = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, x, both.mean), scale)
    if "weight" in given:
        out = build.call(aten.mul.Tensor, out, given["weight"])
    if "bias" in given:
        out = build.call(aten.add.Tensor, out, given["bias"])
    return [build.cast(out, result), both.mean, scale]


def _over_last_backward(call: Call) -> Iterator[Strategy]:
    lead, affine = _leading(call), len(call.result) - 1
    for dim in range(lead):
        ins = call.placed(**dict.fromkeys(["grad_out", "input", "mean", "rstd"], Shard(dim)))
        yield Strategy(ins, present(call, Shard(dim), *[Partial()] * affine))
    if affine == 2:
        for dim in range(len(call.argument("normalized_shape"))):
            here, there = Shard(lead + dim), Shard(dim)
            ins = call.placed(grad_out=here, input=here, weight=there, bias=there)
            yield Strategy(ins, present(call, here, there, there), _layer_norm_backward)
    yield from linear_strategies(call, [(0,)])


def _layer_norm_backward(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    given, lead = call.by_name(ins), _leading(call)
    work = info(given["rstd"]).value.dtype
    grad, x, scale = (build.cast(given[name], work) for name in ("grad_out", "input", "rstd"))
    dims, count = list(range(lead, info(x).value.dim())), math.prod(call.argument("normalized_shape"))
    x = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, x, given["mean"]), scale)
    inner = build.call(aten.mul.Tensor, grad, given["weight"]) if "weight" in given else grad
    products = (build.call(aten.mul.Tensor, inner, x), inner)
    sums = [build.call(aten.sum.dim_IntList, one, dims, True) for one in products]
    both = build.call(aten.div.Scalar, build.all_reduce(build.call(aten.stack.default, sums)), count)
    of_x, of_one = (build.call(aten.select.int, both, 0, i) for i in range(2))
    inner = build.call(aten.sub.Tensor, inner, build.call(aten.mul.Tensor, x, of_x))
    inner = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, inner, of_one), scale)

    def over_rest(node: fx.Node) -> fx.Node:
        return build.call(aten.sum.dim_IntList, node, list(range(lead))) if lead else node

    found = chosen(call, inner, over_rest(build.call(aten.mul.Tensor, grad, x)), over_rest(grad))
    return [build.cast(one, value.dtype) for one, value in zip(found, call.results, strict=True)]


# Over groups of channels -------------------------------------------------------------------------------------------


def _groups(call: Call) -> Iterator[Strategy]:
    first = (Shard(0), Shard(0), Shard(0))
    yield Strategy(call.placed(input=Shard(0)), first, _with_local_sizes)
    if int(call.argument("group")) % call.group.size == 0:
        ins = call.placed(input=Shard(1), weight=Shard(0), bias=Shard(0))
        yield Strategy(ins, (Shard(1), Shard(1), Shard(1)), _with_local_sizes)


def _groups_backward(call: Call) -> Iterator[Strategy]:
    ins = call.placed(**dict.fromkeys(["grad_out", "input", "mean", "rstd"], Shard(0)))
    yield Strategy(ins, present(call, Shard(0), Partial(), Partial()), _with_local_sizes)
    if int(call.argument("group")) % call.group.size == 0:
        ins = call.placed(**dict.fromkeys(["grad_out", "input", "mean", "rstd"], Shard(1)), weight=Shard(0))
        yield Strategy(ins, present(call, Shard(1), Shard(0), Shard(0)), _with_local_sizes)
    yield from linear_strategies(call, [(0,)])


def _with_local_sizes(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    here = info(call.by_name(ins)["input"]).value
    channels = int(call.argument("C"))
    groups = int(call.argument("group")) * here.shape[1] // channels
    made = build.same(call, ins, N=here.shape[0], C=here.shape[1], group=groups)
    return [build.pick(made, i) for i, value in enumerate(info(made).value) if isinstance(value, torch.Tensor)]


# Over all but the channels ------------------------------------------------------------------------------------------


def _batch_norm(call: Call) -> Iterator[Strategy]:
    whole, outs = call.values[0].shape, len(call.results)
    channels = dict.fromkeys(["weight", "bias", "running_mean", "running_var"], Shard(0))
    saved: Placement = Shard(0) if call.results[1].numel() else R
    if holds_on_all(call, whole[1]):
        yield Strategy(call.placed(input=Shard(1), **channels), (Shard(1), saved, saved, *[Shard(0)] * (outs - 3)))
    trains = bool(call.argument("training"))
    for dim in (dim for dim in range(len(whole)) if dim != 1):
        if trains or holds_on_all(call, whole[dim]):
            emit = _batch_norm_of_all if trains else None
            yield Strategy(call.placed(input=Shard(dim)), (Shard(dim), *[R] * (outs - 1)), emit)


def _batch_norm_of_all(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    """Statistics of the whole batch; running ones are moved by them, the variance without bias."""
    given, x = call.by_name(ins), call.by_name(ins)["input"]
    whole, work = call.by_name(call.values)["input"].shape, call.results[1].dtype
    dims = [dim for dim in range(len(whole)) if dim != 1]
    both = moments(build, call, build.cast(x, work), dims, math.prod(whole[dim] for dim in dims))
    eps, result = float(call.argument("eps")), info(x).value.dtype
    variance = build.call(aten.div.Scalar, both.squares, both.count)
    scale = build.call(aten.rsqrt.default, build.call(aten.add.Scalar, variance, eps))
    out = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, x, both.mean), scale)
    along = [1, whole[1], *[1] * (len(whole) - 2)]
    for name, operation in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if name in given:
            out = build.call(operation, out, build.call(aten.view.default, given[name], along))
    mean, scale = (build.call(aten.view.default, one, [whole[1]]) for one in (both.mean, scale))
    found = [build.cast(out, result), mean, scale]
    unbiased = build.call(aten.div.Scalar, build.call(aten.view.default, both.squares, [whole[1]]), both.count - 1)
    for name, new in (("running_mean", mean), ("running_var", unbiased)):
        if name in given:
            found.append(_moved(build, given[name], new, build.number(call.argument("momentum"))))
    return found


def _moved(build: Build, old: fx.Node, new: fx.Node, momentum: object) -> fx.Node:
    change = build.call(aten.sub.Tensor, new, old)
    return build.call(aten.add.Tensor, old, build.call(aten.mul.Tensor, change, momentum))


def _batch_norm_backward(call: Call) -> Iterator[Strategy]:
    whole = call.values[0].shape
    channels = ["weight", "running_mean", "running_var", *[n for n in ("save_mean", "save_invstd") if _has(call, n)]]
    ins = call.placed(grad_out=Shard(1), input=Shard(1), **dict.fromkeys(channels, Shard(0)))
    if holds_on_all(call, whole[1]):
        yield Strategy(ins, present(call, Shard(1), Shard(0), Shard(0)))
    trains = bool(call.argument("train"))
    for dim in (dim for dim in range(len(whole)) if dim != 1 and (trains or holds_on_all(call, whole[dim]))):
        affine: Placement = R if trains else Partial()
        outs = present(call, Shard(dim), affine, affine)
        ins = call.placed(grad_out=Shard(dim), input=Shard(dim))
        yield Strategy(ins, outs, _batch_norm_backward_of_all if trains else None)
    yield from linear_strategies(call, [(0,)])


def _has(call: Call, name: str) -> bool:
    """In evaluation the saved statistics are empty."""
    values = call.by_name(call.values)
    return name in values and values[name].numel() > 0


def _batch_norm_backward_of_all(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    given = call.by_name(ins)
    whole = call.by_name(call.values)["input"].shape
    dims, along = [dim for dim in range(len(whole)) if dim != 1], [1, whole[1], *[1] * (len(whole) - 2)]
    count, work = math.prod(whole[dim] for dim in dims), info(given["save_mean"]).value.dtype
    mean, scale = (build.call(aten.view.default, given[name], along) for name in ("save_mean", "save_invstd"))
    grad = build.cast(given["grad_out"], work)
    x = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, given["input"], mean), scale)
    sums = [build.call(aten.sum.dim_IntList, one, dims, True) for one in (build.call(aten.mul.Tensor, grad, x), grad)]
    both = build.all_reduce(build.call(aten.stack.default, sums))
    of_weight, of_bias = (build.call(aten.select.int, both, 0, i) for i in range(2))
    share = build.call(aten.add.Tensor, build.call(aten.mul.Tensor, x, of_weight), of_bias)
    inner = build.call(aten.sub.Tensor, grad, build.call(aten.div.Scalar, share, count))
    if "weight" in given:
        scale = build.call(aten.mul.Tensor, scale, build.call(aten.view.default, given["weight"], along))
    inner = build.call(aten.mul.Tensor, inner, scale)
    flat = [build.call(aten.view.default, one, [whole[1]]) for one in (of_weight, of_bias)]
    found = chosen(call, inner, *flat)
    return [build.cast(one, value.dtype) for one, value in zip(found, call.results, strict=True)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.native_layer_norm", "aten._fused_rms_norm"], _over_last),
    **dict.fromkeys(["aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"], _over_last_backward),
    "aten.native_group_norm": _groups,
    "aten.native_group_norm_backward": _groups_backward,
    **dict.fromkeys(["functional(aten.native_batch_norm)", "aten.native_batch_norm"], _batch_norm),
    "aten.native_batch_norm_backward": _batch_norm_backward,
}
