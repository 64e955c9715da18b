"""What autograd says of a tensor: its flags, its version counter, and who shares that."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.torch_compat import is_one_of_several, set_versions


def facts_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What autograd knows of a tensor, in the words of `Slot`."""
    inference, several, leaf = tensor.is_inference(), is_one_of_several(tensor), is_leaf(tensor)
    return {
        "requires_grad": tensor.requires_grad,
        "leaf": bool(leaf),
        "version": 0 if inference else tensor._version,
        "is_view": tensor._is_view(),
        "inference": inference,
        "several": several,
        "outdated": several and leaf is None,
        "retains": tensor.retains_grad,
    }


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
    """Whether writes to an input leave a tensor's version alone, as for ``.data``."""
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
