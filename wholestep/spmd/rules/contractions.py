"""Sums of products, as `einsum` writes them."""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Dims, Rule, Strategy, linear, trailing
from wholestep.spmd.placements import Op


def contraction(spec: str, *, added: bool = False) -> Rule:
    """``"mk,kn->mn"``; letters that the result lacks are summed over. Linear in each operand.

    Args:
        added: to a first operand, which is broadcast to the result.
    """
    operands, result = spec.split("->")
    ins = operands.split(",")
    summed: dict[str, Op] = {letter: "sum" for names in ins for letter in names if letter not in result}

    def rule(call: Call) -> Iterator[Strategy]:
        first = [trailing(call.values[0], result, call.results[0].shape)] if added else []
        yield from Dims([*first, *ins], [result], summed, frozenset([0][: len(first)])).strategies(call)

    return linear(rule, *((0, i + 1) if added else (i,) for i in range(len(ins))))


RULES: dict[str, Rule] = {
    "aten.mm": contraction("mk,kn->mn"),
    "aten.bmm": contraction("bmk,bkn->bmn"),
    "aten.mv": contraction("mk,k->m"),
    "aten.dot": contraction("k,k->"),
    "aten.vdot": contraction("k,k->"),
    "aten.addmm": contraction("mk,kn->mn", added=True),
    "aten.addmv": contraction("mk,k->m", added=True),
    "aten.baddbmm": contraction("bmk,bkn->bmn", added=True),
    "aten.addbmm": contraction("bmk,bkn->mn", added=True),
    "aten.addr": contraction("m,n->mn", added=True),
}
