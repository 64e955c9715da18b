"""Elementwise operators, on lists too: any dimension can be split, and linear ones pass partial sums on.

Random operators: every rank draws for the whole tensor and keeps its part, as one device would have drawn it. All
ranks' generators are in one state when a step starts, and stay so: each draws the same numbers in one order. Not here
are those that draw more or fewer numbers as values say, such as `poisson`: they need whole operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.spmd.expand.calls import Call, R, exchanged, operands_of
from wholestep.spmd.expand.strategy import (
    Build,
    Dims,
    Rule,
    Strategy,
    alphabet,
    beside,
    linear,
    linear_strategies,
    trailing,
)
from wholestep.spmd.placements import Partial, Shard
from wholestep.torch_compat import OpOverload

aten = torch.ops.aten


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


def _filled(call: Call) -> Iterator[Strategy]:
    """An operator that fills the shape of its first operand, whose elements it does not read, as they lie in memory."""
    others = [R] * (len(call.values) - 1)
    for dim in range(call.values[0].dim()):
        yield Strategy((Shard(dim), *others), (Shard(dim),), partial(_fill_whole, dim=dim))
    for placement in (R, Partial()):
        yield Strategy((placement, *others), (R,), partial(_fill_whole, dim=None))


def _fill_whole(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int | None) -> list[fx.Node]:
    whole = call.values[0]
    memory = build.call(aten.new_empty_strided.default, ins[0], list(whole.shape), list(whole.stride()))
    drawn = _drawn(build, call, [memory, *ins[1:]])
    return [drawn if dim is None else build.shard(drawn, dim)]


def _drawn(build: Build, call: Call, ins: Sequence[fx.Node]) -> fx.Node:
    made = build.same(call, ins)
    return build.pick(made, 0) if isinstance(info(made).value, (list, tuple)) else made


def _by_parameters(call: Call) -> Iterator[Strategy]:
    """Operands of the result's shape say the distribution of each element: those of others' are made up."""
    shape = call.results[0].shape
    if all(value.shape == shape and value.is_contiguous() for value in call.values):
        for dim in range(len(shape)):
            yield Strategy((Shard(dim),) * len(call.values), (Shard(dim),), partial(_draw_amid, dim=dim))


def _by_rows(call: Call) -> Iterator[Strategy]:
    """`multinomial`: rows of weights."""
    if call.values[0].dim() == 2:
        yield Strategy((Shard(0),), (Shard(0),), partial(_draw_amid, dim=0))


def _draw_amid(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    start, stop = build.piece(call.values[0].shape[dim])
    whole = [build.pad(one, dim, start, call.values[0].shape[dim] - stop, 1) for one in ins]
    return [build.shard(_drawn(build, call, whole), dim)]


def _dropout(call: Call) -> Iterator[Strategy]:
    for dim in range(call.values[0].dim()):
        yield Strategy((Shard(dim),), (Shard(dim), Shard(dim)), partial(_drop, dim=dim))


def _drop(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    ones = build.call(aten.new_ones.default, ins[0], list(call.values[0].shape))
    made = build.same(call, [ones])
    scale, mask = (build.shard(build.pick(made, i), dim) for i in range(2))
    return [build.call(aten.mul.Tensor, ins[0], scale), mask]


_FILLS = ["bernoulli_", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"]

RULES |= {
    **{f"functional(aten.{name})": _filled for name in _FILLS},
    **dict.fromkeys(["aten.rand_like", "aten.randn_like", "aten.randint_like"], _filled),
    **dict.fromkeys(["aten.bernoulli", "aten.normal"], _by_parameters),
    "aten.multinomial": _by_rows,
    "aten.native_dropout": _dropout,
}


def _beside(*dims: int) -> Rule:
    """By all other dimensions, of which a scalar has none."""

    def rule(call: Call) -> Iterator[Strategy]:
        if call.values[0].dim():
            yield from beside(call, *dims)
        if call.argument("op", "sum").partition(":")[0] in ("sum", "avg", "premul_sum"):
            yield from linear_strategies(call, [(0,)])

    return rule


RULES |= {
    **dict.fromkeys([f"wholestep.{name}" for name in ("all_reduce", "broadcast", "wait")], _beside()),
    **dict.fromkeys(
        [f"wholestep.{name}" for name in ("all_gather", "reduce_scatter", "all_to_all", "share_rows")], _beside(0)
    ),
}


_PREFIXES = ("_foreach_", "_fused_")


def is_on_lists(target: object) -> bool:
    """True for an operator whose results at i depend on the operands at i alone."""
    if not isinstance(target, OpOverload) or not target._schema.name.split("::")[-1].startswith(_PREFIXES):
        return False
    return any(str(one.type) == "List[Tensor]" for one in target._schema.arguments)  # as `_fused_rms_norm` has none


def columns_of(call: Call) -> Iterator[Call]:
    """What an operator on lists does at each place of the lists, as calls on lists of one."""
    for index in range(next(len(argument) for argument in call.args if isinstance(argument, (list, tuple)))):

        def at(argument: Any, index: int = index) -> Any:
            return argument[index : index + 1] if isinstance(argument, (list, tuple)) else argument

        args, kwargs = tuple(map(at, call.args)), {name: at(one) for name, one in call.kwargs.items()}
        operands, result = operands_of(args, kwargs), call.result
        values = tuple(info(node).value for node in operands)
        result = [at(one) for one in result] if result and isinstance(result[0], (list, tuple)) else at(result)
        yield replace(call, args=args, kwargs=kwargs, operands=operands, values=values, result=result)


def of_columns(
    build: Build, whole: Call, columns: Sequence[Call], local: Sequence[Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    """An operator on lists, on some of its columns.

    Args:
        whole: the call on all of them.
        columns, local: these columns, and the local operands of each.

    Returns:
        The results of each column.
    """
    if not columns:
        return []
    each = [exchanged(c.args, c.kwargs, nodes, build.number_of) for c, nodes in zip(columns, local, strict=True)]

    def joined(*found: Any) -> Any:
        return [*chain.from_iterable(found)] if isinstance(found[0], (list, tuple)) else found[0]

    args = tuple(map(joined, *(args for args, _ in each)))
    kwargs = {name: joined(*(given[name] for _, given in each)) for name in whole.kwargs}
    made = build.as_recorded(whole.target, args, kwargs)
    value = info(made).value
    if value and isinstance(value[0], (list, tuple)):
        rows = [build.pick(made, i) for i, one in enumerate(value) if one]
        return [[build.pick(row, place) for row in rows] for place in range(len(columns))]
    return [[build.pick(made, place)] if value is not None else [] for place in range(len(columns))]
