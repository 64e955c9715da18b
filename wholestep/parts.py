"""Tensors of which each rank holds some rows alone, such as the state of a sharded optimizer.

The mark is an attribute of the tensor, a plain tuple, so that it goes with `copy.deepcopy` and `torch.save`. While a
step is traced such a tensor stands for the whole one; the program of a rank takes the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_NAME = "wholestep_part"


class Part(NamedTuple):
    """Some rows of a contiguous tensor.

    Attributes:
        shape: of the whole tensor.
        start, stop: the rows, along its first dimension.
    """

    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"rows {self.start} to {self.stop} of {list(self.shape)}"


def part_of(tensor: torch.Tensor) -> Part | None:
    """What a tensor holds of a whole one; None when it is one itself."""
    mark = getattr(tensor, _NAME, None)
    return None if mark is None else Part(*mark)


def mark_part(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Says what a tensor holds of a whole one; None takes the mark away."""
    if part is not None:
        setattr(tensor, _NAME, tuple(part))
    elif hasattr(tensor, _NAME):
        delattr(tensor, _NAME)
    return tensor


def narrow_to(tensor: torch.Tensor, part: Part) -> None:
    """Makes a whole tensor a part of itself: the object stays, the other rows' memory is free."""
    tensor.data = tensor.detach()[part.start : part.stop].clone(memory_format=torch.contiguous_format)
    mark_part(tensor, part)
