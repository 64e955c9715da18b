"""A bar for what takes long."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

WORTH_A_BAR = 1 << 30  # bytes


class Progress:
    """A bar on the terminal's standard error, where there is one and the bytes are many."""

    def __init__(self, what: str, nbytes: int, shown: bool) -> None:
        shown = shown and nbytes >= WORTH_A_BAR and sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task(what, total=nbytes)

    def advance(self, nbytes: int) -> None:
        """So many more are done."""
        self._bar.advance(self._task, nbytes)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
