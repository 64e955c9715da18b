"""Completes futures when works end, so that communication goes on behind the backward pass."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from wholestep.comm.work import Work

IDLE = 2  # threads kept for the next work


class FutureCompleter:
    """Threads of which one at a time waits for works, in the order they were given.

    It hands that on before it completes a future: what was chained to the future runs there, and may start works and
    wait for them, or for the futures of works that were given later.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, torch.futures.Future, Any, float | None] | None] = (
            queue.SimpleQueue()
        )
        self._leading, self._counting = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def submit(self, work: Work, future: torch.futures.Future, result: Any, limit: float | None = None) -> None:
        """Sets the future to ``result`` when the work has ended, or to the exception that it ended with."""
        self._queue.put((work, future, result, limit))
        with self._counting:
            if not self._threads:
                self._start()

    def close(self) -> None:
        running = [one for one in self._threads if one.is_alive()]  # none in a forked process
        if running:
            self._queue.put(None)
        for thread in running:
            if thread is not threading.current_thread():
                thread.join(5)

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name="wholestep-futures", daemon=True)
        self._idle += 1
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while self._complete_one():
            with self._counting:
                self._idle += 1
                if self._idle > IDLE:
                    self._idle -= 1
                    self._threads.remove(threading.current_thread())
                    return

    def _complete_one(self) -> bool:
        with self._leading:
            entry = self._queue.get()
            if entry is None:
                self._queue.put(None)  # for the other threads
                return False
            work, future, result, limit = entry
            try:
                work.wait(limit) if limit is not None else work.wait()
            except Exception as failure:  # noqa: BLE001 - whatever it is belongs to who waits on the future
                result = failure
        with self._counting:
            self._idle -= 1
            if not self._idle:
                self._start()
        future.set_result(result)
        return True
