"""Convolutions, pooling and resampling. Space is not split: what reads a neighbourhood needs it whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    nonempty,
)
from wholestep.spmd.placements import Partial, Shard
from wholestep.spmd.rules.norm_layers import present


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

    def rule(call: Call) -> Iterator[Strategy]:
        names: Names = [*alphabet(call.values[0].dim() - count), *[None] * count]
        yield from Dims([names] * len(call.values), [names] * len(call.results)).strategies(call)

    return nonempty(rule)


def _first(call: Call) -> Iterator[Strategy]:
    """By the samples of a batch, which are dimension 0 of each operand and result."""
    yield Strategy((Shard(0),) * len(call.values), (Shard(0),) * len(call.results))


_KINDS = ["avg_pool", "_adaptive_avg_pool", "reflection_pad", "replication_pad", "upsample_nearest",
          "_upsample_nearest_exact", "upsample_linear", "upsample_bilinear", "upsample_trilinear",
          "upsample_bicubic"]  # fmt: skip
_MAXIMA = ["max_pool{}d_with_indices", "adaptive_max_pool{}d", "fractional_max_pool{}d"]  # in one dimension as in two
_ON, _LINEAR_ON = {n: planes(n) for n in (1, 2, 3)}, {n: linear(planes(n)) for n in (1, 2, 3)}

RULES: dict[str, Rule] = {
    "aten.convolution": nonempty(_convolution),
    "aten.convolution_backward": linear(nonempty(_convolution_backward)),
    **{f"aten.{kind}{n}d{end}": _LINEAR_ON[n] for kind in _KINDS for n in (1, 2, 3) for end in ("", "_backward")},
    **{f"aten.{kind.format(n)}": _ON[n] for kind in _MAXIMA for n in (2, 3)},
    **{f"aten.{kind.format(n)}_backward": _LINEAR_ON[n] for kind in _MAXIMA for n in (2, 3)},
    **{f"aten._upsample_{k}2d_aa{end}": _LINEAR_ON[2] for k in ("bilinear", "bicubic") for end in ("", "_backward")},
    **dict.fromkeys(["aten.pixel_shuffle", "aten.pixel_unshuffle"], _LINEAR_ON[3]),
    **dict.fromkeys(["aten.im2col", "aten.col2im", "aten.grid_sampler_2d", "aten.grid_sampler_3d"], nonempty(_first)),
}
