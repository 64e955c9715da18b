"""Detached aliases: what takes the place of tensors with an autograd history while a step is traced.

A result of an earlier differentiable computation would lead autograd out of the step, into the graph behind it; an
in-place write would change that graph for good. So the step is given an alias: a tensor of the same memory whose
history begins at the step. A view of another tensor in reach is given a view of that one's alias, by `as_strided`.
Where the view has a history, gradients come by the operator that made it instead: the step may not read it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from wholestep.capture.snapshot.reachable import TensorInput
from wholestep.errors import UnsupportedError
from wholestep.torch_compat import behind


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


def refuse_outside(roots: Iterable[Any], inputs: Sequence[Any]) -> None:
    """Refuses gradients of the step's own backward to which the history of an alias's original would add.

    Args:
        roots: where the backward begins.
        inputs: what it differentiates, tensors or gradient edges; none where that is all that it comes by.

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
        self._tuples: dict[int, tuple[Any, Any]] = {}  # id of a tuple -> it, and what takes its place everywhere
        self._known = {id(f.tensor): f for f in tensors}
        self._hidden = Counter(id(f.tensor._base) for f in self._known.values() if f.tensor._base is not None)
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
        if base is not None and type(base.tensor) is torch.Tensor and not (base.tensor.requires_grad
                                                                             and base.tensor.is_leaf):
            whole = self._alias(base)
        else:
            whole = base.tensor if base is not None else tensor
        strided = base is not None and tensor.dtype == whole.dtype
        if strided:
            with torch.set_grad_enabled(tensor.requires_grad or not whole.requires_grad):
                alias = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        elif tensor.requires_grad:
            with torch.enable_grad():
                alias = HistoryRoot.apply(torch.zeros((), requires_grad=True), tensor.detach())  # type: ignore[no-untyped-call]
        else:
            alias = tensor.detach()
            alias = alias if tensor._base is None else alias.view_as(alias)  # what the step makes of it is its base's
        if not tensor.requires_grad and not alias.requires_grad:
            alias.grad = tensor.grad
        alias.__dict__ = vars(tensor)
        self.of[id(tensor)] = alias
        beginning: Any = alias.grad_fn if base is None else None
        if beginning is not None:
            beginning.alias, beginning.source, beginning.outside = weakref.ref(alias), found.source, _node(tensor)
        entangled = base is None and tensor._base is not None and self._hidden[id(tensor._base)] > 1
        unlike = strided and tensor.requires_grad
        self.found[id(alias)] = TensorInput(alias, found.source, found.kind, beginning, entangled, unlike=unlike)
        return alias

    def exchange(self, value: Any) -> Any:
        """A value with what has an alias replaced by it; tuples are made anew around theirs, others stay."""
        if id(value) in self.of:
            return self.of[id(value)]
        if not isinstance(value, tuple) or isinstance(value, torch.Size):
            return value
        if id(value) not in self._tuples:
            parts, kind = [self.exchange(item) for item in value], type(value)
            same = all(new is old for new, old in zip(parts, value, strict=True))
            made: Any = value if same else getattr(kind, "_make", kind)(parts)
            self._tuples[id(value)] = value, made
        return self._tuples[id(value)][1]


def _node(tensor: torch.Tensor) -> Any:
    """A tensor's container in the autograd graph; None for one that autograd lets nobody use."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
