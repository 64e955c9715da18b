"""Reduction operators with the names and the comparison rules of `torch.distributed.ReduceOp`."""

from __future__ import annotations

import enum
from typing import Any

import torch


class RedOpType(enum.Enum):
    """The kinds of reduction. A member equals only itself: ``ReduceOp(SUM) == SUM`` but ``SUM != ReduceOp(SUM)``."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self.value)


class _Kinds(type):
    """Makes `ReduceOp.SUM` an instance of `ReduceOp`, although it is a plain enum member."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is RedOpType or super().__instancecheck__(instance)


class ReduceOp(metaclass=_Kinds):
    """A reduction: a kind, and for PREMUL_SUM the factor each rank's tensor is multiplied by first.

    AVG of integers rounds towards zero. MIN and MAX of floats pass NaN on.
    """

    SUM = RedOpType.SUM
    AVG = RedOpType.AVG
    PRODUCT = RedOpType.PRODUCT
    MIN = RedOpType.MIN
    MAX = RedOpType.MAX
    BAND = RedOpType.BAND
    BOR = RedOpType.BOR
    BXOR = RedOpType.BXOR
    PREMUL_SUM = RedOpType.PREMUL_SUM

    def __init__(self, kind: RedOpType | ReduceOp, factor: float | torch.Tensor | None = None) -> None:
        self.kind: RedOpType = kind if isinstance(kind, RedOpType) else kind.kind
        self.factor: float | torch.Tensor | None = factor if isinstance(kind, RedOpType) else kind.factor

    def __eq__(self, other: object) -> bool:
        if type(other) is RedOpType:
            return self.kind is other
        if type(other) is not ReduceOp:
            return False
        return self.kind is other.kind and bool(self.factor == other.factor)

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.kind.name}" + (f"({self.factor})" if self.factor is not None else "")


def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """PREMUL_SUM: every rank's tensor times ``factor`` (a number, or a tensor of one element), then summed."""
    return ReduceOp(RedOpType.PREMUL_SUM, factor)


def as_op(op: Any) -> tuple[RedOpType, float | torch.Tensor | None]:
    """Kind and factor of a `ReduceOp`, a kind or its lower-case name ("sum", "mean" for AVG, "premul_sum:0.5").

    Raises:
        ValueError: the name is not that of a reduction.
    """
    if type(op) is RedOpType:
        return op, None
    if type(op) is ReduceOp:
        return op.kind, op.factor
    name, colon, factor = op.partition(":") if isinstance(op, str) else (op, "", "")
    try:
        return RedOpType({"mean": "avg"}.get(name, name)), float(factor) if colon else None
    except ValueError:
        names = ", ".join(kind.value for kind in RedOpType)
        raise ValueError(f"unknown reduction {op!r}: one of {names}, mean, premul_sum:FACTOR is required") from None
