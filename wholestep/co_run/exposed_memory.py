"""Memory of tensors that Python reads without torch: NumPy arrays, and buffers such as `bytearray`, made of it.

What a step writes there is written at once, since its readers ask nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch

from wholestep.capture import unguarded_in_sight
from wholestep.torch_compat import storage_id

_STORAGE = torch.Tensor.untyped_storage  # as the queue asks: not one of the step's reads, by which it is replaced


class ExposedMemory:
    """Knows such memory: of the arrays that a step can see at its first call, and of those that it makes.

    Args:
        fn: the step, with the arguments of its first call.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._seen = [at for value in unguarded_in_sight(fn, args, kwargs) if (at := _addresses(value))]
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of an array -> itself, and the storage

    def add(self, array: Any, tensor: Any) -> None:
        """Notes an array that was made of a tensor, for as long as it is there."""
        if isinstance(array, numpy.ndarray) and isinstance(tensor, torch.Tensor):
            key, made = id(array), self._made
            made[key] = weakref.ref(array, lambda _: made.pop(key, None)), storage_id(tensor.untyped_storage())

    def __bool__(self) -> bool:
        return bool(self._seen or self._made)

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some of the tensors are there."""
        storages = [_STORAGE(t) for t in tensors if t.layout is torch.strided]
        if not {storage for _, storage in self._made.values()}.isdisjoint(map(storage_id, storages)):
            return True
        return any(seen.start < s.data_ptr() + s.nbytes() and s.data_ptr() < seen.stop
                   for s in storages for seen in self._seen)  # fmt: skip


def _addresses(value: Any) -> range:
    """Where in memory an array or a buffer is; nowhere for all else."""
    try:
        array = value if isinstance(value, numpy.ndarray) else numpy.asarray(memoryview(value))
    except TypeError:
        return range(0)
    ends = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    first, last = (array.ctypes.data + sum(pick(end, 0) for end in ends) for pick in (min, max))
    return range(first, last + array.itemsize if array.size else first)
