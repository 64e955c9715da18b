"""Keeps hooks of leaves quiet that a backward of some of a program's results does not lead to.

The engine calls the hooks of a leaf also where a node gives it None. A program is one node for all of its results; in
eager nothing leads from a result to the leaves of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from wholestep.torch_compat import HOOK_TABLES, at_end_of_backward


class _IfReached:
    """A hook that is called with a gradient, or with a leaf whose gradient is another than now."""

    def __init__(self, hook: Any, leaf: torch.Tensor) -> None:
        self.hook, self._leaf, self._before = hook, leaf, _place(leaf.grad)

    def __call__(self, value: torch.Tensor | None) -> Any:
        if value is None or (value is self._leaf and _place(value.grad) == self._before):
            return None
        return self.hook(value)


def _place(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), grad._version)


def quiet(node: Any, places: Iterable[int]) -> None:
    """Until the running backward ends, hooks of the leaves at some places of a node are called with gradients alone."""
    edges = node.next_functions
    leaves: list[Any] = [getattr(edges[place][0], "variable", None) for place in places]
    tables = [(leaf, table) for leaf in leaves for name in HOOK_TABLES if (table := getattr(leaf, name, None))]
    for leaf, table in tables:
        table.update({key: hook if type(hook) is _IfReached else _IfReached(hook, leaf) for key, hook in table.items()})
    if tables:
        at_end_of_backward(partial(_restore, [table for _, table in tables]))


def _restore(tables: list[dict[int, Any]]) -> None:
    for table in tables:
        table.update({key: hook.hook for key, hook in table.items() if type(hook) is _IfReached})
