"""The progress bar of saving and loading."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

WORTH_A_BAR = 1 << 30  # bytes


@contextmanager
def progress(what: str, nbytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's standard error, where there is one and the bytes are many; gives what advances it."""
    shown = shown and nbytes >= WORTH_A_BAR and sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as bar:
        yield partial(bar.advance, bar.add_task(what, total=nbytes))
