"""What is reduced together: memory that holds gradients, and buckets of such."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from wholestep.errors import PlanError
from wholestep.ir import Gradient, StepGraph, info


@dataclass
class Pending:
    """Memory that holds gradients and must be reduced before somebody reads it.

    Attributes:
        node: gives the local values.
        gradients: those that lie in it.
        ready, needed: positions of the node and of its first reader.
        nbytes: what counts for a bucket's cap, alike on all ranks.
        blocks: (start, elements) of the gradients in the memory, in elements; one for all when they fill it.

    Raises:
        PlanError: the gradient is sparse, or scattered over its memory.
    """

    node: fx.Node
    gradients: list[Gradient]
    ready: int
    needed: int
    nbytes: int
    blocks: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = _blocks(self.gradients, self.value)

    @property
    def value(self) -> torch.Tensor:
        return info(self.node).value  # type: ignore[no-any-return]


@dataclass
class Bucket:
    """Gradients that are reduced by one collective."""

    members: list[Pending] = field(default_factory=list)
    nbytes: int = 0

    def takes(self, one: Pending, cap: int) -> bool:
        """True when another one fits: same kind of memory, within the cap, ready before any member is needed."""
        first = self.members[0]
        alike = (one.value.dtype, one.value.device) == (first.value.dtype, first.value.device)
        in_time = max(m.ready for m in (*self.members, one)) < min(m.needed for m in (*self.members, one))
        return alike and in_time and self.nbytes + one.nbytes <= cap

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(g.parameter for member in self.members for g in member.gradients)


def buckets_of(pending: list[Pending], caps: tuple[int, int]) -> list[Bucket]:
    """Packs gradients in the order in which they are ready."""
    buckets: list[Bucket] = []
    for one in sorted(pending, key=lambda p: p.ready):
        fitting = (b for b in buckets if b.takes(one, caps[b is not buckets[0]]))
        bucket = next(fitting, None)
        if bucket is None:
            buckets.append(bucket := Bucket())
        bucket.members.append(one)
        bucket.nbytes += one.nbytes
    return buckets


def refuse_sparse(step: StepGraph, plans: str) -> StepGraph:
    """Refuses gradients that no plan can reduce: the number of their values is in the data, and differs among ranks.

    Raises:
        PlanError: naming the parameter and the line.
    """
    nodes = {node.name: node for node in step.graph.nodes}
    for gradient in step.signature.gradients:
        node = nodes.get(gradient.after)
        if node is not None and info(node).value.layout != torch.strided:
            raise PlanError(
                f"{plans}: the gradient of {gradient.parameter} is sparse\n  at: {info(node).where}\n"
                "  to do: make it dense, by nn.Embedding(…, sparse=False)"
            )
    return step


def _blocks(gradients: list[Gradient], value: torch.Tensor) -> list[tuple[int, int]]:
    sizes = {(g.place[2], math.prod(g.place[0])): g for g in gradients}
    for (_, size), gradient in sizes.items():
        if not _is_dense(value.shape, value.stride()) or not _is_dense(*gradient.place[:2]):
            raise PlanError(
                f"DataParallel: the gradient of {gradient.parameter} lies scattered in its memory, {size} elements "
                f"at strides {gradient.place[1]}: leave it to backward() to make it"
            )
    whole = any(size == value.numel() for _, size in sizes) or sum(size for _, size in sizes) == value.numel()
    return [(0, value.numel())] if whole else sorted(sizes)


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True when elements fill a block of memory, each one once."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
