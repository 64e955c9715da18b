"""Nested values: the leaves of lists, tuples and dicts, and what a function makes of them.

May import: nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to the leaves of nested lists, tuples and dicts."""
    kind = type(tree)  # not `isinstance`: that asks what is no container for its `__class__`, in Python
    if issubclass(kind, tuple) and kind is not torch.Size:
        return tuple([map_leaves(function, item) for item in tree])
    if issubclass(kind, list):
        return [map_leaves(function, item) for item in tree]
    if issubclass(kind, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if issubclass(type(tree), (tuple, list, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(item)
    else:
        yield tree


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the leaves."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
