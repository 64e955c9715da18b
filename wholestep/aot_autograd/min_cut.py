"""The cheapest set of values to keep between two phases of a graph, as a minimum cut.

Each value is a node that may be *kept* at its price, and *made again* later at another price. Values that are
`wanted` later must be at hand then: kept, or made again from values that are at hand. The values of least total
price are a minimum cut (Ford and Fulkerson, 1956; used for rematerialisation by Kusupati et al., "Min-cut optimal
(re)computation", PyTorch developers' forum, 2022, after Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

LARGEST = 2**31 - 2  # scipy's flows are 32-bit numbers


@dataclass(frozen=True)
class Value:
    """One value of a `Problem`.

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
    graph = csr_array((capacities, (heads, tails)), shape=(sink + 1, sink + 1), dtype=np.int32)
    flow = maximum_flow(graph, source, sink)
    if flow.flow_value >= infinite:
        raise ValueError("a value that is needed later can be neither kept nor made again")
    left = csr_array(graph - flow.flow)
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    late = set(breadth_first_order(csr_array(left.T), sink, return_predecessors=False).tolist())
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
