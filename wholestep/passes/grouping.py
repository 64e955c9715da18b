"""Groups of calls that can run as one: no path from one of a group to another leads through a call outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, info, is_effectful

Beside = Callable[[fx.Node], Iterable[fx.Node]]


def grouped(
    calls: list[fx.Node], keys: Mapping[fx.Node, Any], read: Beside, readers: Beside, near: Beside,
    joins: Callable[[fx.Node], bool] = lambda node: False,
) -> list[list[fx.Node]]:  # fmt: skip
    """Groups of calls of one key that are near each other; each group, and all of them, in the order of the graph.

    Args:
        calls: of the graph, in order.
        keys: of those that may be in groups.
        read, readers: whose results a call reads, and which calls read its result.
        near: which others a call would be in a group with.
        joins: whether a call would be with all others of its kind, wherever they are.
    """
    level, group = _levels(calls, keys, read, readers), dict[fx.Node, list[fx.Node]]()
    firsts: dict[Any, fx.Node] = {}
    for node in (call for call in calls if call in keys):
        mine, place = [node], (keys[node], level[node])
        group[node] = mine
        for other in (*near(node), *([firsts.setdefault(place, node)] if joins(node) else [])):
            if other in group and (keys[other], level[other]) == place and group[other] is not mine:
                group[other] += mine
                group.update(dict.fromkeys(mine, group[other]))
                mine = group[other]
    return [sorted(members) for members in {id(members): members for members in group.values()}.values()]


def _levels(calls: list[fx.Node], keys: Mapping[fx.Node, Any], read: Beside, readers: Beside) -> dict[fx.Node, int]:
    """How often the longest path to each call enters groups, or could where that makes it one with its reader.

    Along a path that leaves a group and comes back it rises, so that calls of one key and one level can be joined.
    Effects count as if each read the one before.
    """
    levels: dict[fx.Node, int] = {}

    def enters(base: fx.Node, node: fx.Node) -> bool:
        return node in keys and keys.get(base) != keys[node]

    effects = -1
    for node in calls:
        levels[node] = max((levels[base] + enters(base, node) for base in read(node) if base in levels), default=0)
        if is_effectful(node):
            effects = levels[node] = max(levels[node], effects)
    for node in reversed(calls):
        if node in keys and node.target is not GETITEM and isinstance(info(node).value, torch.Tensor):
            after = [reader for reader in readers(node) if reader in levels]
            latest = min((levels[reader] - enters(node, reader) for reader in after), default=0)
            if any(levels[reader] == latest and keys.get(reader) == keys[node] for reader in after):
                levels[node] = max(levels[node], latest)
    return levels
