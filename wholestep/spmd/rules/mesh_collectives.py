"""Collectives along one axis of a mesh, as another axis sees them: operators on tensors that it may split.

Those that put the ranks' rows one after the other, or share rows out, need dimension 0 whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Rule, Strategy, beside, linear_strategies


def _is_linear(call: Call) -> bool:
    return call.argument("op", "sum").partition(":")[0] in ("sum", "avg", "premul_sum")


def _elementwise(call: Call) -> Iterator[Strategy]:
    if call.values[0].dim():
        yield from beside(call)
    if _is_linear(call):
        yield from linear_strategies(call, [(0,)])


def _by_rows(call: Call) -> Iterator[Strategy]:
    yield from beside(call, 0)
    if _is_linear(call):
        yield from linear_strategies(call, [(0,)])


RULES: dict[str, Rule] = {
    **{f"wholestep.{name}": _elementwise for name in ("all_reduce", "broadcast", "wait")},
    **{f"wholestep.{name}": _by_rows for name in ("all_gather", "reduce_scatter", "all_to_all", "share_rows")},
}
