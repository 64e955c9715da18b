"""Ranks compare the models that they are about to wrap; errors of collectives say what a wrapper was doing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from wholestep import comm
from wholestep.comm.api.object_collectives import first_difference, gathered_objects
from wholestep.deferred_init import origin
from wholestep.errors import DistError, DistMismatchError


@contextmanager
def noted(note: str, named: Sequence[Any] = ()) -> Iterator[None]:
    """Errors of collectives get a note of what this rank was doing and what to do.

    Args:
        named: what stands in the place of ``{}``: some names, or what has one.
    """
    try:
        yield
    except DistError as failure:
        names = [getattr(one, "name", one) for one in named]
        failure.add_note(note.format(", ".join(names[:8]) + f" … ({len(names)} in all)" * (len(names) > 8)))
        raise


def require_equal_models(what: str, module: nn.Module, named: list[tuple[str, Any]], group: comm.ProcessGroup) -> None:
    """A collective.

    Args:
        what: the wrapper, for the message.
        module: whose buffers are not left on the meta device either.

    Raises:
        DistMismatchError: on all ranks, where one has other parameters than the first, or will give them other values.
        ValueError: on all ranks, where parameters are on the meta device.
    """
    named = named + [(name, one) for name, one in module.named_buffers() if one.is_meta]
    mine = [
        f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}{' on meta' if p.is_meta else origin(p)}"
        + " frozen" * (isinstance(p, nn.Parameter) and not p.requires_grad)
        for name, p in named
    ]
    every = gathered_objects(mine, group)
    if (found := first_difference(every)) is not None:
        rank, at, first, other = found
        raise DistMismatchError(
            f"{what}: the ranks' models differ: parameter {at} is {first or 'none'} on rank {group.labels[0]} "
            f"({len(every[0])} in all), {other or 'none'} on rank {group.labels[rank]} ({len(every[rank])}): "
            "make the same model on all ranks, with one seed within deferred()"
        )
    left = [name for name, one in named if one.is_meta]
    if left:
        raise ValueError(
            f"{what}: {', '.join(left)} is on the meta device, without values: make the model within "
            "wholestep.parallel.deferred(), or give it memory and values there (module.to_empty(device='cpu'), "
            "module.reset_parameters())"
        )
