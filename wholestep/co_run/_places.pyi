"""Places of tensors in memory, read in C; see native/places.c."""

from collections.abc import Callable
from typing import Any

import torch

# A key for a plain tensor's place in memory: its storage; offset, dtype, sizes and strides as bytes. None for another.
def place(tensor: torch.Tensor, /) -> tuple[int, bytes] | None: ...

# What identifies a plain tensor's storage. None for another.
def storage(tensor: torch.Tensor, /) -> int | None: ...

# What stands for arguments in the key of a call: slots for plain tensors at the places of a dict. Floats are appended
# to the list of numbers, if there is one. A function gives what stands for all else.
def parts(
    values: tuple[Any, ...], slots: dict[Any, Any], numbers: list[float] | None, other: Callable[[Any], Any], /
) -> tuple[Any, ...]: ...

# Plain classes; offsets of the C++ tensor, and of its storage and dispatch keys within that; those keys; functions of
# torch's that read dim, dtype, sizes, strides and offset; and what stands for True, False and a float.
def use(
    classes: tuple[type, type, type], offsets: tuple[int, ...], keys: int, functions: tuple[int, ...],
    constants: tuple[Any, Any, Any], /,
) -> None: ...  # fmt: skip
