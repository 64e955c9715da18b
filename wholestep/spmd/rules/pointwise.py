"""Element by element: each dimension can be split, and what is linear passes addends on."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.strategy import Dims, Rule, Strategy, alphabet, linear, linear_strategies, trailing
from wholestep.spmd.placements import Partial, Shard


def pointwise(call: Call) -> Iterator[Strategy]:
    """Operands are broadcast to the result's shape."""
    like = call.results[0]
    letters = alphabet(like.dim())
    ins = [trailing(value, letters, like.shape) for value in call.values]
    yield from Dims(ins, [letters] * len(call.results)).strategies(call)


def _quotient(call: Call) -> Iterator[Strategy]:
    yield from pointwise(call)
    if call.argument("rounding_mode") is None:
        yield from linear_strategies(call, [(0,)])


def _masked(call: Call) -> Iterator[Strategy]:
    """Filled with zeros, addends stay such."""
    yield from pointwise(call)
    if call.argument("value") == 0:
        yield from linear_strategies(call, [(0,)])


def unread(call: Call) -> Iterator[Strategy]:
    """What is made in the shape of an operand whose elements are not read, or in another one."""
    value = call.values[0]
    alike = call.results[0].shape == value.shape
    for dim in range(value.dim()):
        yield Strategy((Shard(dim), *[R] * (len(call.values) - 1)), (Shard(dim) if alike else R,))
    yield Strategy((Partial(), *[R] * (len(call.values) - 1)), (R,))


def _unread_whole(call: Call) -> Iterator[Strategy]:
    """What has strides of its own, and no element yet."""
    for dim in range(call.values[0].dim()):
        yield Strategy((Shard(dim),), (R,))
    yield Strategy((Partial(),), (R,))


def _copied(call: Call) -> Iterator[Strategy]:
    """`copy`: the second operand in the shape of the first, which is not read."""
    yield from pointwise(call)
    for first in (R, Partial()):
        yield Strategy((first, Partial()), (Partial(),))
        yield Strategy((first, R), (R,))


def _with_buffer(call: Call) -> Iterator[Strategy]:
    """Beside the tensors of one shape there is one that the kernel may leave empty."""
    like = call.values[0]
    for dim in range(like.dim()):
        ins, outs = (tuple(Shard(dim) if one.shape == like.shape else R for one in side)
                     for side in (call.values, call.results))  # fmt: skip
        yield Strategy(ins, outs)


# Gradients of these are linear in the result's.
_SLOPES = ["tanh", "sigmoid", "threshold", "gelu", "silu", "elu", "softplus", "leaky_relu", "hardtanh", "hardswish",
           "hardsigmoid", "hardshrink", "softshrink", "mish", "logit"]  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.add", "aten.sub", "aten._foreach_add", "aten._foreach_sub"], linear(pointwise, (0, 1))),
    **dict.fromkeys(["aten.mul", "aten._foreach_mul"], linear(pointwise, (0,), (1,))),
    **dict.fromkeys(["aten.div", "aten._foreach_div"], _quotient),
    **dict.fromkeys(
        [
            "aten.neg",
            "aten.clone",
            "aten.alias",
            "aten.detach",
            "aten._to_copy",
            "aten.positive",
            "aten.real",
            "aten.imag",
            "aten.conj",
            "aten._conj",
        ],
        linear(pointwise),
    ),
    "aten.where": linear(pointwise, (1, 2)),
    "aten.lerp": linear(pointwise, (0, 1)),
    **dict.fromkeys([f"aten.{name}_backward" for name in _SLOPES], linear(pointwise)),
    **dict.fromkeys(["aten.log_sigmoid_forward", "aten.log_sigmoid_backward"], _with_buffer),
    **dict.fromkeys(["aten._prelu_kernel", "aten._prelu_kernel_backward", "aten.hardswish"], pointwise),
    "aten.native_dropout_backward": linear(pointwise),
    "aten.masked_fill": _masked,
    "aten.copy": _copied,
    **dict.fromkeys([f"aten.{name}_like" for name in ("empty", "full", "ones", "zeros")], unread),
    **dict.fromkeys([f"aten.new_{name}" for name in ("empty", "full", "ones", "zeros")], unread),
    "aten.new_empty_strided": _unread_whole,
    "aten.fill": unread,
    # pointwise, though torch does not tag them so
    **dict.fromkeys(
        [
            "aten.leaky_relu",  # tagged since torch 2.12
            "aten.lift_fresh_copy",
        ],
        pointwise,
    ),
}
