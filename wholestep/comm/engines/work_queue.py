"""Threads that run works of several steps, one after the other, and that complete futures when works end."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.work import Finished, Work, require_process, seconds
from wholestep.errors import DistTimeoutError

Step = Callable[[], object]  # a receive returns the sender's rank


class QueuedWork(Work):
    """A collective or a receive that the queue runs, or will."""

    def __init__(self, what: str, result: list[torch.Tensor]) -> None:
        self._what, self._result = what, result
        self._ended, self._pid = threading.Event(), os.getpid()

    def run(self, step: Step) -> None:
        try:
            source = step()
            if isinstance(source, int):
                self.source = source
        except Exception as failure:  # noqa: BLE001 - whatever it is belongs to who waits
            self._failed(failure)
        finally:
            self._ended.set()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        require_process(self._pid, self._what)
        limit = None if timeout is None else seconds(timeout)
        if not self._ended.wait(limit):
            raise DistTimeoutError(f"{self._what} did not end within {limit:g} s")
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()


class WorkQueue:
    """Runs works in the order of their starts: in the caller's thread when it is idle and the caller waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[QueuedWork, Step] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: QueuedWork | None = None

    def start(self, what: str, step: Step, result: list[torch.Tensor], async_op: bool) -> Work:
        idle = self._last is None or self._last.is_completed()
        if idle and not async_op:
            step()
            return Finished(result)
        self._last = work = QueuedWork(what, result)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="wholestep-queue", daemon=True)
            self._thread.start()
        self._queue.put((work, step))
        return work

    def close(self) -> None:
        """Lets the thread end after what it has been given."""
        if self._thread is not None:
            self._queue.put(None)

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, step = entry
            work.run(step)


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
