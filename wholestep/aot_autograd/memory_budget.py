"""What to keep under a limit of bytes so that the least time is spent again: a small integer program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from wholestep.aot_autograd.min_cut import Value, cheapest

GAP = 0.01  # how far from the least time an answer may be: equal layers make the last percent slow to prove
PATIENCE = 20.0  # seconds


def within_budget(values: Sequence[Value], seconds: Sequence[float], full: Sequence[int], budget: float) -> list[int]:
    """Indices of the values to keep.

    With k = 1 for a kept value and m = 1 for one that is made again: least sum of seconds * m, where k + m >= 1 for
    what is wanted and for the operands of what is made again, and the kept bytes are within the limit.

    Args:
        values: as `cheapest` takes them, prices of making again being 0 or None.
        seconds: time of making each one again.
        full: what a budget of 1 keeps.
        budget: 0 to 1, the part of the way from the fewest bytes to those of `full`.

    Returns:
        The best set; that of the fewest bytes when none is found in time.
    """
    fewest = cheapest(values)
    least, most = (sum(values[i].keep or 0 for i in kept) for kept in (fewest, full))
    limit = least + budget * max(0, most - least)
    found = milp(
        c=np.concatenate([np.full(len(values), 1e-9), np.asarray(seconds) * 1e6]),
        integrality=np.concatenate([np.ones(len(values)), np.zeros(len(values))]),
        bounds=Bounds(0, [float(v.keep is not None) for v in values] + [float(v.remake is not None) for v in values]),
        constraints=[_at_hand(values), _bytes(values, limit)],
        options={"mip_rel_gap": GAP, "time_limit": PATIENCE},
    )
    if found.x is None:
        return fewest
    return [index for index in range(len(values)) if found.x[index] > 0.5]


def _at_hand(values: Sequence[Value]) -> LinearConstraint:
    """k + m >= 1 for wanted values; k + m >= the m of each value made from them."""
    count = len(values)
    needs: list[tuple[int, int | None]] = []  # a value, and one that is made from it
    for index, value in enumerate(values):
        needs += [(operand, index) for operand in value.operands] + [(index, None)] * value.wanted
    matrix = lil_array((len(needs), 2 * count))
    for row, (needed, reader) in enumerate(needs):
        matrix[row, [needed, count + needed]] = 1.0
        if reader is not None:
            matrix[row, count + reader] = -1.0
    return LinearConstraint(matrix.tocsr(), [float(reader is None) for _, reader in needs], np.inf)


def _bytes(values: Sequence[Value], limit: float) -> LinearConstraint:
    weights = np.array([float(v.keep or 0) for v in values] + [0.0] * len(values))
    scale = max(1.0, limit)
    return LinearConstraint(weights[None, :] / scale, -np.inf, limit / scale)
