"""What of the world is compared: plain values, metadata and settings by value; in the fast path, identity in bulk.

`PersistentTensors` are the tensors of persistent objects, at the last call that passed.
"""

from __future__ import annotations

import datetime
import enum
import math
import uuid
import weakref
from array import array
from collections.abc import Callable
from dataclasses import is_dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import PurePath
from re import Pattern
from types import MethodType
from typing import Any

import numpy
import torch

from wholestep.capture.guards.bulk import native, recall
from wholestep.torch_compat import (
    address_of,
    attention_kernels,
    default_device,
    global_hooks,
    python_flags,
    replaced_kernels,
    setting_addresses,
)

PLAIN: tuple[type, ...] = (
    int, float, bool, str, bytes, complex, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum,
    numpy.generic, Fraction, Decimal, PurePath, Pattern, uuid.UUID,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
)
EXACT_PLAIN = frozenset(PLAIN)
BY_CONTENTS = (tuple, frozenset, MethodType)  # guarded wherever they are found: the same one elsewhere is by chance
_SMALLEST = math.ulp(0)  # which is zero in products where denormal numbers are flushed
# Types of the numbers that become inputs where they are others at a later call.
NUMBERS = (int, float, numpy.float64)
META = ("type", "dtype", "device", "layout", "requires_grad", "is_leaf", "shape", "stride")


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a captured program relies on in a tensor, in the order of `META`."""
    strided = tensor.layout == torch.strided
    return (type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf,
            tensor.shape, tensor.stride() if strided else None)


def settings() -> tuple[Any, ...]:
    """Those settings of torch that C++ has."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), attention_kernels(),
    )


def _modes() -> tuple[Any, ...]:
    """Those that Python has, and one of the processor's."""
    return default_device(), python_flags(), (*global_hooks(),), _SMALLEST * 1.0 == 0, replaced_kernels()


def global_state() -> tuple[Any, ...]:
    """The settings of torch that change what a step computes, in the order of `guards.STATE_NAMES`."""
    return *settings(), *_modes()


def quick_state() -> tuple[Any, ...]:
    """Equal where `global_state` is, and only there; in less time."""
    return quick_settings(), *_modes()


_FUNCTIONS = array("Q", [*chain.from_iterable(setting_addresses())]).tobytes()
quick_settings: Callable[[], Any] = partial(native.settings, _FUNCTIONS) if _FUNCTIONS else settings


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


def memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 for none (empty, meta, sparse)."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return address_of(tensor.untyped_storage())


def same_plain(found: Any, expected: Any) -> bool:
    """True for equal plain values of one type; 0.0 and -0.0 are two, NaN is one."""
    return found is expected or (type(found) is type(expected) and bool(found == expected) and
                                 (found != 0 or repr(found) == repr(expected)))


class PersistentTensors:
    """The tensors of persistent objects, at the last call that passed.

    Another tensor with equal metadata may take the container of one of them; `known` checks it and remembers it. None
    is kept alive between two calls.
    """

    def __init__(
        self, tensors: list[torch.Tensor], watched: list[int], mutated: set[int], written: bool, memo: bytearray
    ) -> None:
        self.last: list[Any] = tensors
        self._memo = memo  # of `gather`, which gives them
        self._weak: tuple[weakref.ref[torch.Tensor] | None, ...] = ()
        self._gone = [None] * len(tensors)
        self.meta = [(metadata(t), bool(vars(t))) for t in tensors]
        self.watched = watched
        self.mutated = mutated
        self.written = written  # the step writes to a per-call tensor: then all memory counts
        self.ids: set[int] = set()
        self.memory: set[int] = set()
        self._sharing: list[int] = []
        self._remember()
        self.sharing = self._sharing

    def _remember(self) -> None:
        self.ids = {id(t) for t in self.last}
        self._weak = tuple([None if t is None else weakref.ref(t) for t in self.last])
        addresses = [0 if t is None else memory(t) for t in self.last]
        self.memory = {a for i, a in enumerate(addresses) if a and (self.written or i in self.mutated)}
        first: dict[int, int] = {}
        self._sharing = [first.setdefault(a, i) if a in self.memory else i for i, a in enumerate(addresses)]

    def let_go(self) -> None:
        """Ends a call: drops its tensors."""
        self.last[:] = self._gone

    def known(self, tensors: list[torch.Tensor]) -> bool:
        """Begins a call: holds its tensors. False where the program could tell them from those of the last call."""
        return recall(tensors, self._weak, self.last, self._memo) or self._rebind(tensors)

    def _rebind(self, tensors: list[torch.Tensor]) -> bool:
        """Takes new tensors in the place of the last ones, if the program cannot tell them apart."""
        for tensor, last, meta in zip(tensors, self.last, self.meta, strict=True):
            if tensor is not last and last is not None and last.requires_grad:
                return False  # an optimizer may still hold, or know by key, the one that was there
            plain = isinstance(tensor, torch.Tensor) and not vars(tensor)
            if tensor is not last and not (plain and (metadata(tensor), False) == meta):
                return False
        if len({id(t) for t in tensors}) != len(self.ids):
            return False
        old, self.last[:] = list(self.last), tensors
        self._remember()
        if self._sharing == self.sharing:
            return True
        self.last[:] = old
        self._remember()
        return False


def sharing_pattern(addresses: list[int], written: list[bool], persistent: list[torch.Tensor]) -> list[int]:
    """For each per-call tensor, the first tensor in the same memory; only memory that the step writes counts."""
    first: dict[int, int] = {}
    for i, address in enumerate((*map(memory, persistent), *addresses)):
        if address:
            first.setdefault(address, i)
    base = len(persistent)
    return [first.get(a, base + i) for i, a in enumerate(addresses)]
