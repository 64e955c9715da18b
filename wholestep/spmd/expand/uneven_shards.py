"""Uneven sharding: every rank plans for the largest and the smallest shard, so that all emit the same collectives.

What a plan does along an axis depends on sizes. Where the axes before have sharded dimensions unevenly, sizes differ
from rank to rank, while all ranks must issue the same collectives in the same order. So each rank also makes the graphs
of the rank that is first along every axis, which holds the largest shards, and of the one that is last, which holds the
smallest; a node's record names its counterparts there (`NodeInfo.ends`), and choices go by them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from wholestep.ir import Pass, StepGraph, info, set_info

aten = torch.ops.aten

# What one rank makes of a value where another one copies it, or takes it as it is.
COPIES = (aten.clone.default, aten.constant_pad_nd.default, aten.full_like.default, aten.new_zeros.default)

Pairs = dict[fx.Node, fx.Node]


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
            return without_counterparts(made)
        for each in (made, *others):
            with_counterparts(each, *others)
        return made

    return [functools.wraps(getattr(p, "func", p))(functools.partial(run, i)) for i, p in enumerate(own)]


def with_counterparts(step: StepGraph, first: StepGraph, last: StepGraph) -> StepGraph:
    """Writes the counterparts of each node into its record; none where the graphs do not correspond."""
    of_first, of_last = _counterparts(step, first), _counterparts(step, last)
    if of_first is None or of_last is None:
        return without_counterparts(step)
    for node in step.graph.nodes:
        if node.op != "output":
            ends = (of_first[node], of_last[node]) if node in of_first and node in of_last else None
            set_info(node, replace(info(node), ends=ends))
    return step


def without_counterparts(step: StepGraph) -> StepGraph:
    """Lets go of other ranks' graphs."""
    for node in step.graph.nodes:
        if node.op != "output" and info(node).ends is not None:
            set_info(node, replace(info(node), ends=None))
    return step


def _counterparts(step: StepGraph, other: StepGraph) -> Pairs | None:
    """Nodes of one graph -> the same of another rank's; copies that only one of them makes have none."""
    found: Pairs = {}
    theirs = iter([*other.graph.nodes, None])
    counterpart = next(theirs)
    for node in step.graph.nodes:
        while counterpart is not None and counterpart.target in COPIES and node.target not in COPIES:
            counterpart = next(theirs)
        copied = node.target in COPIES
        if counterpart is None or (counterpart.op, counterpart.target) != (node.op, node.target):
            if not copied:
                return None
            if counterpart is None or counterpart.target not in COPIES:
                continue
        found[node] = counterpart
        counterpart = next(theirs)
    return found if counterpart is None else None
