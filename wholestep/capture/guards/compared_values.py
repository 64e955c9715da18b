"""What of the world is compared by value: plain values, the metadata of tensors, the settings of torch."""

from __future__ import annotations

import datetime
import enum
import math
import uuid
from dataclasses import is_dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from re import Pattern
from typing import Any

import numpy
import torch

from wholestep.torch_compat import attention_kernels, default_device, einsum_flags, global_hooks

PLAIN: tuple[type, ...] = (
    int, float, bool, str, bytes, complex, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum,
    numpy.generic, Fraction, Decimal, PurePath, Pattern, uuid.UUID,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
)
EXACT_PLAIN = frozenset(PLAIN)
_SMALLEST = math.ulp(0)  # which is zero in products where denormal numbers are flushed
META = ("type", "dtype", "device", "layout", "requires_grad", "is_leaf", "shape", "stride")


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a captured program relies on in a tensor, in the order of `META`."""
    strided = tensor.layout == torch.strided
    return (type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf,
            tensor.shape, tensor.stride() if strided else None)


def global_state() -> tuple[Any, ...]:
    """The settings of torch that change what a step computes, in the order of `guards.STATE_NAMES`."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), default_device(), torch.are_deterministic_algorithms_enabled(),
        einsum_flags(), global_hooks(), attention_kernels(), _SMALLEST * 1.0 == 0,
    )


def is_plain(value: Any) -> bool:
    """True for immutable values that a guard compares by value."""
    if type(value) is slice and not (is_plain(value.start) and is_plain(value.stop) and is_plain(value.step)):
        return False  # of tensors: another object in each call
    return type(value) in EXACT_PLAIN or issubclass(type(value), PLAIN)  # a host number says it is a float


def is_data(value: Any) -> bool:
    """True for plain values and classes, and containers and records of nothing but these."""
    if is_dataclass(type(value)):
        value = getattr(value, "__dict__", {})
    if type(value) is dict:
        value = [*value.values()]
    nested = type(value) in (list, tuple, set) and all(map(is_data, value))
    return nested or is_plain(value) or isinstance(value, type)


def is_one_of_a_kind(kind: type) -> bool:
    """True for classes (the package's own) whose instances are not looked into but told apart by identity."""
    return bool(getattr(kind, "guard_identity", False))
