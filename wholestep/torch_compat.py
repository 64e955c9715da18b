"""The only file that touches private names of torch. Seen in torch 2.11 to 2.13.

Each name says what it is for; `tests/test_torch_compat.py` fails when one of them moves.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "below_autograd", "has_native_kernel", "set_versions", "tensor_hooks"]


def below_autograd() -> object:
    """Context manager: operators skip the autograd and version-counter layers of the dispatcher."""
    return torch._C._AutoDispatchBelowAutograd()


def has_native_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    """True when an overload has a kernel of its own for dispatch key ``key`` ("CPU", "CUDA")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets version counters, as in-place calls would have left them."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


# --- capture ---------------------------------------------------------------------------------------------


def tensor_hooks(tensor: torch.Tensor) -> dict[str, object]:
    """A tensor's hook tables under the attribute names that set them again; None where no hook was ever added."""
    return {
        "_backward_hooks": tensor._backward_hooks,
        "_post_accumulate_grad_hooks": tensor._post_accumulate_grad_hooks,
    }
