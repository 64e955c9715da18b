"""Functions that a generated program binds its memory with: arenas, views of them, recycled blocks, loans, cells."""

from __future__ import annotations

import array
import math
import weakref
from sys import getrefcount
from typing import Any

import torch

from wholestep import comm
from wholestep.lower.plan.arena import SHARED
from wholestep.torch_compat import storage_uses


def arena_memory(size: int, device: str) -> torch.Tensor:
    """So many bytes for an arena, as one flat tensor."""
    if device == SHARED:
        try:
            return comm.empty(size, dtype=torch.uint8, shared=True)
        except comm.DistBackendError:  # /dev/shm is small: the transport copies out of private memory instead
            device = "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device)


def at(arena: torch.Tensor, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that lies in the arena, ``offset`` bytes from its start: whole elements of its dtype."""
    assert offset % dtype.itemsize == 0, f"{offset} bytes are no whole elements of {dtype}"
    return torch.empty(0, dtype=dtype, device=arena.device).set_(
        arena.untyped_storage(), offset // dtype.itemsize, shape, stride
    )


class Recycler:
    """Memory for big results: the block of an earlier call once nobody holds it any more, else a new one.

    A 100 MB gradient takes 92 ms to write into new pages and 20 ms into old ones. Since a user may still hold the
    last call's result while this one is computed, up to two blocks are kept for each result.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}

    def __call__(self, key: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on memory that it alone has; ``key`` tells a program's results apart."""
        kept = self._kept.setdefault(key, [])
        found, needed = None, math.prod(shape) * dtype.itemsize
        for place in reversed(range(len(kept))):
            storage, address = kept[place]
            # one owner in C++, the Python object that is kept here; and of that: the list, this loop and the call
            if storage_uses(storage) == 1 and getrefcount(storage) <= 3:
                if storage.data_ptr() == address and storage.nbytes() == needed and not storage.is_shared():
                    if found is None:
                        found = storage
                    else:  # nobody held the last result: one block is enough
                        del kept[place]
        if found is not None:
            return torch.empty(0, dtype=dtype).set_(found, 0, shape, stride)
        made = torch.empty_strided(shape, stride, dtype=dtype)
        storage = made.untyped_storage()
        self._kept[key] = [*kept[-1:], (storage, storage.data_ptr())]
        return made

    def forget(self) -> None:
        """Leaves all memory to those who hold it."""
        self._kept.clear()


class Loan:
    """A place in the arena for a gradient, as memory of its own: as long as its tensor lives, so does the arena.

    Calling it gives the tensor.
    """

    def __init__(self, arena: torch.Tensor, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> None:
        self.layout, self.dtype = (shape, stride), dtype
        self.block = arena[offset : offset + math.prod(shape) * dtype.itemsize].numpy()
        self.lent: weakref.ref[Any] | None = None

    def __call__(self) -> torch.Tensor:
        window = self.block.view()  # which the storage keeps alive, and nobody else
        self.lent = weakref.ref(window)
        storage = torch.frombuffer(window, dtype=self.dtype).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, *self.layout)

    @property
    def is_out(self) -> bool:
        """True while anybody holds the tensor, or another one on its memory."""
        return self.lent is not None and self.lent() is not None


def cells(values: list[float], dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    """Memory that Python writes as numbers and kernels read as tensors of one element."""
    memory = array.array("f" if dtype is torch.float32 else "d", values)
    return memory, list(torch.frombuffer(memory, dtype=dtype).unbind())
