"""Normalisation layers and their gradients, over sharded dimensions too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.decompositions import can_decompose
from wholestep.spmd.expand.strategy import Build, Decomposed, Rule, Strategy, linear, nonempty
from wholestep.spmd.placements import Partial, Placement, Shard

aten = torch.ops.aten


def present(call: Call, *placements: Placement) -> tuple[Placement, ...]:
    """Placements of those results that are tensors: of gradients those that are asked for."""
    return tuple(p for p, value in zip(placements, call.result, strict=True) if isinstance(value, torch.Tensor))


_OF_SAMPLES = ["grad_out", "input", "mean", "rstd"]
_OF_CHANNELS = ["weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"]


def _over_last(call: Call) -> Iterator[Strategy]:
    """Layer norm, root mean square norm, and gradients: by other dimensions, and over split ones by other calls."""
    values, shape, backward = call.by_name(call.values), call.argument("normalized_shape"), _is_backward(call)
    lead = values["input"].dim() - len(shape)
    for dim in range(lead):
        affine: Placement = Partial() if backward else Shard(dim)
        ins = call.placed(**dict.fromkeys(_OF_SAMPLES, Shard(dim)))
        yield Strategy(ins, present(call, Shard(dim), *[affine] * (len(call.result) - 1)))
    if len(call.result) == 3 and can_decompose(call):
        for dim in range(len(shape)):
            here, there = Shard(lead + dim), Shard(dim)
            ins = call.placed(grad_out=here, input=here, weight=there, bias=there)
            yield Strategy(ins, present(call, here, *[there if backward else R] * 2), Decomposed())


def _is_backward(call: Call) -> bool:
    return "grad_out" in call.by_name(call.values)


def _groups(call: Call) -> Iterator[Strategy]:
    """Group norm and its gradient: by samples, and by groups of channels."""
    for dim in (0, 1) if int(call.argument("group")) % call.group.size == 0 else (0,):
        channels = dict.fromkeys(_OF_CHANNELS, Shard(0)) if dim else {}
        ins = call.placed(**dict.fromkeys(_OF_SAMPLES, Shard(dim)), **channels)
        rest = (Shard(0) if dim else Partial()) if _is_backward(call) else Shard(dim)
        yield Strategy(ins, present(call, Shard(dim), rest, rest), _with_local_sizes)


def _with_local_sizes(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    here = info(call.by_name(ins)["input"]).value
    channels = int(call.argument("C"))
    groups = int(call.argument("group")) * here.shape[1] // channels
    made = build.same(call, ins, N=here.shape[0], C=here.shape[1], group=groups)
    return build.picks(made)


def _batch_norm(call: Call) -> Iterator[Strategy]:
    """Batch norm and its gradient: by channels, and over split dimensions by other calls where it trains."""
    values, backward = call.by_name(call.values), _is_backward(call)
    whole, trains = values["input"].shape, bool(call.argument("train" if backward else "training"))
    count = len(call.result) - 1
    # in evaluation saved ones are empty
    some = [name for name in _OF_CHANNELS if name in values and values[name].numel()]
    ins = call.placed(grad_out=Shard(1), input=Shard(1), **dict.fromkeys(some, Shard(0)))
    saved = Shard(0) if backward or call.results[1].numel() else R
    yield Strategy(ins, present(call, Shard(1), *([saved] * 2 + [Shard(0)] * count)[:count]))
    for dim in (dim for dim in range(len(whole)) if dim != 1):
        if not trains or can_decompose(call):
            rest = Partial() if backward and not trains else R
            ins = call.placed(grad_out=Shard(dim), input=Shard(dim))
            yield Strategy(ins, present(call, Shard(dim), *[rest] * count), Decomposed() if trains else None)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.native_layer_norm", "aten._fused_rms_norm"], _over_last),
    **dict.fromkeys(["aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"], linear(_over_last)),
    "aten.native_group_norm": _groups,
    "aten.native_group_norm_backward": linear(_groups),
    **dict.fromkeys(["functional(aten.native_batch_norm)", "aten.native_batch_norm"], nonempty(_batch_norm)),
    "aten.native_batch_norm_backward": linear(nonempty(_batch_norm)),
}
