"""Element by element: each dimension can be split, and what is linear passes addends on."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.sharding import Call, Dims, Row, Rule, alphabet, linear_rows, trailing


def pointwise(call: Call) -> Iterator[Row]:
    """Operands are broadcast to the result's shape."""
    like = call.results[0]
    letters = alphabet(like.dim())
    ins = [trailing(value, letters, like) for value in call.values]
    yield from Dims(ins, [letters] * len(call.results)).rows(call)


def linear(*groups: tuple[int, ...]) -> Rule:
    """Pointwise, and linear in each group of operands when the others are whole.

    A number beside the tensor operand, as in ``x + 1``, would be added by every rank: then there is no such row.
    """

    def rule(call: Call) -> Iterator[Row]:
        yield from pointwise(call)
        count = len(call.values)
        fitting = [group for group in groups if all(i < count for i in group)]
        yield from linear_rows(call, fitting)

    return rule


def _sum(call: Call) -> Iterator[Row]:
    """``x + y``: addends when both are; a number is no addend."""
    yield from pointwise(call)
    if len(call.values) == 2:
        yield from linear_rows(call, [(0, 1)])


def _product(call: Call) -> Iterator[Row]:
    """Linear in each operand alone."""
    yield from pointwise(call)
    yield from linear_rows(call, [(i,) for i in range(len(call.values))])


def _quotient(call: Call) -> Iterator[Row]:
    yield from pointwise(call)
    if call.argument("rounding_mode") is None:
        yield from linear_rows(call, [(0,)])


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.add", "aten.sub", "aten._foreach_add", "aten._foreach_sub"], _sum),
    **dict.fromkeys(["aten.mul", "aten._foreach_mul"], _product),
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
            "aten.copy",
            "aten.zeros_like",
        ],
        linear((0,)),
    ),
    "aten.where": linear((1, 2)),
    "aten.lerp": linear((0, 1)),
    **dict.fromkeys(["aten.tanh_backward", "aten.sigmoid_backward", "aten.threshold_backward"], linear((0,))),
    **dict.fromkeys(["aten.gelu_backward", "aten.silu_backward", "aten.elu_backward"], linear((0,))),
    # pointwise, though torch does not tag them so
    **dict.fromkeys(
        [
            "aten.empty_like",
            "aten.full_like",
            "aten.ones_like",
            "aten.fill",
            "aten.masked_fill",
            "aten.native_dropout_backward",
            "aten.lift_fresh_copy",
        ],
        pointwise,
    ),
}
