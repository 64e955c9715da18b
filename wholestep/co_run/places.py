"""Places of tensors in memory, by which a segment's slots are found; for plain tensors in C, see _places.pyi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep.co_run import _places as native
from wholestep.co_run.segment import FALSE, FLOAT, TRUE
from wholestep.torch_compat import has_storage, layout_functions, plain_tensor, storage_id

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

storage_of = torch.Tensor.untyped_storage  # the method itself: the queue patches it


def _reads_tensors() -> bool:
    """Whether C code reads tensors: where they have what it needs is looked up once."""
    offsets, keys, functions = *plain_tensor(), layout_functions()
    if not offsets or not all(functions):
        return False
    native.use(PLAIN, offsets, keys, functions, (TRUE, FALSE, FLOAT))
    return True


_NATIVE = _reads_tensors()


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key for a tensor's place in memory: equal for tensors of equal elements, laid out alike; its storage first."""
    found = native.place(tensor) if _NATIVE else None
    return found or (storage_at(tensor), tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


def storage_at(tensor: torch.Tensor) -> int:
    """What `storage_id` gives for the storage of a tensor; 0 where it has none, as on devices that are lazy."""
    found = native.storage(tensor) if _NATIVE else None
    return found or (storage_id(storage_of(tensor)) if has_storage(tensor) else 0)


def parts(
    values: tuple[Any, ...], slots: dict[Any, Any], numbers: list[float] | None, other: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """What stands for arguments in a call's key.

    Args:
        slots: place of a tensor -> what stands for it.
        numbers: takes the floats, if those may be others in another call.
        other: gives what stands for all that this does not know.
    """
    return native.parts(values, slots, numbers, other) if _NATIVE else tuple([other(value) for value in values])
