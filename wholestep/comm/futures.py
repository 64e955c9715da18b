"""Completes futures when works end, so that communication goes on behind the backward pass."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from wholestep.comm.work import Work

LINGER = 5.0  # seconds for which `close` waits for works under way


class FutureCompleter:
    """A thread for each work: what is chained to a future runs there, and may start works and wait for any others."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def submit(self, work: Work, future: torch.futures.Future, result: Any, limit: float | None = None) -> None:
        """Sets the future to ``result`` when the work has ended, or to the exception that it ended with."""

        def complete() -> None:
            outcome = result
            try:
                work.wait(limit) if limit is not None else work.wait()
            except Exception as failure:  # noqa: BLE001 - whatever it is belongs to who waits on the future
                outcome = failure
            future.set_result(outcome)

        thread = threading.Thread(target=complete, name="wholestep-future", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        end = time.monotonic() + LINGER
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
