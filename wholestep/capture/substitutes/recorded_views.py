"""Views made again: of another tensor of the same memory, by the operators that made them.

Gradients through a view are computed, and errors about it worded, by the operator that made it; `as_strided` would
reach the same elements by another one. Autograd's nodes say which it was, and with what arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _dim(number: int) -> int:
    """A dimension as autograd's nodes show it, which is without sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _slice(x: torch.Tensor, node: Any, *_: Any) -> torch.Tensor:
    start, end = _dim(node._saved_start), _dim(node._saved_end)
    return torch.ops.aten.slice(x, _dim(node._saved_dim), start, end, node._saved_step)  # type: ignore[no-any-return]


# Name of a node -> the view of a tensor that it stands for. Called with the tensor, the node, the shape of its output,
# and which of its outputs is asked for.
MADE_BY: dict[str, Callable[[torch.Tensor, Any, Any, int], torch.Tensor]] = {
    "AliasBackward0": lambda x, node, shape, nr: torch.ops.aten.alias(x),
    "DiagonalBackward0": lambda x, node, shape, nr: x.diagonal(
        node._saved_offset, _dim(node._saved_dim1), _dim(node._saved_dim2)
    ),
    "ExpandBackward0": lambda x, node, shape, nr: x.expand(shape),
    "PermuteBackward0": lambda x, node, shape, nr: x.permute([_dim(d) for d in node._saved_dims]),
    "SelectBackward0": lambda x, node, shape, nr: x.select(_dim(node._saved_dim), _dim(node._saved_index)),
    "SliceBackward0": _slice,
    "SplitBackward0": lambda x, node, shape, nr: x.split(node._saved_split_size, _dim(node._saved_dim))[nr],
    "SqueezeBackward0": lambda x, node, shape, nr: x.squeeze(),
    "SqueezeBackward1": lambda x, node, shape, nr: x.squeeze(_dim(node._saved_dim)),
    "TBackward0": lambda x, node, shape, nr: x.t(),
    "TransposeBackward0": lambda x, node, shape, nr: x.transpose(_dim(node._saved_dim0), _dim(node._saved_dim1)),
    "UnbindBackward0": lambda x, node, shape, nr: x.unbind(_dim(node._saved_dim))[nr],
    "UnfoldBackward0": lambda x, node, shape, nr: x.unfold(
        _dim(node._saved_dimension), node._saved_size, node._saved_step
    ),
    "UnsqueezeBackward0": lambda x, node, shape, nr: x.unsqueeze(_dim(node._saved_dim)),
    "ViewBackward0": lambda x, node, shape, nr: x.view(shape),
}


def view_again(view: torch.Tensor, of: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What a view is of one tensor, of another that lies as that one does.

    Args:
        view: a view of ``of``, or of a view of it.
        whole: what stands for ``of``.

    Returns:
        By the operators that made the view where they are known and have gradients, else by `as_strided`.
    """
    path = _path(view, of)
    made = _follow(path, whole) if path else None
    if made is not None and _lie_alike(made, view):
        return made
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def _path(view: torch.Tensor, of: torch.Tensor) -> list[tuple[Any, int]]:
    """The nodes between two tensors, the first made first, with the number of the output used; none if unknown."""
    path: list[tuple[Any, int]] = []
    try:
        node, nr, end = view.grad_fn, view.output_nr, of.grad_fn
    except RuntimeError:  # a view that autograd lets nobody use
        return []
    while node is not None and node is not end:
        if getattr(node, "variable", None) is of:
            return path[::-1]
        if node.name() not in MADE_BY or len(node.next_functions) != 1:
            return []
        path.append((node, nr))
        node, nr = node.next_functions[0]
    return path[::-1] if node is not None else []


def _follow(path: list[tuple[Any, int]], tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        for node, nr in path:
            tensor = MADE_BY[node.name()](tensor, node, node._input_metadata[nr].shape, nr)
    except (RuntimeError, AttributeError, IndexError):
        return None
    return tensor


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.stride() == other.stride()
    return alike and one.storage_offset() == other.storage_offset() and one.dtype == other.dtype
