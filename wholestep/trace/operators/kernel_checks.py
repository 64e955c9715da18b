"""What kernels refuse, in their words: where fake tensors use others, and where those of some versions of torch (2.11,
2.12) let it pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.fake_layouts import NoStandIn, stand_ins
from wholestep.torch_compat import OpOverload, no_modes
from wholestep.trace.functionalize.aliases import Geometry, elements

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


def _index_fill(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> None:
    """Along a dimension without places kernels refuse any index, for the memory that one place would need."""
    shape, stride, at = list(tensor.shape), list(tensor.stride()), dim % max(tensor.dim(), 1)
    if 0 not in shape or shape[at] != 0 or shape.count(0) > 1 or not index.numel():
        return
    there = tensor.untyped_storage().nbytes() // tensor.element_size()
    with no_modes():
        alike = torch.empty(there, dtype=tensor.dtype).as_strided(shape, stride, tensor.storage_offset())
        alike.index_fill_(dim, torch.zeros(index.numel(), dtype=torch.long), 0)


def _index_fill_copy(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> None:
    """`index_fill` writes to a copy, which has no memory at all."""
    with no_modes():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype) if 0 in tensor.shape else None
    if copy is not None:
        _index_fill(copy, dim, index, value)


def check_view(place: Geometry, shape: Sequence[int]) -> None:
    """Eager's error for a shape that a tensor cannot be seen in; fakes of expanded and of overlapping ones give one."""
    with no_modes():
        torch.empty_strided(place.shape, place.stride, device="meta").view(shape)


def check_strided(
    tensor: torch.Tensor, memory: torch.Tensor, shape: Any, stride: Any, storage_offset: int | None = None
) -> None:
    """Eager's error for elements outside of the memory, which is that of another tensor; fakes give them."""
    start = tensor.storage_offset() if storage_offset is None else storage_offset
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    there = memory.untyped_storage().nbytes() // tensor.element_size()
    if last >= there and elements(shape):
        with no_modes():
            torch.empty(there, dtype=tensor.dtype).as_strided(shape, stride, start)


def _grouped_mm(*args: Any, **kwargs: Any) -> None:
    """Types and strides that the kernel takes."""
    said = kernels_error(aten._grouped_mm.default, args, kwargs)
    if said is not None:
        raise said


CHECKS: dict[Any, Callable[..., None]] = {
    aten.select.int: _select,
    aten.div_.Scalar: _divide,
    aten.div_.Tensor: _divide,
    aten._grouped_mm.default: _grouped_mm,
    **dict.fromkeys((aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor), _index_fill),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), _index_fill_copy),
}


def kernels_error(func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """What eager raises where an operator has failed on fake tensors: its kernel is tried on real ones."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    with no_modes():
        try:
            func(*stand_ins(args), **stand_ins(kwargs))
        except NoStandIn:
            return None
        except Exception as error:
            return error.with_traceback(None)
    return None
