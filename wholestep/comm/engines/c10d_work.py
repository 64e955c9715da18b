"""Adapts `torch.distributed.Work` to `wholestep.comm.Work`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.work import Work, require_process, seconds
from wholestep.errors import DistBackendError, DistRankError, DistTimeoutError


class EngineWork(Work):
    """A torch work whose errors become ours.

    Args:
        what: rank, group and collective, for errors.
        abort_reason: what a rank that ended the group said; empty where none did.
    """

    def __init__(self, work: Any, what: str, abort_reason: Callable[[], str], result: list[torch.Tensor]) -> None:
        self._work, self._what, self._abort_reason, self._result = work, what, abort_reason, result
        self._pid = os.getpid()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        require_process(self._pid, self._what)
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=seconds(timeout)))
        except RuntimeError as failure:
            late = "imed out" in str(failure) or "imeout" in str(failure)
            reason = "" if late else self._abort_reason()
            kind = DistTimeoutError if late else DistRankError if reason else DistBackendError
            raise self._failed(kind(f"{self._what} failed: {reason or failure}")) from failure
        return True

    @property
    def source(self) -> int:  # type: ignore[override]
        return int(self._work._source_rank())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
