"""What to keep under limits of bytes so that the least time is spent again: a small integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from wholestep.aot_autograd.min_cut import Value, cheapest

GAP = 0.01  # how far from the least time an answer may be: equal layers make the last percent slow to prove
PATIENCE = 20.0  # seconds
PENALTY = 100.0  # for what is above a limit, by which all is exceeded: as often the time of making everything again


@dataclass(frozen=True)
class Limit:
    """At most so much of what is kept and what is made again, each weighted; in a unit near 1.

    Attributes:
        kept, remade: weights, one a value.
    """

    kept: np.ndarray[Any, Any]
    remade: np.ndarray[Any, Any]
    most: float


def within_budget(values: Sequence[Value], seconds: Sequence[float], full: Sequence[int], budget: float) -> list[int]:
    """Indices of the values to keep so that they take at most some bytes.

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
    scale = max(1.0, limit)
    weights = np.array([float(v.keep or 0) for v in values]) / scale
    found = least_time(values, seconds, [Limit(weights, np.zeros(len(values)), limit / scale)], PATIENCE)
    return fewest if found is None else found


def least_time(
    values: Sequence[Value], seconds: Sequence[float], limits: Sequence[Limit], patience: float, soft: bool = False
) -> list[int] | None:
    """Indices of the values to keep so that the least time is spent again; None when no set is found in time.

    With k = 1 for a kept value and m = 1 for one that is made again: least sum of seconds * m, where k + m >= 1 for
    what is wanted and for the operands of what is made again, and all limits hold.

    Args:
        values, seconds: see `within_budget`.
        patience: seconds to search for.
        soft: where not all limits can hold, gives a set that exceeds them least.
    """
    count = len(values)
    above = LinearConstraint(
        np.array([[*limit.kept, *limit.remade, -1.0] for limit in limits]), -np.inf, [limit.most for limit in limits]
    )
    bounds = [float(v.keep is not None) for v in values] + [float(v.remake is not None) for v in values]
    found = milp(
        c=np.concatenate([np.full(count, 1e-9), np.asarray(seconds) * 1e6, [PENALTY * 1e6 * (sum(seconds) + 1e-6)]]),
        integrality=np.concatenate([np.ones(count), np.zeros(count + 1)]),
        bounds=Bounds(0, [*bounds, np.inf if soft else 0.0]),
        constraints=[_at_hand(values), above],
        options={"mip_rel_gap": GAP, "time_limit": patience},
    )
    return None if found.x is None else [index for index in range(count) if found.x[index] > 0.5]


def _at_hand(values: Sequence[Value]) -> LinearConstraint:
    """k + m >= 1 for wanted values; k + m >= the m of each value made from them."""
    count = len(values)
    needs: list[tuple[int, int | None]] = []  # a value, and one that is made from it
    for index, value in enumerate(values):
        needs += [(operand, index) for operand in value.operands] + [(index, None)] * value.wanted
    matrix = lil_array((len(needs), 2 * count + 1))
    for row, (needed, reader) in enumerate(needs):
        matrix[row, [needed, count + needed]] = 1.0
        if reader is not None:
            matrix[row, count + reader] = -1.0
    return LinearConstraint(matrix.tocsr(), [float(reader is None) for _, reader in needs], np.inf)
