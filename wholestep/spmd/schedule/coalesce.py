"""Coalescing: collectives of one kind are packed into one, where each is ready before any of them is needed.

What a small collective costs is its latency; what packing costs is a copy in and a copy out. So the norms of gradients,
biases and scales are packed while they are small, the broadcasts of a model's buffers always, and the gradients of the
local view in buckets as DistributedDataParallel fills them, in which they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep.comm import get_group
from wholestep.ir import StepGraph, info, nbytes, set_info
from wholestep.spmd.expand.graph_edits import Writer, copy_step

aten = torch.ops.aten
collectives = torch.ops.wholestep

KIB = 1 << 10
CACHE_LINE = 64  # bytes


@dataclass
class Collective:
    """The call that starts a collective, and the one that waits for it.

    Attributes:
        ready, needed: places in the graph of the start, and of the first reader of the result.
        sends, gives: bytes that caps count; alike on all ranks.
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
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients it carries."""
        return info(self.start).placement or ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What those that are packed together have alike."""
        dtype = None if self.start.target is collectives.broadcast.default else self.value.dtype
        return self.start.target, self.start.args[1:], dtype, self.value.device, info(self.start).phase


def coalesce(step: StepGraph, *, each: int = 64 * KIB, together: int = 1024 * KIB) -> StepGraph:
    """Packs small all-reduces, all-gathers and reduce-scatters.

    Args:
        step: left as it is.
        each: only collectives that send at most so many bytes are packed.
        together: bytes that are packed into one at most.
    """
    step = copy_step(step, "coalesce")
    several = [one for one in found(step) if one.start.target in _PACKS and 0 < one.sends <= each]
    return _packed(step, [bucket for bucket in buckets_of(several, (together, together)) if len(bucket) > 1])


def pack_broadcasts(step: StepGraph) -> StepGraph:
    """Sends as one what one rank broadcasts to the same ranks before any of it is needed, of whatever dtypes."""
    step = copy_step(step, "pack_broadcasts")
    several = [one for one in found(step) if one.start.target is collectives.broadcast.default]
    return _packed(step, [bucket for bucket in buckets_of(several, (None, None)) if len(bucket) > 1])


def bucket_gradients(step: StepGraph, *, group: str, caps: tuple[int, int]) -> StepGraph:
    """Packs the all-reduces of gradients in the order in which they are ready.

    Args:
        step: left as it is.
        group: name of the group that they are reduced over.
        caps: bytes of the first bucket and of all others.
    """
    step = copy_step(step, "bucket_gradients")
    gradients = [one for one in found(step) if one.names and one.start.target is collectives.all_reduce.default]
    return _packed(step, buckets_of([one for one in gradients if one.start.args[-1] == group], caps))


def found(step: StepGraph) -> list[Collective]:
    """All collectives of a graph that nothing reads but one wait, in order."""
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    result = []
    for node in place:
        waits = [u for u in node.users if u.target is collectives.wait.default] if node.target in _KINDS else []
        if len(waits) == len(node.users) == 1 and waits[0].users:
            needed = min(place[user] for user in waits[0].users)
            sizes = nbytes(info(node.args[0]).value), nbytes(info(node).value)  # type: ignore[arg-type]
            # broadcasts are packed where the first is read, others where the last is started
            ready = place[node.args[0] if node.target is collectives.broadcast.default else node]  # type: ignore[index]
            result.append(Collective(node, waits[0], ready, needed, *sizes))
    return result


def buckets_of(several: Sequence[Collective], caps: tuple[int | None, int | None]) -> list[list[Collective]]:
    """Packs collectives in their order: into one what is ready before any of it is needed.

    Args:
        caps: bytes of the first bucket and of all others.
    """
    buckets: list[list[Collective]] = []
    latest: dict[Any, list[Collective]] = {}
    for one in several:
        bucket = latest.get(one.key)
        if bucket is None or not _takes(bucket, one, caps[bucket is not buckets[0]]):
            latest[one.key] = bucket = []
            buckets.append(bucket)
        bucket.append(one)
    return buckets


def _takes(bucket: Sequence[Collective], one: Collective, cap: int | None) -> bool:
    several = [*bucket, one]
    in_time = max(m.ready for m in several) < min(m.needed for m in several)
    return in_time and (cap is None or sum(m.sends for m in several) <= cap)


def _packed(step: StepGraph, buckets: Sequence[Sequence[Collective]]) -> StepGraph:
    renamed: dict[str, str] = {}
    for members in buckets:
        renamed |= _pack(step.graph, members)
    signature = step.signature  # plans along other axes look for gradients where they are now
    signature.gradients = [
        replace(g, before=g.before and renamed.get(g.before, g.before), after=renamed.get(g.after, g.after))
        for g in signature.gradients
    ]
    step.graph.lint()
    step.gm.recompile()
    return step


class _Packer(Writer):
    """Adds the calls of one bucket: before the collective at one place, after it at another."""

    def rows(self, node: fx.Node, shape: Sequence[int], dtype: torch.dtype | None = None) -> fx.Node:
        """A value in another shape; its bytes as elements of another type."""
        if not info(node).value.is_contiguous():
            node = self.clone(node)
        if dtype not in (None, info(node).value.dtype):
            node = self.call(aten.view.dtype, self.rows(node, [info(node).value.numel()]), dtype)
        return node if list(info(node).value.shape) == list(shape) else self.call(aten.view.default, node, list(shape))

    def piece(self, node: fx.Node, start: int, size: int) -> fx.Node:
        """Elements of the last dimension."""
        shape = info(node).value.shape
        return node if size == shape[-1] else self.call(aten.slice.Tensor, node, len(shape) - 1, start, start + size)


def _flat(ranks: int, value: torch.Tensor) -> list[int]:
    return [value.numel()]


def _by_rank(ranks: int, value: torch.Tensor) -> list[int]:
    return [ranks, value.numel() // ranks]


def _in_bytes(ranks: int, value: torch.Tensor) -> list[int]:
    return [value.numel() * value.itemsize]


# collective -> the shape in which its operands are packed, and that in which its result is taken apart
_PACKS: dict[Any, tuple[Callable[..., list[int]], Callable[..., list[int]]]] = {
    collectives.all_reduce.default: (_flat, _flat),
    collectives.all_gather.default: (_flat, _by_rank),
    collectives.reduce_scatter.default: (_by_rank, _flat),
}
_KINDS = (*_PACKS, collectives.all_to_all.default, collectives.broadcast.default)


def _pack(graph: fx.Graph, members: Sequence[Collective]) -> dict[str, str]:
    """Writes one collective in place of several, or of one in the form of several; gives what stands for each wait."""
    last = max(members, key=lambda m: m.ready)
    reader = min(min(members, key=lambda m: m.needed).wait.users)  # nodes compare by their place in the graph
    to_send, received = _PACKS.get(last.start.target, (_in_bytes, _in_bytes))
    in_bytes = torch.uint8 if last.start.target is collectives.broadcast.default else None
    # gradients by name: a hook of one rank may have them come in another order there
    members = sorted(members, key=lambda m: m.names, reverse=True)
    # each at a multiple of its elements' size, and as many as can be at one of a cache line, where kernels may write
    members = sorted(members, key=lambda m: (-m.value.itemsize, m.sends % CACHE_LINE != 0))
    group: Any = last.start.args[-1]
    ranks = get_group(group).size() if _by_rank in (to_send, received) else 1
    names = tuple(name for m in members for name in (m.names or ((str(m.sent),) if in_bytes else ())))
    packer = _Packer(graph, replace(info(members[0].start), seq=None))
    with graph.inserting_before(reader if in_bytes else last.start):
        packed = [packer.rows(m.sent, to_send(ranks, m.value), in_bytes) for m in members]
        joined = packed[0]
        if len(packed) > 1:
            joined = packer.call(aten.cat.default, packed, len(to_send(ranks, last.value)) - 1)
        started = packer.call(last.start.target, joined, *last.start.args[1:], names=names)
    if reader.op == "call_function":
        packer.record.phase = info(reader).phase
    with graph.inserting_before(reader):
        done = packer.call(collectives.wait.default, started)
        done = packer.rows(done, received(ranks, info(done).value))
        start, renamed = 0, {}
        for member in members:
            value = info(member.wait).value
            shape = received(ranks, value)
            piece = packer.piece(done, start, shape[-1])
            start += shape[-1]
            new = packer.rows(piece, value.shape, value.dtype)
            set_info(new, replace(info(new), placement=info(member.wait).placement))
            member.wait.replace_all_uses_with(new)
            renamed[member.wait.name] = new.name
    for member in members:
        graph.erase_node(member.wait)
        graph.erase_node(member.start)
    return renamed
