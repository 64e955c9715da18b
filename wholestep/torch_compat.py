"""The only file that touches private names of torch. Seen in torch 2.11 to 2.13.

Each name says what it is for; `tests/test_torch_compat.py` fails when one of them moves.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "below_autograd", "dispatch_modes_active", "has_native_kernel", "set_versions"]


def below_autograd() -> object:
    """Context manager: operators skip the autograd and version-counter layers of the dispatcher."""
    return torch._C._AutoDispatchBelowAutograd()


def has_native_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    """True when an overload has a kernel of its own for dispatch key ``key`` ("CPU", "CUDA")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets version counters, as in-place calls would have left them."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


# comm/ ------------------------------------------------------------------------------------------------------------


def dispatch_modes_active() -> bool:
    """True inside a `TorchDispatchMode`: a recorder, or a fake-tensor mode, sees every call."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)
