"""Checks on arguments, with the words that users of torch.distributed know."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from wholestep.comm.api.collective_table import ArgumentKind, Collective
from wholestep.comm.api.groups import get_group
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


def tensors_of(value: Any, name: str, kind: ArgumentKind, optional: bool) -> list[torch.Tensor]:
    """The tensors that a collective's parameter holds.

    Args:
        optional: ranks other than the root may give None for a list.

    Raises:
        TypeError: neither a tensor nor a list of tensors, as the parameter requires.
    """
    if kind in (ArgumentKind.ONE, ArgumentKind.ROWS):
        return [tensor(value, name)]
    return [] if optional and value is None else tensors(value, name)


def writable(values: Sequence[torch.Tensor], name: str, expanded: bool = False) -> None:
    """Args:
        expanded: elements may share memory.

    Raises:
        ValueError: memory holds the conjugates or negatives of a tensor's elements, or some of them share it.
    """
    for made in values:
        shared = not expanded and any(one == 0 < size - 1 for one, size in zip(made.stride(), made.shape, strict=True))
        if shared or made.is_conj() or made.is_neg():
            raise ValueError(
                f"parameter `{name}` of shape {list(made.shape)} is written, and an expanded, conjugate or negated "
                "view cannot be: pass a clone() of it"
            )


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


def sizes(row: Collective, outs: list[torch.Tensor], ins: list[torch.Tensor], ranks: int, at_root: bool) -> None:
    """Raises:
    ValueError: a list or a tensor of a call does not have a part for each rank.
    """
    one, other = (outs, row.out) if row.out_kind is ArgumentKind.ONE else (ins, row.inp)
    for name, kind, found in ((row.out, row.out_kind, outs), (row.inp, row.inp_kind, ins)):
        if kind is ArgumentKind.LIST and row.root and bool(found) != at_root:
            where = "destination" if row.root == "dst" else "source"
            raise ValueError(f"{row.name}: `{name}` is required on the {where} rank, and on no other")
        if kind is ArgumentKind.LIST and (at_root or not row.root):
            length(row.name, name, found, ranks)
        if row.out_kind is row.inp_kind:
            continue
        if kind is ArgumentKind.LIST:
            for index, part in enumerate(found):
                why = f"as many as `{other}` has"
                elements(row.name, f"{name}[{index}]", part.numel(), one[0].numel(), why)
        elif kind is ArgumentKind.ROWS:
            elements(row.name, name, found[0].numel(), one[0].numel() * ranks, f"{ranks} times those of `{other}`")


def split_sizes(what: str, name: str, value: Any, splits: Sequence[int] | None, ranks: int) -> None:
    """Raises:
    ValueError: the rows of a tensor are not divided among the ranks.
    """
    rows = tensor(value, name).shape
    if not rows:
        raise ValueError(f"{what}: `{name}` is a scalar: at least one dimension is required")
    if splits:
        length(what, f"{name}_split_sizes", splits, ranks)
        elements(what, f"{name}_split_sizes", sum(splits), rows[0], f"the rows of `{name}`")
    elif rows[0] % ranks:
        raise ValueError(f"{what}: {rows[0]} rows of `{name}` do not divide among {ranks} ranks")


def outside(group: ProcessGroup, what: str) -> bool:
    """True, with a warning, when this rank is not in the group: then the collective does nothing."""
    if group.rank() >= 0:
        return False
    whole = get_group()
    warnings.warn(
        f"Running {what} on global rank {whole.rank()} which does not belong to the given group {list(group.labels)}.",
        UserWarning,
        stacklevel=4,
    )
    return True
