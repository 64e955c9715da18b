"""Element by element: each dimension can be split, and what is linear passes addends on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.strategy import Dims, Rule, Strategy, alphabet, linear, trailing
from wholestep.spmd.placements import Partial, Shard


def pointwise(call: Call) -> Iterator[Strategy]:
    """Operands are broadcast to the result's shape."""
    like = call.results[0]
    letters = alphabet(like.dim())
    ins = [trailing(value, letters, like.shape) for value in call.values]
    yield from Dims(ins, [letters] * len(call.results)).strategies(call)


def unread(call: Call, keeps: bool = True) -> Iterator[Strategy]:
    """What is made in the shape of an operand whose elements are not read, or, without ``keeps``, of given strides."""
    value, others = call.values[0], [R] * (len(call.values) - 1)
    alike = keeps and call.results[0].shape == value.shape
    for dim in range(value.dim()):
        yield Strategy((Shard(dim), *others), (Shard(dim) if alike else R,))
    yield Strategy((Partial(), *others), (R,))


def _copied(call: Call) -> Iterator[Strategy]:
    """`copy`: the second operand in the shape of the first, which is not read."""
    yield from pointwise(call)
    for first in (R, Partial()):
        yield Strategy((first, Partial()), (Partial(),))
        yield Strategy((first, R), (R,))


def _beside_others(call: Call) -> Iterator[Strategy]:
    """Beside the tensors of one shape there are others: one that a kernel may leave empty, or a count of steps."""
    like = call.values[0]
    for dim in range(like.dim()):
        ins, outs = (tuple(Shard(dim) if one.shape == like.shape else R for one in side)
                     for side in (call.values, call.results))  # fmt: skip
        yield Strategy(ins, outs)


# Gradients of these are linear in the result's.
_SLOPES = ["tanh", "sigmoid", "threshold", "gelu", "silu", "elu", "softplus", "leaky_relu", "hardtanh", "hardswish",
           "hardsigmoid", "hardshrink", "softshrink", "mish", "logit"]  # fmt: skip

_LINEAR = ["neg", "clone", "alias", "detach", "_to_copy", "positive", "real", "imag", "conj", "_conj"]
_FILLED = ["empty", "full", "ones", "zeros"]

RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.add", "aten.sub", "aten._foreach_add", "aten._foreach_sub"], linear(pointwise, (0, 1))),
    **dict.fromkeys(["aten.mul", "aten._foreach_mul"], linear(pointwise, (0,), (1,))),
    **dict.fromkeys(["aten.div", "aten._foreach_div"],
                    linear(pointwise, when=lambda call: call.argument("rounding_mode") is None)),
    **dict.fromkeys([f"aten.{name}" for name in _LINEAR], linear(pointwise)),
    "aten.where": linear(pointwise, (1, 2)),
    "aten.lerp": linear(pointwise, (0, 1)),
    **dict.fromkeys([f"aten.{name}_backward" for name in _SLOPES], linear(pointwise)),
    **dict.fromkeys(["aten.log_sigmoid_forward", "aten.log_sigmoid_backward", "aten._fused_adagrad"], _beside_others),
    **dict.fromkeys(["aten._prelu_kernel", "aten._prelu_kernel_backward", "aten.hardswish"], pointwise),
    "aten.native_dropout_backward": linear(pointwise),
    "aten.masked_fill": linear(pointwise, when=lambda call: bool(call.argument("value") == 0)),  # addends stay such
    "aten.copy": _copied,
    **dict.fromkeys([f"aten.{name}_like" for name in _FILLED], unread),
    **dict.fromkeys([f"aten.new_{name}" for name in _FILLED], unread),
    "aten.new_empty_strided": partial(unread, keeps=False),
    "aten.fill": unread,
    # pointwise, though torch does not tag them so; the first is tagged since torch 2.12
    **dict.fromkeys(["aten.leaky_relu", "aten.lift_fresh_copy"], pointwise),
}  # fmt: skip
