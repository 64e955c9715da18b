"""Collective signatures as bytes, which ranks compare where the engine does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wholestep.comm.process_group import ProcessGroup
from wholestep.errors import DistMismatchError

_LENGTH = 160  # bytes of a description that are compared


def in_bytes(text: str) -> torch.Tensor:
    """A description as ranks show it."""
    return torch.frombuffer(bytearray(text.encode()[:_LENGTH].ljust(_LENGTH)), dtype=torch.uint8)


def in_words(shown: torch.Tensor) -> str:
    """The description that a rank shows."""
    return shown.numpy().tobytes().decode(errors="replace").strip()


def require_equal(group: ProcessGroup, said: Sequence[str]) -> None:
    """Compares what the ranks of a group are about to call.

    Raises:
        DistMismatchError: a rank calls something else than this one.
    """
    me = group.rank()
    for rank, theirs in enumerate(said):
        if theirs != said[me]:
            raise DistMismatchError(
                f"group {group.group_name!r}: the ranks disagree: rank {group.labels[me]} calls {said[me]}; "
                f"rank {group.labels[rank]} calls {theirs}"
            )
