"""What kernels refuse and fake tensors of some versions of torch (2.11, 2.12) let pass, refused in eager's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

NAMES = {torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
         torch.bool: "Bool", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float",
         torch.float64: "Double"}  # fmt: skip


def _select(tensor: torch.Tensor, dim: int, index: int) -> None:
    size = tensor.size(dim) if tensor.dim() else 0
    if tensor.dim() and type(size) is int and type(index) is int and not -size <= index < size:
        shape, place = list(tensor.shape), dim % tensor.dim()
        what = f"select(): index {index} out of range for tensor of size {shape} at dimension {place}"
        raise IndexError(what)


def _divide(tensor: torch.Tensor, other: Any, rounding_mode: str | None = None) -> None:
    """True division of whole numbers gives fractions, for which an integer tensor has no place."""
    if tensor.is_floating_point() or tensor.is_complex() or rounding_mode is not None:
        return
    given = other.dtype if isinstance(other, torch.Tensor) else torch.get_default_dtype()
    found = NAMES.get(given if given.is_floating_point else torch.get_default_dtype())
    if found and tensor.dtype in NAMES and not given.is_complex:
        raise RuntimeError(f"result type {found} can't be cast to the desired output type {NAMES[tensor.dtype]}")


CHECKS: dict[Any, Callable[..., None]] = {
    aten.select.int: _select,
    aten.div_.Scalar: _divide,
    aten.div_.Tensor: _divide,
}
