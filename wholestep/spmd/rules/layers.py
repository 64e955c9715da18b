"""Layers and their gradients: normalisation over sharded dimensions too, convolutions, attention, recurrent layers.

Of convolutions, pooling and resampling, space is not split: what reads a neighbourhood needs it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, can_decompose
from wholestep.spmd.expand.strategy import (
    Build,
    Decomposed,
    Dims,
    Names,
    Rule,
    Strategy,
    beside,
    linear,
    linear_strategies,
    trailing,
)
from wholestep.spmd.placements import Opaque, Partial, Placement, Shard

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
    **dict.fromkeys(["functional(aten.native_batch_norm)", "aten.native_batch_norm"], _batch_norm),
    "aten.native_batch_norm_backward": linear(_batch_norm),
}


def _sides(call: Call) -> tuple[Shard, Shard, int]:
    """The weight's dimensions of channels that come and that go; and the groups, when these can be shared out."""
    come, go = (Shard(0), Shard(1)) if call.argument("transposed") else (Shard(1), Shard(0))
    return come, go, int(call.argument("groups"))


def _convolution(call: Call) -> Iterator[Strategy]:
    come, go, groups = _sides(call)
    yield Strategy(call.placed(input=Shard(0)), (Shard(0),))
    if groups == 1:
        yield Strategy(call.placed(input=Shard(1), weight=come, bias=Partial()), (Partial(),))
        yield Strategy(call.placed(weight=go, bias=Shard(0)), (Shard(1),))
    elif groups % call.group.size == 0:
        yield Strategy(call.placed(input=Shard(1), weight=Shard(0), bias=Shard(0)), (Shard(1),), _some_groups)
    has_bias = len(call.values) == 3
    yield from linear_strategies(call, [(0, 2), (1, 2)] if has_bias else [(0,), (1,)])


def _some_groups(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    return [build.same(call, ins, groups=int(call.argument("groups")) // call.group.size)]


def _convolution_backward(call: Call) -> Iterator[Strategy]:
    come, go, groups = _sides(call)
    yield Strategy(call.placed(grad_output=Shard(0), input=Shard(0)), present(call, Shard(0), Partial(), Partial()))
    if groups == 1:
        outs = present(call, Partial(), go, Shard(0))
        yield Strategy(call.placed(grad_output=Shard(1), weight=go), outs, _backward_of_some)
        yield Strategy(call.placed(input=Shard(1), weight=come), present(call, Shard(1), come, R))
    elif groups % call.group.size == 0:
        ins = call.placed(grad_output=Shard(1), input=Shard(1), weight=Shard(0))
        yield Strategy(ins, present(call, Shard(1), Shard(0), Shard(0)), _backward_of_some)


def _backward_of_some(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    """Of some of the channels that go."""
    groups = int(call.argument("groups"))
    sizes = None if call.argument("bias_sizes") is None else [info(ins[0]).value.shape[1]]
    some = groups if groups == 1 else groups // call.group.size
    made = build.same(call, ins, bias_sizes=sizes, groups=some)
    return build.picks(made)


def planes(count: int) -> Rule:
    """Works on the last dimensions of each operand; those before can be split."""
    return lambda call: beside(call, *range(-count, 0))


def _first(call: Call) -> Iterator[Strategy]:
    """By the samples of a batch, which are dimension 0 of each operand and result."""
    yield Strategy((Shard(0),) * len(call.values), (Shard(0),) * len(call.results))


_KINDS = ["avg_pool", "_adaptive_avg_pool", "reflection_pad", "replication_pad", "upsample_nearest",
          "_upsample_nearest_exact", "upsample_linear", "upsample_bilinear", "upsample_trilinear",
          "upsample_bicubic"]  # fmt: skip
_MAXIMA = ["max_pool{}d_with_indices", "adaptive_max_pool{}d", "fractional_max_pool{}d"]  # in one dimension as in two
_ON, _LINEAR_ON = {n: planes(n) for n in (1, 2, 3)}, {n: linear(planes(n)) for n in (1, 2, 3)}

RULES |= {
    "aten.convolution": _convolution,
    "aten.convolution_backward": linear(_convolution_backward),
    **{f"aten.{kind}{n}d{end}": _LINEAR_ON[n] for kind in _KINDS for n in (1, 2, 3) for end in ("", "_backward")},
    **{f"aten.{kind.format(n)}": _ON[n] for kind in _MAXIMA for n in (2, 3)},
    **{f"aten.{kind.format(n)}_backward": _LINEAR_ON[n] for kind in _MAXIMA for n in (2, 3)},
    **{f"aten._upsample_{k}2d_aa{end}": _LINEAR_ON[2] for k in ("bilinear", "bicubic") for end in ("", "_backward")},
    **dict.fromkeys(["aten.pixel_shuffle", "aten.pixel_unshuffle"], _LINEAR_ON[3]),
    **dict.fromkeys(["aten.im2col", "aten.col2im", "aten.grid_sampler_2d", "aten.grid_sampler_3d"], _first),
}


_ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
_ON_CUDA = [f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]


def _names(call: Call, t: str | None) -> dict[str, Names]:
    """Names for the dimensions of each argument: batch b, heads h, queries t; keys and sizes are not split."""
    values = call.by_name(call.values)
    query, keys = values["query"], values["key"].shape[2]
    ours, theirs = ["b", "h", t, None], ["b", "h", None, None]
    found: dict[str, Names] = {name: [None] * value.dim() for name, value in values.items()}
    found |= {"query": ours, "out": ours, "grad_out": ours, "grad_out_": ours, "key": theirs, "value": theirs}
    for name in ("attn_mask", "attn_bias"):
        if name in values:
            found[name] = trailing(values[name], ours, [*query.shape[:3], keys])
    sums = values["logsumexp"] if "logsumexp" in values else call.results[1]
    return found | {"logsumexp": ["b", "h", t, None][: sums.dim()]}


def _attention(call: Call, by_queries: bool = False) -> Iterator[Strategy]:
    """Forward and backward. Heads of keys may be fewer: each serves some heads of queries, and goes with them.

    Args:
        by_queries: whether queries can be split, of kernels that are not told how many there are.
    """
    if call.argument("dropout_p"):  # what is drawn follows from the place in the whole
        return
    # which keys a query sees is a matter of its place
    values, t = call.by_name(call.values), "t" if by_queries and not call.argument("is_causal") else None
    names = _names(call, t)
    results = ["query", "key", "value", "attn_bias"] if "out" in values else ["query", "logsumexp"]
    outs = [names[name] for name, _ in zip(results, call.results, strict=False)]
    rest = (R,) * (len(call.results) - len(outs))  # seeds, which nothing is drawn by, and what is empty
    dims = Dims([names[name] for name in values], outs, dict.fromkeys("bht", "sum"))
    found = list(dims.strategies(replace(call, result=call.results[: len(outs)])))
    few, by_heads = values["key"].shape[1], dims.strategy("h")
    if few != values["query"].shape[1] and few % call.group.size == 0 and by_heads is not None:
        found.append(by_heads)
    yield from (replace(one, outs=(*one.outs, *rest)) for one in found)


_KERNELS: dict[str, Rule] = {_ON_CPU: partial(_attention, by_queries=True), **dict.fromkeys(_ON_CUDA, _attention)}

RULES |= {**_KERNELS, **{f"{kernel}_backward": linear(rule) for kernel, rule in _KERNELS.items()}}


_SEQUENCES = ["input", "output", "grad_output"]  # [time, batch, features], whatever `batch_first` says
_STATES = ["hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"]  # [batch, features]


def _layer(call: Call) -> Iterator[Strategy]:
    """Forward and backward."""
    ins = call.placed(**dict.fromkeys(_SEQUENCES, Shard(1)), **dict.fromkeys(_STATES, Shard(0)), workspace=Opaque())
    weights: list[Placement] = [Partial()] * 4 if "grad_output" in call.by_name(ins) else []
    last = (Shard(0), Shard(0)) if weights else (Shard(0), Shard(0), Opaque())
    yield Strategy(ins, (Shard(1), *weights, *last))


RULES |= dict.fromkeys(
    ["aten.mkldnn_rnn_layer", "under_grad(aten.mkldnn_rnn_layer)", "aten.mkldnn_rnn_layer_backward"], _layer
)
