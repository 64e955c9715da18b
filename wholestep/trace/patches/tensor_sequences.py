"""Nested lists of tensors and host numbers, whose values C++ would read one by one, past the dispatcher.

``torch.tensor([loss, 2.0])``, ``x[rows, columns]`` with tuples of tensors: a stack stands in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from wholestep.trace.numbers.recorded_numbers import RecordedNumbers

UNKNOWN = (torch.Tensor, torch.SymFloat, torch.SymInt)
# What reads lists: the positions and names of the arguments that are data.
CONSTRUCTORS: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), (0, "data", "obj")),
    **dict.fromkeys((torch.Tensor.new_tensor, torch.Tensor.new), (1, "data")),
    torch.sparse_coo_tensor: (0, 1, "indices", "values"),
}
COMPRESSED = (torch.sparse_compressed_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor,
              torch.sparse_bsr_tensor, torch.sparse_bsc_tensor)  # fmt: skip
_INDEX_DTYPES = (torch.bool, torch.uint8)


def stacked(numbers: RecordedNumbers, data: Any, options: dict[str, Any]) -> Any:
    """What C++ makes of data, where that has unknown values in it; any other data as it is.

    Where C++ would refuse them, or convert otherwise than operators do, it is given tensors whose memory it cannot read
    unnoticed.

    Args:
        options: ``dtype`` and ``device`` of the tensor to make.
    """
    scalars = [*_scalars(data)] if _is_sequence(data) or isinstance(data, UNKNOWN[1:]) else []
    if not any(isinstance(n, UNKNOWN) for n in scalars):
        return data
    wanted = options.get("dtype") or functools.reduce(torch.promote_types, map(_dtype, scalars))
    if all(_converts(n, wanted) for n in scalars):
        return _stack(numbers, data, wanted, options.get("device"))
    return _made(data)


def indexed(numbers: RecordedNumbers, index: Any) -> Any:
    """An index, with tensors for the sequences of tensors in it."""
    if not isinstance(index, (list, tuple)):
        return index
    found = [_of_sequence(numbers, n) if _is_sequence(n) else n for n in index]
    return tuple(found) if isinstance(index, tuple) else found


def _of_sequence(numbers: RecordedNumbers, sequence: Any) -> Any:
    dtypes = {_dtype(n) for n in _scalars(sequence)}
    bools = len(dtypes) == 1 and not dtypes.isdisjoint(_INDEX_DTYPES)
    return stacked(numbers, sequence, {"dtype": None if bools else torch.int64})


def _is_sequence(value: Any) -> bool:
    """Whether C++ takes a value for a sequence, a list or any other."""
    others = (torch.Tensor, numpy.ndarray, numpy.generic, str, bytes, dict)
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and not isinstance(value, others)


def _scalars(tree: Any) -> Iterator[Any]:
    if _is_sequence(tree):
        for leaf in tree:
            yield from _scalars(leaf)
    else:
        yield tree


def _made(tree: Any) -> Any:
    """Nested lists with traced copies of tensors."""
    if _is_sequence(tree):
        return [_made(leaf) for leaf in tree]
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def _dtype(scalar: Any) -> torch.dtype:
    """What C++ takes a scalar for when it is told nothing."""
    if isinstance(scalar, torch.Tensor):
        return scalar.dtype
    if isinstance(scalar, bool):
        return torch.bool
    if isinstance(scalar, complex):
        return torch.promote_types(torch.get_default_dtype(), torch.complex32)
    return torch.get_default_dtype() if isinstance(scalar, float) else torch.int64


def _converts(scalar: Any, wanted: torch.dtype) -> bool:
    """Whether operators make of a scalar what C++ makes of it."""
    if not isinstance(scalar, torch.Tensor):
        return isinstance(scalar, (*UNKNOWN, complex, float, int)) and not isinstance(scalar, numpy.generic)
    if wanted.is_floating_point or wanted.is_complex:
        return scalar.numel() == 1 and (wanted.is_complex or not scalar.is_complex())
    counted = not (scalar.is_floating_point() or scalar.is_complex())
    return scalar.numel() == 1 and counted and wanted in (torch.bool, torch.int64, scalar.dtype)


def _stack(numbers: RecordedNumbers, tree: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if _is_sequence(tree):
        return torch.stack([_stack(numbers, leaf, dtype, device) for leaf in tree])
    if not isinstance(tree, torch.Tensor):
        return torch.scalar_tensor(numbers.size(tree), dtype=dtype, device=device)
    value = tree.detach().reshape(())
    if not (value.is_floating_point() or value.is_complex()) and (dtype.is_floating_point or dtype.is_complex):
        value = value.to(torch.float64)  # C++ has it as a Python number on its way
    return value.to(device=device or torch.get_default_device(), dtype=dtype)
