"""Sums of products, as `einsum` writes them."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Dims, Rule, Strategy, linear_strategies, trailing


def contraction(spec: str) -> Rule:
    """``"mk,kn->mn"``; letters that the result lacks are summed over. Linear in each operand."""
    operands, result = spec.split("->")
    ins = operands.split(",")
    summed = {letter: "sum" for names in ins for letter in names if letter not in result}

    def rule(call: Call) -> Iterator[Strategy]:
        yield from Dims(ins, [result], summed).strategies(call)  # type: ignore[arg-type]
        yield from linear_strategies(call, [(i,) for i in range(len(ins))])

    return rule


def sum_with_contraction(spec: str) -> Rule:
    """The same, added to a first operand that is broadcast to the result."""
    operands, result = spec.split("->")
    ins = operands.split(",")
    summed = {letter: "sum" for names in ins for letter in names if letter not in result}

    def rule(call: Call) -> Iterator[Strategy]:
        first = trailing(call.values[0], result, call.results[0].shape)
        yield from Dims([first, *ins], [result], summed, frozenset([0])).strategies(call)  # type: ignore[arg-type]
        yield from linear_strategies(call, [(0, i + 1) for i in range(len(ins))])

    return rule


RULES: dict[str, Rule] = {
    "aten.mm": contraction("mk,kn->mn"),
    "aten.bmm": contraction("bmk,bkn->bmn"),
    "aten.mv": contraction("mk,k->m"),
    "aten.dot": contraction("k,k->"),
    "aten.vdot": contraction("k,k->"),
    "aten.addmm": sum_with_contraction("mk,kn->mn"),
    "aten.addmv": sum_with_contraction("mk,k->m"),
    "aten.baddbmm": sum_with_contraction("bmk,bkn->bmn"),
    "aten.addbmm": sum_with_contraction("bmk,bkn->mn"),
    "aten.addr": sum_with_contraction("m,n->mn"),
}
