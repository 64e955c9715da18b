"""Normalisation layers and their gradients, over sharded dimensions too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, holds_on_all
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Build, Decomposed, Rule, Strategy, linear
from wholestep.spmd.placements import Partial, Placement, Shard

aten = torch.ops.aten


def present(call: Call, *placements: Placement) -> tuple[Placement, ...]:
    """Placements of those gradients that are asked for."""
    return tuple(p for p, value in zip(placements, call.result, strict=True) if isinstance(value, torch.Tensor))


# Over the last dimensions: layer norm, root mean square norm --------------------------------------------------------


def _leading(call: Call) -> int:
    """How many dimensions are not normalised over."""
    return call.by_name(call.values)["input"].dim() - len(call.argument("normalized_shape"))


def _over_last(call: Call) -> Iterator[Strategy]:
    lead, count = _leading(call), len(call.results)
    for dim in range(lead):
        yield Strategy(call.placed(input=Shard(dim)), (Shard(dim),) * count)
    if count == 3 and can_decompose(call):
        for dim in range(len(call.argument("normalized_shape"))):
            ins = call.placed(input=Shard(lead + dim), weight=Shard(dim), bias=Shard(dim))
            yield Strategy(ins, (Shard(lead + dim), R, R), Decomposed())


def _over_last_backward(call: Call) -> Iterator[Strategy]:
    lead, affine = _leading(call), len(call.result) - 1
    for dim in range(lead):
        ins = call.placed(**dict.fromkeys(["grad_out", "input", "mean", "rstd"], Shard(dim)))
        yield Strategy(ins, present(call, Shard(dim), *[Partial()] * affine))
    if affine == 2 and can_decompose(call):
        for dim in range(len(call.argument("normalized_shape"))):
            here, there = Shard(lead + dim), Shard(dim)
            ins = call.placed(grad_out=here, input=here, weight=there, bias=there)
            yield Strategy(ins, present(call, here, there, there), Decomposed())


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


def _with_local_sizes(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    here = info(call.by_name(ins)["input"]).value
    channels = int(call.argument("C"))
    groups = int(call.argument("group")) * here.shape[1] // channels
    made = build.same(call, ins, N=here.shape[0], C=here.shape[1], group=groups)
    return build.picks(made)


# Over all but the channels ------------------------------------------------------------------------------------------


def _batch_norm(call: Call) -> Iterator[Strategy]:
    whole, outs = call.values[0].shape, len(call.results)
    channels = dict.fromkeys(["weight", "bias", "running_mean", "running_var"], Shard(0))
    saved: Placement = Shard(0) if call.results[1].numel() else R
    if holds_on_all(call, whole[1]):
        yield Strategy(call.placed(input=Shard(1), **channels), (Shard(1), saved, saved, *[Shard(0)] * (outs - 3)))
    trains = bool(call.argument("training"))
    for dim in (dim for dim in range(len(whole)) if dim != 1):
        if can_decompose(call) if trains else holds_on_all(call, whole[dim]):
            emit = Decomposed() if trains else None
            yield Strategy(call.placed(input=Shard(dim)), (Shard(dim), *[R] * (outs - 1)), emit)


def _batch_norm_backward(call: Call) -> Iterator[Strategy]:
    whole = call.values[0].shape
    channels = ["weight", "running_mean", "running_var", *[n for n in ("save_mean", "save_invstd") if _has(call, n)]]
    ins = call.placed(grad_out=Shard(1), input=Shard(1), **dict.fromkeys(channels, Shard(0)))
    if holds_on_all(call, whole[1]):
        yield Strategy(ins, present(call, Shard(1), Shard(0), Shard(0)))
    trains = bool(call.argument("train"))
    for dim in (dim for dim in range(len(whole)) if dim != 1):
        if can_decompose(call) if trains else holds_on_all(call, whole[dim]):
            affine: Placement = R if trains else Partial()
            outs = present(call, Shard(dim), affine, affine)
            ins = call.placed(grad_out=Shard(dim), input=Shard(dim))
            yield Strategy(ins, outs, Decomposed() if trains else None)


def _has(call: Call, name: str) -> bool:
    """In evaluation the saved statistics are empty."""
    values = call.by_name(call.values)
    return name in values and values[name].numel() > 0


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.native_layer_norm", "aten._fused_rms_norm"], _over_last),
    **dict.fromkeys(["aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"], linear(_over_last_backward)),
    "aten.native_group_norm": _groups,
    "aten.native_group_norm_backward": linear(_groups_backward),
    **dict.fromkeys(["functional(aten.native_batch_norm)", "aten.native_batch_norm"], _batch_norm),
    "aten.native_batch_norm_backward": linear(_batch_norm_backward),
}
