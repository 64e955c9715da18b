"""The only file that touches private names of torch. Seen in torch 2.11 to 2.13.

Each name says what it is for; `tests/test_torch_compat.py` fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "below_autograd", "direct_call", "has_native_kernel", "set_versions"]


def below_autograd() -> object:
    """Context manager: operators skip the autograd and version-counter layers of the dispatcher."""
    return torch._C._AutoDispatchBelowAutograd()


def has_native_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    """True when an overload has a kernel of its own for dispatch key ``key`` ("CPU", "CUDA")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets version counters, as in-place calls would have left them."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


# For lower/


def direct_call(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The C++ entry of an overload, without the Python frame around it (1.7 instead of 2.1 µs a call)."""
    return op._op
