"""The only file that touches private names of torch. Seen in torch 2.11 to 2.13.

Each name says what it is for; `tests/test_torch_compat.py` fails when one of them moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "below_autograd",
    "compile_with_inductor",
    "direct_call",
    "has_native_kernel",
    "set_versions",
]


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


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], mode: FakeTensorMode
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Inductor's code for a graph of pure ATen calls: decomposed first, then compiled.

    Args:
        gm: placeholders and ATen calls only.
        inputs: fake tensors of ``mode``, one for each placeholder.
        mode: what the graph's values were made in.

    Returns:
        A callable from a list of tensors, which it empties, to the flat outputs.

    Inductor is loaded here, by name: it takes a second and loads much that no other backend needs.
    """
    inductor = importlib.import_module("torch._inductor.compile_fx")
    table = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    virtualized = importlib.import_module("torch._inductor.virtualized").V
    with torch.no_grad(), mode:
        plain = make_fx(gm, decomposition_table=table, tracing_mode="real")(*inputs)
    with torch.no_grad(), virtualized.set_fake_mode(mode):
        return inductor.compile_fx_inner(plain, list(inputs))  # type: ignore[no-any-return]
