"""Reductions in their plainest form: the oracle of the native kernels, and what folds the parts that hosts exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import torch

from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import RedOpType

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # numpy reduces what torch only stores
HALVES = (torch.bfloat16, torch.float16)

_FOLD: dict[RedOpType, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
    RedOpType.SUM: (torch.add, numpy.add),
    RedOpType.AVG: (torch.add, numpy.add),
    RedOpType.PREMUL_SUM: (torch.add, numpy.add),
    RedOpType.PRODUCT: (torch.mul, numpy.multiply),
    RedOpType.MIN: (torch.minimum, numpy.minimum),
    RedOpType.MAX: (torch.maximum, numpy.maximum),
    RedOpType.BAND: (torch.bitwise_and, numpy.bitwise_and),
    RedOpType.BOR: (torch.bitwise_or, numpy.bitwise_or),
    RedOpType.BXOR: (torch.bitwise_xor, numpy.bitwise_xor),
}


def fold(parts: list[torch.Tensor], kind: RedOpType, out: torch.Tensor | None = None) -> torch.Tensor:
    """The parts folded in their order and dtype; AVG and PREMUL_SUM as SUM.

    Args:
        out: memory for the result, which may be that of one of two parts.
    """
    ours, numpys = _FOLD[kind]
    if parts[0].dtype in UNSIGNED:
        total = torch.from_numpy(numpy.asarray(functools.reduce(numpys, [part.numpy() for part in parts])))
        return total if out is None else out.copy_(total)
    if len(parts) == 1:
        return parts[0] if out is None else out.copy_(parts[0])
    total = ours(parts[0], parts[1], out=out if len(parts) == 2 else None)
    for part in parts[2:]:
        ours(total, part, out=total)
    return total if out is None or out is total else out.copy_(total)


def average(total: torch.Tensor, count: int) -> torch.Tensor:
    """A sum divided among ``count`` ranks; integers round towards zero."""
    if total.dtype in UNSIGNED:
        return torch.from_numpy(numpy.asarray(total.numpy() // count))
    exact = total.is_floating_point() or total.is_complex()
    return torch.div(total, count, rounding_mode=None if exact else "trunc")


def naive_reduce(parts: list[torch.Tensor], opts: Options) -> torch.Tensor:
    """The parts folded in rank order; bf16 and fp16 in float32, rounded once."""
    dtype = parts[0].dtype
    if opts.op is RedOpType.PREMUL_SUM and opts.factor is not None:
        parts = [(part * opts.factor).to(dtype) for part in parts]
    total = fold([part.float() for part in parts] if dtype in HALVES else parts, opts.op)
    return (average(total, len(parts)) if opts.op is RedOpType.AVG else total).to(dtype)
