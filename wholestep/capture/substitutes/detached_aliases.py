"""Detached aliases: what takes the place of tensors with an autograd history while a step is traced.

A result of an earlier differentiable computation would lead autograd out of the step, into the graph behind it; an
in-place write would change that graph for good. So the step is given an alias: a tensor of the same memory whose
history begins at the step. A view of another tensor in reach is given a view of that one's alias.

Gradients through a view are computed, and errors about it worded, by the operator that made it; `as_strided` would
reach the same elements by another one. Autograd's nodes say which it was, and with what arguments.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from wholestep.capture.snapshot.reachable import TensorInput
from wholestep.errors import UnsupportedError
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


class HistoryRoot(torch.autograd.Function):
    """Where the history of an alias begins: gradients of the step's own backward, or of what follows, end here.

    The node has attributes: ``alias``, a weak reference; ``source``; ``outside``, the node of the original.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _leads_outside(ctx)


def _leads_outside(beginning: Any) -> UnsupportedError:
    return UnsupportedError(
        f"a backward in the step leads into the computation that made {beginning.source} before the step",
        remedy="compute it inside of the step, pass it detached, or differentiate outside of the compiled function",
    )


def refuse_outside(roots: Iterable[Any], inputs: Sequence[Any], behind: Callable[..., Iterable[Any]]) -> None:
    """Refuses gradients of the step's own backward to which the history of an alias's original would add.

    Args:
        roots: where the backward begins.
        inputs: what it differentiates, tensors or gradient edges; none where that is all that it comes by.
        behind: gives the nodes that a backward from some roots may come by.

    Raises:
        UnsupportedError: one of the inputs is among what an original was made of.
    """
    ends = [getattr(i, "node", None) or (i if i.is_leaf else i.grad_fn) for i in inputs]
    wanted = {id(getattr(end, "outside", end)) for end in ends}
    for beginning in [node for node in behind(roots) if wanted and hasattr(node, "outside")]:
        others = wanted - {id(beginning.outside)}
        if any(id(getattr(node, "variable", node)) in others for node in behind([beginning.outside])):
            raise _leads_outside(beginning)


class DetachedAliases:
    """The aliases of one snapshot's tensors.

    Args:
        replaced: id of a module -> the module that takes its place.

    Attributes:
        of: id of an original -> its alias.
        found: id of an alias -> where its original was found.
    """

    def __init__(self, tensors: Iterable[TensorInput], replaced: Mapping[int, torch.nn.Module] | None = None) -> None:
        self.of: dict[int, Any] = dict(replaced or {})
        self.found: dict[int, TensorInput] = {}
        self._known = {id(f.tensor): f for f in tensors}
        views = [f for f in self._known.values() if f.tensor._base is not None]
        self._views = {_node(f.tensor): f for f in views}
        self._hidden = Counter(id(f.tensor._base) for f in views)
        for found in self._known.values():
            if self._needs(found.tensor):
                self._alias(found)

    def _needs(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_inference():
            return False
        if tensor._base is None or not torch.is_grad_enabled():
            return tensor._base is None and tensor.requires_grad and not tensor.is_leaf
        return (tensor.is_floating_point() or tensor.is_complex()) and not (tensor.requires_grad and tensor.is_leaf)

    def _alias(self, found: TensorInput) -> torch.Tensor:
        tensor = found.tensor
        if id(tensor) in self.of:
            return self.of[id(tensor)]  # type: ignore[no-any-return]
        base = self._known.get(id(tensor._base)) if tensor._base is not None else None
        above = self._above(tensor, base.tensor) if base is not None else None
        if above is not None:
            whole = self._alias(above)
        elif base is not None and type(base.tensor) is torch.Tensor and not (base.tensor.requires_grad
                                                                             and base.tensor.is_leaf):
            whole = self._alias(base)
        else:
            whole = base.tensor if base is not None else tensor
        if base is not None and tensor.dtype == whole.dtype:
            with torch.set_grad_enabled(tensor.requires_grad or not whole.requires_grad):
                alias = view_again(tensor, (above or base).tensor, whole)
        elif tensor.requires_grad:
            with torch.enable_grad():
                alias = HistoryRoot.apply(torch.zeros((), requires_grad=True), tensor.detach())  # type: ignore[no-untyped-call]
        else:
            alias = tensor.detach()
        alias.__dict__ = vars(tensor)
        self.of[id(tensor)] = alias
        beginning: Any = alias.grad_fn if base is None else None
        if beginning is not None:
            beginning.alias, beginning.source, beginning.outside = weakref.ref(alias), found.source, _node(tensor)
        entangled = base is None and tensor._base is not None and self._hidden[id(tensor._base)] > 1
        self.found[id(alias)] = TensorInput(alias, found.source, found.kind, beginning, entangled)
        return alias

    def _above(self, tensor: torch.Tensor, base: torch.Tensor) -> TensorInput | None:
        """Among the views of a base that the step is given, the nearest that a tensor is a view of in turn."""
        node = _node(tensor)
        while node is not None and node is not base.grad_fn and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
            if node in self._views and self._views[node].tensor._base is base:
                return self._views[node]
        return None

    def exchange(self, value: Any) -> Any:
        """A value with what has an alias replaced by it; tuples are made anew around theirs, others stay."""
        if id(value) in self.of:
            return self.of[id(value)]
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            parts = [self.exchange(item) for item in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            kind: Any = type(value)
            return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
        return value


def _node(tensor: torch.Tensor) -> Any:
    """A tensor's container in the autograd graph; None for one that autograd lets nobody use."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
