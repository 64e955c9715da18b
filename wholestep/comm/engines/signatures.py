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


def require_equal(group: ProcessGroup, shown: Sequence[torch.Tensor]) -> None:
    """Compares what the ranks of a group showed.

    Raises:
        DistMismatchError: a rank showed something else than this one.
    """
    mine = shown[group.rank()]
    for rank, theirs in enumerate(shown):
        if not torch.equal(theirs, mine):
            raise DistMismatchError(
                f"group {group.group_name!r}: the ranks disagree: rank {group.labels[group.rank()]} calls "
                f"{_in_words(mine)}; rank {group.labels[rank]} calls {_in_words(theirs)}"
            )


def _in_words(shown: torch.Tensor) -> str:
    return shown.numpy().tobytes().decode(errors="replace").strip()
