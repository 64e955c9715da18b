"""A thread that runs works of several steps, one after the other."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from wholestep.comm.work import Work, require_process, seconds
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
            return Work(result)
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
