"""Small collectives of one kind are packed into one, where each is ready before any of them is needed.

What a small collective costs is its latency; what packing costs is a copy in and a copy out. So only small ones are
packed: the norms of gradients, biases, scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from wholestep.comm import get_group
from wholestep.ir import StepGraph, info, nbytes, set_info
from wholestep.spmd.expand.graph_edits import call, copy_step

aten = torch.ops.aten
collectives = torch.ops.wholestep

KIB = 1 << 10
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_KINDS = tuple(getattr(collectives, name).default for name in _NAMES)

Largest = Callable[[], StepGraph]


@dataclass
class One:
    """A collective: the call that starts it, and the one that waits for it.

    Attributes:
        ready, needed: places in the graph of the start, and of the first reader of the result.
        sends, gives: bytes that caps count, alike on all ranks: those of the rank with the largest parts.
    """

    start: fx.Node
    wait: fx.Node
    ready: int
    needed: int
    sends: int
    gives: int

    @property
    def sent(self) -> fx.Node:
        return self.start.args[0]  # type: ignore[return-value]

    @property
    def value(self) -> torch.Tensor:
        return info(self.sent).value  # type: ignore[no-any-return]

    @property
    def key(self) -> tuple[Any, ...]:
        """What those that are packed together have alike."""
        return self.start.target, self.start.args[1:], self.value.dtype, self.value.device, info(self.start).phase


@dataclass
class Bucket:
    """Collectives that are packed into one."""

    members: list[One] = field(default_factory=list)
    nbytes: int = 0

    def takes(self, one: One, cap: int) -> bool:
        """True when another one fits: ready before any is needed, within the cap."""
        everybody = [*self.members, one]
        in_time = max(m.ready for m in everybody) < min(m.needed for m in everybody)
        return in_time and self.nbytes + one.sends <= cap


def coalesce(
    step: StepGraph, *, each: int = 64 * KIB, together: int = 1024 * KIB, largest: Largest | None = None
) -> StepGraph:
    """Packs small all-reduces, all-gathers and reduce-scatters.

    Args:
        step: left as it is.
        largest: see `found`.
        each: only collectives that send at most so many bytes are packed.
        together: bytes that are packed into one at most.
    """
    step = copy_step(step, "coalesce")
    buckets: dict[Any, list[Bucket]] = {}
    for one in found(step, largest):
        if one.start.target not in _PACKS or not 0 < one.sends <= each:
            continue
        alike = buckets.setdefault(one.key, [])
        if not alike or not alike[-1].takes(one, together):
            alike.append(Bucket())
        alike[-1].members.append(one)
        alike[-1].nbytes += one.sends
    for bucket in (b for alike in buckets.values() for b in alike if len(b.members) > 1):
        _pack(step.graph, bucket.members)
    step.graph.lint()
    step.gm.recompile()
    return step


def found(step: StepGraph, largest: Largest | None = None) -> list[One]:
    """All collectives of a graph that nothing reads but one wait, in order.

    Args:
        largest: gives the graph, with the same collectives in the same order, of the rank that holds the largest parts.
            It is asked where ranks hold unequal ones.
    """
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    pairs = _pairs(step)
    like = _pairs(largest()) if largest is not None and step.signature.uneven else pairs
    assert len(pairs) == len(like), "ranks have other collectives than the first one"
    result = []
    for (start, wait), (other, _) in zip(pairs, like, strict=True):
        sizes = nbytes(info(other.args[0]).value), nbytes(info(other).value)  # type: ignore[arg-type]
        result.append(One(start, wait, place[start], min(place[user] for user in wait.users), *sizes))
    return result


def _pairs(step: StepGraph) -> list[tuple[fx.Node, fx.Node]]:
    pairs = []
    for node in step.graph.nodes:
        waits = [u for u in node.users if u.target is collectives.wait.default] if node.target in _KINDS else []
        if len(waits) == len(node.users) == 1 and waits[0].users:
            pairs.append((node, waits[0]))
    return pairs


@dataclass
class _Packer:
    """Adds the calls of one bucket: before the collective at one place, after it at another."""

    graph: fx.Graph
    record: dict[str, Any]

    def call(self, target: Any, *args: Any, **keywords: Any) -> fx.Node:
        return call(self.graph, target, *args, keywords=keywords, **self.record)

    def rows(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A value in another shape."""
        if not info(node).value.is_contiguous():
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, node, list(shape))

    def piece(self, node: fx.Node, dim: int, start: int, size: int) -> fx.Node:
        return self.call(aten.slice.Tensor, node, dim, start, start + size)


def _flat(ranks: int, value: torch.Tensor) -> list[int]:
    return [value.numel()]


def _by_rank(ranks: int, value: torch.Tensor) -> list[int]:
    return [ranks, value.numel() // ranks]


# collective -> the shape in which its operands are packed, and that in which its result is taken apart
_PACKS: dict[Any, tuple[Callable[..., list[int]], Callable[..., list[int]]]] = {
    collectives.all_reduce.default: (_flat, _flat),
    collectives.all_gather.default: (_flat, _by_rank),
    collectives.reduce_scatter.default: (_by_rank, _flat),
}


def _pack(graph: fx.Graph, members: Sequence[One]) -> None:
    last = max(members, key=lambda m: m.ready)
    first = min(members, key=lambda m: m.needed)
    to_send, received = _PACKS[last.start.target]
    ranks = _ranks(last)
    record = info(last.start)
    packer = _Packer(graph, {"phase": record.phase, "where": record.where, "module": record.module})
    with graph.inserting_before(last.start):
        packed = [packer.rows(m.sent, to_send(ranks, m.value)) for m in members]
        joined = packer.call(aten.cat.default, packed, len(to_send(ranks, last.value)) - 1)
        started = packer.call(last.start.target, joined, *last.start.args[1:])
    with graph.inserting_before(min(first.wait.users)):
        done = packer.call(collectives.wait.default, started)
        done = packer.rows(done, received(ranks, info(done).value))
        start = 0
        for member in members:
            value = info(member.wait).value
            shape = received(ranks, value)
            piece = packer.piece(done, len(shape) - 1, start, shape[-1])
            start += shape[-1]
            new = packer.rows(piece, value.shape)
            set_info(new, replace(info(new), placement=info(member.wait).placement))
            member.wait.replace_all_uses_with(new)
    for member in members:
        graph.erase_node(member.wait)
        graph.erase_node(member.start)


def _ranks(one: One) -> int:
    """How many ranks a collective is over."""
    return get_group(one.start.args[-1]).size()  # type: ignore[arg-type]
