"""What autograd knows of a tensor that outlives the step: its flags, its version counter, and who shares that."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wholestep.torch_compat import is_one_of_several, set_versions


@dataclass(frozen=True)
class TensorState:
    """Autograd's flags of one tensor, as eager leaves them.

    Attributes:
        leaf: whether it has no `grad_fn`; None for a tensor whose use autograd forbids.
        version: in-place writes that its version counter counts.
        is_view: whether autograd knows it as a view of another tensor.
        inference: whether it is an inference tensor, which has no counter.
        several: whether it is one of several views that one call made, as `split` does: autograd forbids writes.
        retains: whether it keeps its gradient, as `retain_grad()` asks for.
        parameter: whether it is a `torch.nn.Parameter`.
    """

    requires_grad: bool = False
    leaf: bool | None = True
    version: int = 0
    is_view: bool = False
    inference: bool = False
    several: bool = False
    retains: bool = False
    parameter: bool = False

    @property
    def outdated(self) -> bool:
        """Whether the base of one of several views was written since: autograd forbids to use the view."""
        return self.leaf is None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorState:
        """A tensor's state."""
        inference = tensor.is_inference()
        return cls(
            tensor.requires_grad,
            is_leaf(tensor),
            0 if inference else tensor._version,
            tensor._is_view(),
            inference,
            is_one_of_several(tensor),
            tensor.retains_grad,
            isinstance(tensor, torch.nn.Parameter),
        )


def is_leaf(tensor: torch.Tensor) -> bool | None:
    """As ``tensor.is_leaf``; None for a tensor whose use autograd forbids.

    Of several views that one call made, as `split` does, it forbids each one once their base was written by a value
    that requires grad.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None


def counts_alone(tensor: torch.Tensor, real: object) -> bool:
    """Whether writes to another tensor leave a tensor's version counter alone, as for ``.data``."""
    if tensor.is_inference():
        return True
    before = tensor._version
    if not isinstance(real, torch.Tensor) or real is tensor or real.is_inference():
        return True
    count = real._version
    torch.autograd.graph.increment_version(real)
    alone = tensor._version == before
    set_versions((real,), (count,))  # autograd refuses views of a tensor whose count has moved
    return alone
