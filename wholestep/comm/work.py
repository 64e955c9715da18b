"""Handles on collectives that are under way, and a thread that runs those of several steps, one after the other."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.errors import DistBackendError, DistTimeoutError

FOREVER = timedelta(days=10_000)  # no clock is asked for more: those of locks and of Gloo end at 292 years


def seconds(timeout: timedelta | float) -> float:
    """A time-out in seconds.

    Raises:
        ValueError: it is not a number.
    """
    limit = float(min(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout, FOREVER.total_seconds()))
    if math.isnan(limit):  # which no clock ever reaches
        raise ValueError("a time-out is a number of seconds, found nan")
    return limit


def checked_timeout(timeout: timedelta) -> timedelta:
    """The time-out, at most `FOREVER`.

    Raises:
        TypeError: it is no timedelta, as torch's too must be, whose number could be of seconds or milliseconds.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"a time-out is a datetime.timedelta, found {type(timeout).__name__} {timeout!r}")
    return min(timeout, FOREVER)


def require_process(pid: int, what: str) -> None:
    """Raises:
    DistBackendError: this is a fork of the process of that number, and has none of the threads that would end it.
    """
    if os.getpid() != pid:
        raise DistBackendError(f"{what}: this process was forked from the rank that started it: start it by spawn")


class Work:
    """A collective under way. The base class is one that has already ended, with some tensors: `wait` returns at once.

    Subclass it to write a backend in Python; only `wait` is required.

    Attributes:
        source: of a receive, once it has ended: the sender's rank in the group; else -1.
    """

    source: int = -1
    _result: list[torch.Tensor] | None = None
    _failure: BaseException | None = None
    _report: Callable[[BaseException], None] | None = None  # is told once what it failed with

    def __init__(self, result: list[torch.Tensor] | None = None) -> None:
        self._result = result

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Returns True when the tensors hold the result.

        Args:
            timeout: seconds; None for the group's.

        Raises:
            DistError: the collective failed, or did not end in time.
        """
        return True

    def is_completed(self) -> bool:
        """True once `wait` would not block."""
        return True

    def _failed(self, failure: BaseException) -> BaseException:
        """Keeps what it ended with, and reports it."""
        self._failure = failure
        if self._report is not None:
            self._report(failure)
        return failure

    def is_success(self) -> bool:
        """True when it ended without an error."""
        return self.is_completed() and self._failure is None

    def exception(self) -> BaseException | None:
        """The error it ended with, or None."""
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        self.wait()
        return self._result or []

    def get_future(self) -> torch.futures.Future:
        """A future with the result tensors: see `future_of`."""
        return future_of(self, [] if self._result is None else self._result)


LINGER = 5.0  # seconds for which `await_futures` waits
_COMPLETES = "wholestep-future"  # name of its threads


def future_of(work: Work, result: list[Any], limit: float | None = None) -> torch.futures.Future:
    """A future of what a work gives when it has ended, or of what it failed with.

    A work that is under way has a thread: what is chained to the future runs there, and may start works and wait for
    any others.

    Args:
        limit: seconds; None for the group's.
    """
    ended: torch.futures.Future = torch.futures.Future()

    def complete() -> None:
        outcome: Any = result
        try:
            work.wait() if limit is None else work.wait(limit)
        except Exception as failure:  # noqa: BLE001 - whatever it is belongs to who waits on the future
            outcome = failure
        ended.set_result(outcome)

    future = ended.then(_settled)
    if work.is_completed():
        complete()
    else:
        threading.Thread(target=complete, name=_COMPLETES, daemon=True).start()
    return future


def _settled(ended: torch.futures.Future) -> Any:
    """The result, or the failure raised: only so does torch's C++ see it. DDP would take an exception for tensors."""
    outcome = ended.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def await_futures() -> None:
    """Waits, for seconds, for the futures of works under way and for what is chained to them."""
    end = time.monotonic() + LINGER
    for thread in threading.enumerate():
        if thread.name == _COMPLETES and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


class All(Work):
    """Several works as one, then a step on their result: copying back to a strided tensor, dividing for AVG."""

    def __init__(
        self, works: list[Work], result: list[torch.Tensor], step: Callable[[], object] = lambda: None
    ) -> None:
        self._works, self._result, self._step = works, result, step
        self._done, self._stepping = False, threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._done:
            return True
        end = None if timeout is None else time.monotonic() + seconds(timeout)
        try:
            for work in self._works:
                work.wait() if end is None else work.wait(max(0.0, end - time.monotonic()))
            with self._stepping:  # once, however many threads wait
                if not self._done:
                    self._step()
                    self._done = True
        except BaseException as failure:
            self._failed(failure)
            raise
        return True

    def is_completed(self) -> bool:
        if not self._done and all(work.is_completed() for work in self._works):
            with contextlib.suppress(Exception):  # the work keeps it, for whoever waits
                self.wait()
            return True
        return self._done

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._works[0].source


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
