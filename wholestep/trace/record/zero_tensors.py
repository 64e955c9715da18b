"""Zeros without memory, which forward-mode autograd makes for tangents that are not there.

In eager the dispatcher has rules of its own for them: a product with one is one, even with infinity; a sum with one is
the other summand, with its signs of zero. C++ asks fake tensors what they are made of, so that in a trace they are
ordinary zeros, and the rules are applied here.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep.torch_compat import storage_id

aten = torch.ops.aten


class ZeroTensors:
    """Those of one trace, and all views of them."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def add(self, zeros: torch.Tensor) -> torch.Tensor:
        """Notes zeros that stand for one."""
        self._held[storage_id(zeros.untyped_storage())] = zeros
        return zeros

    def concern(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a rule of theirs says what ``func`` gives."""
        if not self._held or (func not in _PRODUCTS and func not in _SUMS and func is not _SAME_STORAGE):
            return False
        left, right = map(self._holds, args[:2])
        return left and not right if func is aten.div.Tensor else left or right

    def result(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor | bool:
        """What ``func`` gives by their rules. To be called with the recorder active."""
        one, two = args[:2]
        if func is _SAME_STORAGE:  # as the tangent of a tensor they become ordinary zeros, if it has several elements
            count, other = (1 if self._holds(a) else a.untyped_storage().nbytes() // a.element_size() for a in args)
            return count == other
        shape = torch.broadcast_shapes(one.shape, two.shape) if isinstance(two, torch.Tensor) else one.shape
        dtype, left = torch.result_type(one, two), self._holds(one)
        if func in _PRODUCTS or (left and self._holds(two)):
            return aten._efficientzerotensor.default(shape, dtype=dtype, device=one.device)
        summand = (two if left else one).expand(shape).to(dtype, copy=True)
        factor = _SUMS[func] * kwargs.get("alpha", 1) if left else 1
        return summand if factor == 1 else summand * factor

    def _holds(self, operand: Any) -> bool:
        strided = isinstance(operand, torch.Tensor) and operand.layout is torch.strided
        return strided and storage_id(operand.untyped_storage()) in self._held


_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.linalg_cross.default}
_SAME_STORAGE = aten._has_same_storage_numel.default
_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}  # with the sign of the second summand
