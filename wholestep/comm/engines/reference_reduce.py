"""Reductions in their plainest form: the oracle of the native kernels, and what folds the parts that hosts exchange."""

from __future__ import annotations

import functools

import numpy
import torch

from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import RedOpType

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
HALVES = (torch.bfloat16, torch.float16)

# numpy reduces unsigned integers, too, which torch only stores
_FOLD: dict[RedOpType, numpy.ufunc] = {
    RedOpType.SUM: numpy.add,
    RedOpType.AVG: numpy.add,
    RedOpType.PREMUL_SUM: numpy.add,
    RedOpType.PRODUCT: numpy.multiply,
    RedOpType.MIN: numpy.minimum,
    RedOpType.MAX: numpy.maximum,
    RedOpType.BAND: numpy.bitwise_and,
    RedOpType.BOR: numpy.bitwise_or,
    RedOpType.BXOR: numpy.bitwise_xor,
}


def fold(parts: list[torch.Tensor], kind: RedOpType, out: torch.Tensor | None = None) -> torch.Tensor:
    """The parts folded in their order and dtype; AVG and PREMUL_SUM as SUM.

    Args:
        out: memory for the result of two parts, which may be that of one of them.
    """
    memory = out.detach().numpy() if out is not None and len(parts) == 2 else None
    arrays = [part.detach().cpu().numpy() for part in parts]
    total = functools.reduce(functools.partial(_FOLD[kind], out=memory), arrays)
    return torch.from_numpy(numpy.asarray(total)).to(parts[0].device)


def average(total: torch.Tensor, count: int) -> torch.Tensor:
    """A sum divided among ``count`` ranks; integers round towards zero."""
    if total.dtype in UNSIGNED:
        return torch.from_numpy(numpy.asarray(total.numpy() // count))
    exact = total.is_floating_point() or total.is_complex()
    return torch.div(total, count, rounding_mode=None if exact else "trunc")


def wide(part: torch.Tensor, opts: Options) -> torch.Tensor:
    """The tensor to reduce in: float32 for halves, multiplied for PREMUL_SUM; else the same."""
    if opts.op is RedOpType.PREMUL_SUM and opts.factor is not None:
        part = (part * opts.factor).to(part.dtype)
    return part.float() if part.dtype in HALVES else part


def naive_reduce(parts: list[torch.Tensor], opts: Options) -> torch.Tensor:
    """The parts folded in rank order; bf16 and fp16 in float32, rounded once."""
    total = fold([wide(part, opts) for part in parts], opts.op)
    return (average(total, len(parts)) if opts.op is RedOpType.AVG else total).to(parts[0].dtype)
