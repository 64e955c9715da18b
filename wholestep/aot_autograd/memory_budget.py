"""What to keep under a limit of bytes so that the least time is spent again: a small integer program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

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
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    least: list[float] = []
    for index, value in enumerate(values):
        needs = [(operand, index) for operand in value.operands] + ([(index, None)] if value.wanted else [])
        for needed, reader in needs:
            row = len(least)
            rows += [row, row]
            columns += [needed, count + needed]
            entries += [1.0, 1.0]
            if reader is not None:
                rows.append(row)
                columns.append(count + reader)
                entries.append(-1.0)
            least.append(0.0 if reader is not None else 1.0)
    matrix = csr_array((entries, (rows, columns)), shape=(len(least), 2 * count))
    return LinearConstraint(matrix, least, np.inf)


def _bytes(values: Sequence[Value], limit: float) -> LinearConstraint:
    weights = np.array([float(v.keep or 0) for v in values] + [0.0] * len(values))
    scale = max(1.0, limit)
    return LinearConstraint(weights[None, :] / scale, -np.inf, limit / scale)
