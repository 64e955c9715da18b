"""Losses: a mean over split elements is the sum of what each rank's add to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.strategy import Build, Decomposed, Dims, Rule, Strategy, alphabet, linear, trailing
from wholestep.spmd.placements import Partial, Placement, Shard
from wholestep.spmd.rules.indexing import own

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # values of `reduction`


# Of classes: negative log likelihood -------------------------------------------------------------------------------


def _samples(call: Call) -> Iterator[tuple[Shard, Shard]]:
    """The dimensions that are not of classes: of the input, and of the target."""
    count = call.by_name(call.values)["self"].dim()
    if count > 1:
        yield from ((Shard(dim), Shard(dim - (dim > 1))) for dim in range(count) if dim != 1)


def _classes(call: Call) -> Shard:
    return Shard(min(1, call.by_name(call.values)["self"].dim() - 1))


def _nll(call: Call) -> Iterator[Strategy]:
    reduction = call.argument("reduction")
    weight: Placement = Partial() if reduction == SUM else R
    for x, target in _samples(call):
        loss = target if reduction == NONE else Partial()
        yield Strategy(call.placed(self=x, target=target), (loss, weight), Decomposed())
    yield Strategy(call.placed(self=_classes(call), weight=Shard(0)), (Partial(), weight), Decomposed())


def _nll_backward_of_classes(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    """Of the target among this rank's classes; all others are ignored."""
    given, ignored = call.by_name(ins), int(call.argument("ignore_index"))
    whole = call.by_name(call.values)["self"]
    local, others = own(build, given["target"], whole.shape[_classes(call).dim])
    others = build.call(aten.logical_or.default, others, build.call(aten.eq.Scalar, given["target"], ignored))
    local = build.call(aten.masked_fill.Scalar, local, others, -100)
    return [build.same(call, ins, target=local, ignore_index=-100)]


def _nll_backward(call: Call) -> Iterator[Strategy]:
    reduction = call.argument("reduction")
    unread: list[Placement] = [R, Partial()]
    for weight in unread if reduction == SUM else [R]:
        for x, target in _samples(call):
            grad = target if reduction == NONE else R
            yield Strategy(call.placed(grad_output=grad, self=x, target=target, total_weight=weight), (x,))
        ins = call.placed(self=_classes(call), weight=Shard(0), total_weight=weight)
        yield Strategy(ins, (_classes(call),), _nll_backward_of_classes)


# Of elements ------------------------------------------------------------------------------------------------------


def _elementwise(call: Call) -> Iterator[Strategy]:
    """Losses and their gradients."""
    values, reduction = call.by_name(call.values), call.argument("reduction")
    whole = [name for name in ("self", "target", "weight", "pos_weight") if name in values]
    shape = torch.broadcast_shapes(*[values[name].shape for name in whole])
    letters, emit = alphabet(len(shape)), Decomposed() if reduction == MEAN else None
    ins = [trailing(value, letters, shape) for value in call.values]
    if reduction == NONE or "grad_output" in values:
        yield from Dims(ins, [letters], emit=emit).strategies(call)
    else:
        yield from Dims(ins, [[]], dict.fromkeys(letters, "sum"), emit=emit).strategies(call)


_ELEMENTWISE = ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"]

RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.nll_loss_forward", "aten.nll_loss2d_forward"], _nll),
    **dict.fromkeys(["aten.nll_loss_backward", "aten.nll_loss2d_backward"], linear(_nll_backward)),
    **{f"aten.{name}": _elementwise for name in [*_ELEMENTWISE, "binary_cross_entropy_with_logits"]},
    **dict.fromkeys([f"aten.{name}_backward" for name in _ELEMENTWISE], linear(_elementwise)),
}
