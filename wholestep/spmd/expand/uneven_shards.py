"""Uneven sharding: every rank plans for the largest and the smallest shard, so that all emit the same collectives.

What a plan does along an axis depends on sizes. Where the axes before have sharded dimensions unevenly, sizes differ
from rank to rank, while all ranks must issue the same collectives in the same order. So each rank also makes the graphs
of the rank that is first along every axis, which holds the largest shards, and of the one that is last, which holds the
smallest; a node's record names its counterparts there (`NodeInfo.ends`), and choices go by them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from wholestep.ir import Pass, StepGraph, info, set_info

aten = torch.ops.aten

# What one rank makes of a value where another one copies it, or takes it as it is.
COPIES = (aten.clone.default, aten.constant_pad_nd.default, aten.full_like.default, aten.new_zeros.default)


def on_largest(node: fx.Node) -> torch.Tensor:
    """The value of a node on the rank with the largest shards."""
    return info(_end(node, 0)).value  # type: ignore[no-any-return]


def on_smallest(node: fx.Node) -> torch.Tensor:
    """The value of a node on the rank with the smallest shards."""
    return info(_end(node, 1)).value  # type: ignore[no-any-return]


def _end(node: fx.Node, which: int) -> fx.Node:
    ends = info(node).ends
    return node if ends is None else ends[which]


def in_lockstep(step: StepGraph, own: Sequence[Pass], first: Sequence[Pass], last: Sequence[Pass]) -> list[Pass]:
    """The passes of this rank for a step. Once its shards are uneven, each runs for three ranks, whose graphs it sees.

    Args:
        own, first, last: as many passes of this rank, of the first one along every axis, and of the last.
    """
    others: list[StepGraph] = []  # of the first rank, and of the last, from the first uneven one on

    def run(index: int, one: StepGraph) -> StepGraph:
        made = own[index](one)
        if others:
            others[:] = [passes[index](other) for passes, other in zip((first, last), others, strict=True)]
        elif made.signature.uneven:
            others[:] = [functools.reduce(lambda s, run: run(s), passes[: index + 1], step) for passes in (first, last)]
        if not others:
            return made
        if index == len(own) - 1:
            return with_counterparts(made)
        for each in (made, *others):
            with_counterparts(each, *others)
        return made

    return [functools.wraps(getattr(p, "func", p))(functools.partial(run, i)) for i, p in enumerate(own)]


def with_counterparts(step: StepGraph, *others: StepGraph) -> StepGraph:
    """Writes the counterparts of each node into its record; none without other graphs, or where these differ."""
    pairs = [_counterparts(step, other) for other in others]
    for node in step.graph.nodes:
        if node.op != "output":
            set_info(node, replace(info(node)))
            if pairs and all(node in found for found in pairs):
                info(node).ends = pairs[0][node], pairs[1][node]
    return step


def _counterparts(step: StepGraph, other: StepGraph) -> dict[fx.Node, fx.Node]:
    """Nodes of one graph -> the same of another rank's; copies that only one of them makes have none."""
    found, theirs = {}, deque(other.graph.nodes)
    for node in step.graph.nodes:
        copied = node.target in COPIES
        while theirs and theirs[0].target in COPIES and not copied:
            theirs.popleft()
        here = (node.op, node.target)
        if theirs and ((theirs[0].op, theirs[0].target) == here or (copied and theirs[0].target in COPIES)):
            found[node] = theirs.popleft()
        elif not copied:
            return {}
    return {} if theirs else found
