"""Views made again: of another tensor of the same memory, by the operators that made them.

Gradients through a view are computed, and errors about it worded, by the operator that made it; `as_strided` would
reach the same elements by another one. Autograd's nodes say which it was, and with what arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep.torch_compat import saved_numbers

aten = torch.ops.aten

# Name of a node -> the operator that makes such views, whose arguments the node has saved under their names.
MADE_BY: dict[str, Any] = {
    "AliasBackward0": aten.alias.default, "DiagonalBackward0": aten.diagonal.default,
    "ExpandBackward0": aten.expand.default, "PermuteBackward0": aten.permute.default,
    "SelectBackward0": aten.select.int, "SliceBackward0": aten.slice.Tensor, "SplitBackward0": aten.split.Tensor,
    "SqueezeBackward0": aten.squeeze.default, "SqueezeBackward1": aten.squeeze.dim, "TBackward0": aten.t.default,
    "TransposeBackward0": aten.transpose.int, "UnbindBackward0": aten.unbind.int,
    "UnfoldBackward0": aten.unfold.default, "UnsqueezeBackward0": aten.unsqueeze.default,
    "ViewBackward0": aten.view.default,
}  # fmt: skip


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
            operator = MADE_BY[node.name()]
            if operator in (aten.view.default, aten.expand.default):
                found = operator(tensor, node._input_metadata[nr].shape)
            else:
                saved = [(saved_numbers(node, given.name), given.type) for given in operator._schema.arguments[1:]]
                found = operator(tensor, *(n if "List" in str(kind) else n[0] for n, kind in saved))
            tensor = found if isinstance(found, torch.Tensor) else found[nr]
    except (RuntimeError, AttributeError, IndexError):
        return None
    return tensor


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.stride() == other.stride()
    return alike and one.storage_offset() == other.storage_offset() and one.dtype == other.dtype
