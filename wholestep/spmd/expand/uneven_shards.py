"""Ranks that hold unequal parts decide alike: each knows what those with the largest and the smallest parts hold.

What a plan does along an axis depends on sizes. Where the axes before have cut dimensions into unequal pieces, sizes
differ from rank to rank, while all ranks must issue the same collectives in the same order. So each rank also makes the
graphs of the rank that is first along every axis, which holds the largest parts, and of the one that is last, which
holds the smallest; a node's record names its likes there (`NodeInfo.ends`), and choices go by them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from wholestep.ir import Pass, StepGraph, info, set_info

aten = torch.ops.aten

# What one rank makes of a value where another one copies it, or takes it as it is.
COPIES = (aten.clone.default, aten.constant_pad_nd.default, aten.full_like.default, aten.new_zeros.default)

Pairs = dict[fx.Node, fx.Node]


def most(node: fx.Node) -> torch.Tensor:
    """The value of a node on the rank with the largest parts."""
    return info(_end(node, 0)).value  # type: ignore[no-any-return]


def least(node: fx.Node) -> torch.Tensor:
    """The value of a node on the rank with the smallest parts."""
    return info(_end(node, 1)).value  # type: ignore[no-any-return]


def _end(node: fx.Node, which: int) -> fx.Node:
    ends = info(node).ends
    return node if ends is None else ends[which]


@dataclass(frozen=True)
class Trio:
    """The same passes for three ranks: this one, the first along every axis, and the last.

    Attributes:
        own, first, last: as many of each.
    """

    own: tuple[Pass, ...]
    first: tuple[Pass, ...]
    last: tuple[Pass, ...]

    def applied_to(self, step: StepGraph) -> tuple[list[Pass], Callable[[], StepGraph]]:
        """The passes of this rank for a step; and what gives the graph of the first one after them."""

        @functools.cache
        def made(passes: tuple[Pass, ...], count: int) -> StepGraph:
            return passes[count - 1](given(passes, count - 1)) if count else step

        @functools.cache
        def given(passes: tuple[Pass, ...], count: int) -> StepGraph:
            return self._with_likes(made(passes, count), count, made)

        def known(index: int) -> Pass:
            @functools.wraps(getattr(self.own[index], "func", self.own[index]))
            def run(one: StepGraph) -> StepGraph:
                return self._with_likes(self.own[index](one), index + 1, made)

            return run

        return list(map(known, range(len(self.own)))), functools.partial(made, self.first, len(self.own))

    def _with_likes(self, step: StepGraph, count: int, made: Callable[[tuple[Pass, ...], int], StepGraph]) -> StepGraph:
        """A step after so many passes as the next one wants it: where it is uneven, with its likes."""
        if not step.signature.uneven:
            return step
        if count == len(self.own):
            return without_ends(step)
        return with_ends(step, made(self.first, count), made(self.last, count))


def with_ends(step: StepGraph, first: StepGraph, last: StepGraph) -> StepGraph:
    """Writes the likes of each node into its record. Without any where graphs are no likes of each other."""
    of_first, of_last = _likes(step, first), _likes(step, last)
    if of_first is None or of_last is None:
        return without_ends(step)
    for node in step.graph.nodes:
        if node.op != "output":
            ends = (of_first[node], of_last[node]) if node in of_first and node in of_last else None
            set_info(node, replace(info(node), ends=ends))
    return step


def without_ends(step: StepGraph) -> StepGraph:
    """Lets go of other ranks' graphs."""
    for node in step.graph.nodes:
        if node.op != "output" and info(node).ends is not None:
            set_info(node, replace(info(node), ends=None))
    return step


def _likes(step: StepGraph, other: StepGraph) -> Pairs | None:
    """Nodes of one graph -> the same of another rank's; copies that only one of them makes have none."""
    found: Pairs = {}
    theirs = iter([*other.graph.nodes, None])
    like = next(theirs)
    for node in step.graph.nodes:
        while like is not None and like.target in COPIES and node.target not in COPIES:
            like = next(theirs)
        copied = node.target in COPIES
        if like is None or (like.op, like.target) != (node.op, node.target):
            if not copied:
                return None
            if like is None or like.target not in COPIES:
                continue
        found[node] = like
        like = next(theirs)
    return found if like is None else None
