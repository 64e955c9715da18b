"""The ranks that save or load together; one alone where there is no group."""

from __future__ import annotations

from typing import Any

from wholestep import comm
from wholestep.errors import CheckpointError


class Ranks:
    """All ranks of the world, or this process alone.

    Attributes:
        rank, size: this one's number, and how many there are.
    """

    def __init__(self) -> None:
        together = comm.is_initialized()
        self.rank = comm.get_rank() if together else 0
        self.size = comm.get_world_size() if together else 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        comm.all_gather_object(found, value)
        return found

    def agree(self, trouble: str) -> None:
        """Raises on every rank when one has trouble; a meeting of all.

        Raises:
            CheckpointError: the first rank's trouble, in its words.
        """
        for rank, text in enumerate(self.gather(trouble)):
            if text:
                raise CheckpointError(text if self.size == 1 else f"rank {rank}: {text}")
