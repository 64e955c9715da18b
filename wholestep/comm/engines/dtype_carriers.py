"""Reinterprets dtypes that the engines of torch.distributed do not support as ones that they do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wholestep.comm.engines.reference_reduce import fold
from wholestep.comm.reduce_op import RedOpType

# What every engine moves and reduces.
KNOWN = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64]
)
# Wide enough for any sum or product modulo the narrow type, and in the same order.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_SIGN = torch.tensor(-(2**63))


def movable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory, as bytes in one more dimension where the dtype is unknown: dim 0 keeps its rows."""
    return [one if one.dtype in KNOWN else one.unsqueeze(-1).view(torch.uint8) for one in tensors]


def reducible_as(tensor: torch.Tensor, kind: RedOpType) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A tensor that engines reduce in place of this one, and what brings the result back (None: it is this one)."""
    if tensor.dtype in KNOWN:
        return tensor, None
    if tensor.dtype in _WIDER:
        wide = tensor.to(_WIDER[tensor.dtype])
        return wide, lambda: _narrow(wide, tensor)
    if tensor.dtype is not torch.uint64:
        raise TypeError(f"{tensor.dtype} cannot be reduced: convert it to a wider type first")
    bits = tensor.view(torch.int64)
    if kind not in (RedOpType.MIN, RedOpType.MAX):
        return bits, None
    ordered = fold([bits, _SIGN], RedOpType.BXOR)  # with the top bit flipped, signed order is unsigned order
    return ordered, lambda: _narrow(fold([ordered, _SIGN], RedOpType.BXOR), bits)


def _narrow(wide: torch.Tensor, tensor: torch.Tensor) -> None:
    tensor.copy_(wide.to(tensor.dtype))
