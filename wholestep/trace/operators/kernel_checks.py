"""What kernels refuse, in their words: where fake tensors use others, and where those of some versions of torch (2.11,
2.12) let it pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.fake_layouts import CannotTry, scratch_tensors
from wholestep.torch_compat import OpOverload, no_modes
from wholestep.trace.functionalize.aliases import Geometry, elements

aten = torch.ops.aten


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


def check(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Raises what a kernel does where fake tensors would let its arguments pass."""
    divides = func in (aten.div_.Scalar, aten.div_.Tensor)  # which gives fractions, for which integers have no place
    if divides and not args[0].is_floating_point() and (said := kernels_error(func, args, kwargs)) is not None:
        raise said


def kernels_error(func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """What eager raises where an operator has failed on fake tensors: its kernel is tried on real ones."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    with no_modes():
        try:
            func(*scratch_tensors(args), **scratch_tensors(kwargs))
        except CannotTry:
            return None
        except Exception as error:
            return error.with_traceback(None)
    return None
