"""Blocked matrix products: a gradient that only the optimizer reads is computed by blocks of rows, never as a whole.

The gradient of a weight on few rows of a batch is a product with little arithmetic and a large result. Computed and
used by some of its rows at a time, it stays in the cache: of the ten times that such a step passes over memory as
large as the weight, two are gone, and so is that memory. The bits are those of the whole product, which is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.lower.plan.operator_facts import aten
from wholestep.torch_compat import no_modes

PIECE = 1 << 18  # elements that are computed at once: 1 MB, as much as fits the second cache
LEAST = 1 << 21  # elements of a product from which this pays
WHOLE = 1 << 22  # and of one that stays in memory
# The dimension that is summed over, at most: beyond, arithmetic takes longer than memory, and the factors live longer.
INNER = 128
ROWS = 16  # computed at once are so many, or some times so many: whole vectors of whatever reads them by rows

_SAME_BITS: dict[Any, bool] = {}


def product_of(nodes: Iterable[fx.Node], readers: Callable[[fx.Node], bool]) -> fx.Node | None:
    """A product that calls of one group read by pieces, and nobody else.

    Args:
        nodes: of the group.
        readers: whether a node is in the group.
    """
    operands = (operand for node in nodes for operand in node.all_input_nodes)
    return next((operand for operand in operands if is_blocked(operand, readers)), None)


def is_blocked(node: fx.Node, readers: Callable[[fx.Node], bool]) -> bool:
    """True for a product that is better computed by rows, where all that read it can take it so."""
    return is_product(node) and all(map(readers, node.users)) and _pays(node) and _same_bits(node)


def is_product(node: fx.Node) -> bool:
    """True for a product of two matrices."""
    return node.op == "call_function" and node.target is aten.mm.default


def rows_at_once(value: torch.Tensor) -> int:
    """How many rows of a product are computed at once."""
    return max(ROWS, PIECE // value.shape[1] // ROWS * ROWS)


def by_rows(left: torch.Tensor, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The pieces of a product: where each begins (element), the rows of the first factor, and memory for it."""
    rows, columns = piece.shape
    for first in range(0, left.shape[0], rows):
        some = left[first : first + rows]
        yield first * columns, some, piece[: some.shape[0]]


def in_parts(node: fx.Node) -> bool:
    """Whether a product that is whole in memory is computed by rows: each part is written while the cache holds it.

    On one thread 5000 x 5000 elements take 0.65 of the time with 20 rows of a batch, 0.77 with 64 and 0.97 with 128;
    several threads share out the whole product better than its parts (0.98 to 1.16).
    """
    one = torch.get_num_threads() == 1 and info(node).value.device.type == "cpu"
    return one and is_product(node) and info(node).value.numel() >= WHOLE and _pays(node) and _same_bits(node)


def parts(left: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of the first factor and of the product, as many at once as the cache holds."""
    rows = rows_at_once(out)
    return zip(left.split(rows), out.split(rows), strict=True)


def _pays(node: fx.Node) -> bool:
    left, right = node.args
    value = info(node).value
    if left is right or value.numel() < LEAST or value.shape[0] <= rows_at_once(value):
        return False
    factors = sum(info(one).value.numel() for one in (left, right))  # type: ignore[arg-type]
    return info(left).value.shape[1] <= INNER and 4 * factors <= value.numel()  # type: ignore[arg-type, no-any-return]


def _same_bits(node: fx.Node) -> bool:
    """Tries a product on random numbers: whole, and by rows."""
    like = [info(one).value for one in node.args]  # type: ignore[arg-type]
    key = (*((*map(int, v.shape), *map(int, v.stride()), v.dtype) for v in like), torch.get_num_threads())
    if key not in _SAME_BITS:
        with no_modes():
            generator = torch.Generator().manual_seed(0)
            left, right = (torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in like)
            for one in (left, right):
                one.normal_(generator=generator)
            whole = torch.mm(left, right)
            piece = whole.new_empty(rows_at_once(whole), whole.shape[1])
            _SAME_BITS[key] = all(
                torch.equal(torch.mm(some, right, out=into), whole.view(-1)[first : first + into.numel()].view_as(into))
                for first, some, into in by_rows(left, piece)
            )
    return _SAME_BITS[key]
