"""What the generated program's `bind` calls to make tensors over lasting memory."""

from __future__ import annotations

import array
from typing import Any

import torch

from wholestep import comm
from wholestep.lower.arena import SHARED
from wholestep.lower.order import TILE


def arena_memory(size: int, device: str) -> torch.Tensor:
    """So many bytes for an arena, as one flat tensor."""
    if device == SHARED:
        try:
            return comm.empty(size, dtype=torch.uint8, shared=True)
        except comm.DistBackendError:  # /dev/shm is small: the transport copies out of private memory instead
            device = "cpu"
    return torch.empty(size, dtype=torch.uint8, device=device)


def at(arena: torch.Tensor, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that lies in the arena, ``offset`` bytes from its start."""
    return torch.empty(0, dtype=dtype, device=arena.device).set_(
        arena.untyped_storage(), offset // dtype.itemsize, shape, stride
    )


def filled(number: Any, shape: Any, stride: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A constant of one number."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(number)


def tiles(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A contiguous tensor as flat pieces of `TILE` elements."""
    return value.view(-1).split(TILE)


def pieces(buffer: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The same scratch buffer for each tile of ``count`` elements, cut short for the last one."""
    rest = count % TILE
    return [buffer] * (count // TILE) + ([buffer[:rest]] if rest else [])


def cells_of(values: list[float], dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    """Memory that Python writes as numbers and kernels read as tensors of one element."""
    cells = array.array("f" if dtype is torch.float32 else "d", values)
    return cells, list(torch.frombuffer(cells, dtype=dtype).unbind())
