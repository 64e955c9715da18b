"""The only file that touches private names of torch. Seen in torch 2.11 to 2.13.

Each name says what it is for; `tests/test_torch_compat.py` fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "below_autograd", "direct_call", "has_native_kernel", "set_versions"]


def below_autograd() -> object:
    """Context manager: operators skip the autograd and version-counter layers of the dispatcher."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def has_native_kernel(op: OpOverload, key: str) -> bool:
    """True when an overload has a kernel of its own for dispatch key ``key`` ("CPU", "CUDA")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets version counters, as in-place calls would have left them."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def current_autograd_node() -> object | None:
    """The autograd node that the engine is running on this thread, if any."""
    return torch._C._current_autograd_node()  # type: ignore[attr-defined, no-any-return]


def sequence_number() -> int:
    """The number that autograd gives to the next node it makes."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


# What fake tensors raise when a result's shape or value depends on data, or an operator has no fake rule.
FAKE_ERRORS: tuple[type[Exception], ...] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


@contextmanager
def no_modes() -> Iterator[None]:
    """Real execution inside of a trace: no dispatch mode, no function mode, no gradient."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield
# --- capture ---------------------------------------------------------------------------------------------


def tensor_hooks(tensor: torch.Tensor) -> dict[str, object]:
    """A tensor's hook tables under the attribute names that set them again; None where no hook was ever added."""
    return {
        "_backward_hooks": tensor._backward_hooks,
        "_post_accumulate_grad_hooks": tensor._post_accumulate_grad_hooks,
    }


# Types for which torch.optim and the gradient clipping functions choose their foreach forms.
FOREACH_TYPES: list[type] = _foreach_utils._foreach_supported_types
# For lower/


def direct_call(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The C++ entry of an overload, without the Python frame around it (1.7 instead of 2.1 µs a call)."""
    return op._op
