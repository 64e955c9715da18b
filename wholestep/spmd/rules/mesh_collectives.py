"""Collectives along one axis of a mesh, as another axis sees them: operators on tensors that it may split.

Those that put the ranks' rows one after the other, or share rows out, need dimension 0 whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Rule, Strategy, beside, linear_strategies


def _beside(*dims: int) -> Rule:
    """By all other dimensions, of which a scalar has none."""

    def rule(call: Call) -> Iterator[Strategy]:
        if call.values[0].dim():
            yield from beside(call, *dims)
        if call.argument("op", "sum").partition(":")[0] in ("sum", "avg", "premul_sum"):
            yield from linear_strategies(call, [(0,)])

    return rule


RULES: dict[str, Rule] = {
    **dict.fromkeys([f"wholestep.{name}" for name in ("all_reduce", "broadcast", "wait")], _beside()),
    **dict.fromkeys(
        [f"wholestep.{name}" for name in ("all_gather", "reduce_scatter", "all_to_all", "share_rows")], _beside(0)
    ),
}
