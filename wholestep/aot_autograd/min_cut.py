"""The cheapest set of values to keep between two phases of a graph: a minimum cut; under limits, an integer program.

Each value is a node that may be *kept* at its price, and *made again* later at another price. Values that are
`wanted` later must be at hand then: kept, or made again from values that are at hand. The values of least total
price are a minimum cut (Ford and Fulkerson, 1956; used for rematerialisation by Kusupati et al., "Min-cut optimal
(re)computation", PyTorch developers' forum, 2022, after Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # whose parts are imported when they are first used, which takes a third of a second

LARGEST = 2**31 - 2  # scipy's flows are 32-bit numbers


@dataclass(frozen=True)
class Value:
    """One value that may be kept for a later phase, or made again in it.

    Attributes:
        operands: indices of the values that it is made from, all below its own.
        keep: price of keeping it; None when it cannot be kept.
        remake: price of making it again; None when that must not be.
        wanted: needed in the later phase.
    """

    operands: tuple[int, ...]
    keep: int | None
    remake: int | None
    wanted: bool = False


def cheapest(values: Sequence[Value]) -> list[int]:
    """Indices of the values to keep, in order.

    Of several sets of one price it gives the one that makes the fewest values again.

    Args:
        values: operands before the values made from them.

    Raises:
        ValueError: a wanted value can be neither kept nor made again.
    """
    edges = _edges(values)
    known = sum(c for _, _, c in edges if c is not None)
    unit = known // (LARGEST // 2) + 1  # beyond a gigabyte prices are rounded up to whole units
    prices = [None if c is None else -(-c // unit) for _, _, c in edges]
    infinite = sum(p for p in prices if p is not None) + 1
    source, sink = 2 * len(values), 2 * len(values) + 1
    heads, tails = [h for h, _, _ in edges], [t for _, t, _ in edges]
    capacities = np.array([infinite if p is None else p for p in prices], dtype=np.int32)
    graph = scipy.sparse.csr_array((capacities, (heads, tails)), shape=(sink + 1, sink + 1), dtype=np.int32)
    flow = scipy.sparse.csgraph.maximum_flow(graph, source, sink)
    if flow.flow_value >= infinite:
        raise ValueError("a value that is needed later can be neither kept nor made again")
    left = scipy.sparse.csr_array(graph - flow.flow)
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    backwards = scipy.sparse.csr_array(left.T)
    late = set(scipy.sparse.csgraph.breadth_first_order(backwards, sink, return_predecessors=False).tolist())
    return [i for i in range(len(values)) if 2 * i not in late and 2 * i + 1 in late]


def _edges(values: Sequence[Value]) -> list[tuple[int, int, int | None]]:
    """(from, to, capacity) for nodes 2i (value i is made early) and 2i + 1 (it is at hand late), source and sink.

    A cut leaves 2i on the early side and 2i + 1 on the late one for a value that is kept; both on the late side for
    one that is made again; then its operands must be at hand too, which the edges of no limit see to.
    """
    source, sink = 2 * len(values), 2 * len(values) + 1
    edges: list[tuple[int, int, int | None]] = []
    for index, value in enumerate(values):
        edges.append((2 * index, 2 * index + 1, value.keep))
        if value.remake != 0:
            edges.append((source, 2 * index, value.remake))
        edges += [(2 * operand + 1, 2 * index, None) for operand in dict.fromkeys(value.operands)]
        if value.wanted:
            edges.append((2 * index + 1, sink, None))
    return edges


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
    above = scipy.optimize.LinearConstraint(
        np.array([[*limit.kept, *limit.remade, -1.0] for limit in limits]), -np.inf, [limit.most for limit in limits]
    )
    bounds = [float(v.keep is not None) for v in values] + [float(v.remake is not None) for v in values]
    found = scipy.optimize.milp(
        c=np.concatenate([np.full(count, 1e-9), np.asarray(seconds) * 1e6, [PENALTY * 1e6 * (sum(seconds) + 1e-6)]]),
        integrality=np.concatenate([np.ones(count), np.zeros(count + 1)]),
        bounds=scipy.optimize.Bounds(0, [*bounds, np.inf if soft else 0.0]),
        constraints=[_at_hand(values), above],
        options={"mip_rel_gap": GAP, "time_limit": patience},
    )
    return None if found.x is None else [index for index in range(count) if found.x[index] > 0.5]


def _at_hand(values: Sequence[Value]) -> scipy.optimize.LinearConstraint:
    """k + m >= 1 for wanted values; k + m >= the m of each value made from them."""
    count = len(values)
    needs: list[tuple[int, int | None]] = []  # a value, and one that is made from it
    for index, value in enumerate(values):
        needs += [(operand, index) for operand in value.operands] + [(index, None)] * value.wanted
    matrix = scipy.sparse.lil_array((len(needs), 2 * count + 1))
    for row, (needed, reader) in enumerate(needs):
        matrix[row, [needed, count + needed]] = 1.0
        if reader is not None:
            matrix[row, count + reader] = -1.0
    return scipy.optimize.LinearConstraint(matrix.tocsr(), [float(reader is None) for _, reader in needs], np.inf)
