"""The ranks that save or load together, one alone where there is no group; and their progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from wholestep import comm
from wholestep.comm.api.object_collectives import gathered_objects
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
        return [value] if self.size == 1 else gathered_objects(value)

    @contextmanager
    def together(self, failed: str = "") -> Iterator[None]:
        """At the end of what is done inside of it all ranks meet, and all raise when it failed on one.

        Args:
            failed: what is said before an error that is no `CheckpointError`.

        Raises:
            CheckpointError: the first rank's trouble, in its words.
        """
        trouble = ""
        try:
            yield
        except CheckpointError as error:
            trouble = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, no rank may be left waiting
            trouble = f"{failed}{type(error).__name__}: {error}"
        for rank, text in enumerate(self.gather(trouble)):
            if text:
                raise CheckpointError(text if self.size == 1 else f"rank {rank}: {text}")


WORTH_A_BAR = 1 << 30  # bytes


@contextmanager
def progress(what: str, nbytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's standard error, where there is one and the bytes are many; gives what advances it."""
    shown = shown and nbytes >= WORTH_A_BAR and sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as bar:
        yield partial(bar.advance, bar.add_task(what, total=nbytes))
