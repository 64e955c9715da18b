"""Checks on arguments, with the words that users of torch.distributed know."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from wholestep.comm.api.groups import get_group, world
from wholestep.comm.process_group import ProcessGroup


def tensor(value: Any, name: str) -> torch.Tensor:
    """Raises:
    TypeError: not a dense tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor but got {type(value)}."
        )
    if value.layout is not torch.strided:
        raise TypeError(f"parameter `{name}`: a dense tensor is required, found layout {value.layout}: call to_dense()")
    return value


def tensors(values: Any, name: str) -> list[torch.Tensor]:
    """Raises:
    TypeError: not a list of dense tensors.
    """
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] but got {type(values)}."
        )
    return [tensor(value, f"{name}[{index}]") for index, value in enumerate(values)]


def output(value: Any, name: str, expanded: bool = False) -> torch.Tensor:
    """Args:
        expanded: elements may share memory.

    Raises:
        TypeError: not a dense tensor.
        ValueError: memory holds the conjugates or negatives of its elements, or some of them share it.
    """
    made = tensor(value, name)
    shared = not expanded and any(one == 0 < size - 1 for one, size in zip(made.stride(), made.shape, strict=True))
    if shared or made.is_conj() or made.is_neg():
        raise ValueError(
            f"parameter `{name}` of shape {list(made.shape)} is written, and an expanded, conjugate or negated view "
            "cannot be: pass a clone() of it"
        )
    return made


def outputs(values: Any, name: str) -> list[torch.Tensor]:
    """Raises:
    TypeError, ValueError: not a list of tensors that can be written.
    """
    return [output(value, f"{name}[{index}]") for index, value in enumerate(tensors(values, name))]


def same_dtype(what: str, *groups: Sequence[torch.Tensor]) -> None:
    """Raises:
    ValueError: the tensors have different dtypes.
    """
    found = [one.dtype for group in groups for one in group]
    if len(set(found)) > 1:
        raise ValueError(f"Invalid usage of {what}: tensors with different dtypes were given: {found}")


def length(what: str, name: str, values: Sequence[Any], required: int) -> None:
    """Raises:
    ValueError: a list has another length than the group.
    """
    if len(values) != required:
        raise ValueError(
            f"{what}: `{name}` has {len(values)} entries, one for each of the {required} ranks is required"
        )


def elements(what: str, name: str, found: int, required: int, why: str) -> None:
    """Raises:
    ValueError: a tensor has another number of elements than required.
    """
    if found != required:
        raise ValueError(f"{what}: `{name}` has {found} elements, {required} are required: {why}")


def outside(group: ProcessGroup, what: str) -> bool:
    """True, with a warning, when this rank is not in the group: then the collective does nothing."""
    if group.rank() >= 0:
        return False
    whole = get_group()
    members = world().members.get(group.group_name)
    warnings.warn(
        f"Running {what} on global rank {whole.rank()} which does not belong to the given group {members}.",
        UserWarning,
        stacklevel=4,
    )
    return True
