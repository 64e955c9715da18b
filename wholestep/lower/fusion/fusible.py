"""Fusible calls: which elementwise calls may run together over tiles of big tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.functional import base_name
from wholestep.ir import info
from wholestep.lower.plan.operator_facts import aten, inplace_variant, is_pointwise, out_variant

TILE = 1 << 16  # elements of one tile: 256 KB a tensor in float32, so that a chain's tensors stay in the cache
TILE_FROM = 1 << 18  # elements from which a chain is tiled: 1 MB in float32

# Operators that may be tiled if their vector and scalar code agree (see `_same_bits`).
TILE_OPS = {
    "add", "sub", "mul", "div", "neg", "abs", "sqrt", "lerp", "addcmul", "addcdiv", "maximum", "minimum",
    "relu", "threshold_backward", "clamp_min", "clamp_max", "where",
}  # fmt: skip


def tileable(node: fx.Node) -> bool:
    """True for elementwise calls over big contiguous CPU tensors of one shape (and single numbers)."""
    value, op = info(node).value, node.target
    if not is_pointwise(op) or not isinstance(value, torch.Tensor) or base_name(op) not in TILE_OPS:  # type: ignore[arg-type]
        return False
    if value.numel() < TILE_FROM or value.device.type != "cpu" or not value.is_contiguous():
        return False
    if value.dtype not in (torch.float32, torch.float64) or node.kwargs.get("alpha", 1) != 1:
        return False
    for operand in (info(o).value for o in node.all_input_nodes):
        if isinstance(operand, torch.Tensor) and operand.dim():
            if operand.shape != value.shape or not operand.is_contiguous() or operand.device.type != "cpu":
                return False
        elif not isinstance(operand, (torch.Tensor, int, float)):
            return False
    writable = out_variant(op, "CPU") is not None or inplace_variant(op) is not None  # type: ignore[arg-type]
    return writable and _same_bits(op, node)


_SAME_BITS: dict[Any, bool] = {}


def _same_bits(op: Any, node: fx.Node) -> bool:
    """True when an operator's vector code and the scalar code of its loop ends agree bit by bit.

    Tiles put the loop's end elsewhere than the whole tensor does. Tried once per operator and dtypes, on
    4096 random values, whole against slices shorter than a vector.
    """
    values = [info(a).value if isinstance(a, fx.Node) else a for a in node.args]
    key = (op, *((v.dtype, v.dim() > 0) if isinstance(v, torch.Tensor) else type(v) for v in values))
    if key not in _SAME_BITS:
        generator = torch.Generator().manual_seed(0)
        low = 0.1 if op is aten.sqrt.default else -0.5
        trial: list[Any] = [0.37 if isinstance(a, fx.Node) else a for a in node.args]
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                trial[index] = (torch.rand(4096, generator=generator) + low).to(value.dtype)
                trial[index] = trial[index] if value.dim() else trial[index][0]
        keywords = {k: 0.37 if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()}
        parts = [
            op(*[a[i : i + 7] if isinstance(a, torch.Tensor) and a.dim() else a for a in trial], **keywords)
            for i in range(0, 4096, 7)
        ]
        _SAME_BITS[key] = bool(torch.equal(op(*trial, **keywords), torch.cat(parts)))
    return _SAME_BITS[key]
