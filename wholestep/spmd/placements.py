"""Where a tensor's elements are along an axis of a mesh, and which part each rank holds.

A tensor has one placement for each axis. Axes that split the same dimension do so one after the other, the mesh's
first axis first.

Dimensions that do not divide are split as `torch.chunk` splits them: into pieces of the quotient rounded up, so that
the last ranks hold less, or nothing. Piece r begins at ``r * ceil(length / ranks)``, wherever that is inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from wholestep.comm.ops.functional_collectives import piece
from wholestep.errors import PlanError
from wholestep.spmd.mesh import AxisGroup
from wholestep.tensor_parts import Part, Span

Op = Literal["sum", "avg", "product", "max", "min"]


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True)
class Shard:
    """Each rank holds a piece along dimension ``dim`` (counted from the end when negative)."""

    dim: int


@dataclass(frozen=True)
class Partial:
    """Each rank holds a tensor of the whole shape; reduced over the ranks by ``op`` they are the value."""

    op: Op = "sum"

    def __post_init__(self) -> None:
        if self.op not in get_args(Op):
            raise PlanError(f"Partial({self.op!r}): one of {', '.join(get_args(Op))} is required")


@dataclass(frozen=True)
class Opaque:
    """Each rank holds what only kernels read, such as a workspace, of a call on its part: it cannot be moved.

    For rules, not for plans: what is made so is read by calls with a row for it.
    """


Placement = Replicate | Shard | Partial | Opaque


def normal(placement: Placement, shape: Sequence[int], what: str = "a tensor") -> Placement:
    """The placement with a dimension counted from the start.

    Raises:
        PlanError: the tensor has no such dimension.
    """
    if not isinstance(placement, Shard):
        return placement
    if not -len(shape) <= placement.dim < len(shape):
        has = f"dimensions 0 to {len(shape) - 1}" if shape else "no dimension"
        near = f"Shard({min(max(placement.dim, 0), len(shape) - 1)}) or " if shape else ""
        raise PlanError(
            f"{placement} of {what} of shape {list(shape)}, which has {has}\n  to do: {near}Replicate() for this tensor"
        )
    return replace(placement, dim=placement.dim % len(shape))


def is_unequal(placement: Placement, shape: Sequence[int], group: AxisGroup) -> bool:
    """True where the ranks of an axis hold pieces of several sizes."""
    return isinstance(placement, Shard) and shape[placement.dim] % group.size != 0


def splits(placement: Placement, shape: Sequence[int], group: AxisGroup) -> bool:
    """Whether the ranks of an axis may hold a tensor so."""
    return not (group.even and is_unequal(placement, shape, group))


def fills(placement: Shard, shape: Sequence[int], group: AxisGroup) -> bool:
    """Whether every rank of an axis has something of a tensor."""
    start, stop = piece(shape[placement.dim], group.size, group.size - 1)
    return start < stop


def split_evenly(placement: Placement, shape: Sequence[int], group: AxisGroup) -> Placement:
    """The placement; where an axis may not split its dimension, another dimension that it may; else the whole."""
    others = [Shard(dim) for dim in range(len(shape))] if isinstance(placement, Shard) else []
    return next((one for one in (placement, *others) if splits(one, shape, group)), Replicate())


def local_shape(shape: Sequence[int], placements: Sequence[Placement], groups: Sequence[AxisGroup]) -> tuple[int, ...]:
    """The shape of what one rank holds.

    Args:
        shape: of the whole tensor.
        placements, groups: one for each axis of the mesh.
    """
    return cut(shape, [normal(placement, shape) for placement in placements], groups).size


def cut(shape: Sequence[int], placements: Iterable[Placement], groups: Iterable[AxisGroup]) -> Part:
    """What one rank holds of a tensor, axes that split one dimension doing so one after the other."""
    spans: list[Span] = [(0, size) for size in shape]
    for placement, group in zip(placements, groups, strict=True):
        if isinstance(placement, Shard):
            first, last = spans[placement.dim]
            start, stop = piece(last - first, group.size, group.rank)
            spans[placement.dim] = first + start, first + stop
    return Part.of(shape, spans)
