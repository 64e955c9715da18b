"""What of torch.distributed's engines is not as ours: works and their errors, stores, dtypes, lengths of messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.stores.store import Store
from wholestep.comm.work import All, Work, WorkQueue, require_process, seconds
from wholestep.errors import DistBackendError, DistMismatchError, DistRankError, DistTimeoutError


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


# What every engine reduces.
KNOWN = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64]
)


def movable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory, as bytes in one more dimension where the dtype is unknown: dim 0 keeps its rows."""
    return [one if one.dtype in KNOWN else one.unsqueeze(-1).view(torch.uint8) for one in tensors]


LENGTHS = 1 << 28  # added to a message's tag: that of its length
Transfer = Callable[[list[torch.Tensor], int, int], Any]  # tensors, the other rank, tag


class LengthPrefixed:
    """Sends and receives of one group.

    Args:
        send, recv: of the engine.
        name: whose they are, for errors.
    """

    def __init__(self, send: Transfer, recv: Transfer, name: Callable[[], str]) -> None:
        self._send, self._recv, self.name = send, recv, name
        self._queues: dict[tuple[int, int], WorkQueue] = {}  # by sender and tag: their messages come in order

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        length = self._send([torch.tensor([tensor.nbytes])], dst, tag + LENGTHS)
        return All([length, self._send([tensor], dst, tag)], [tensor])

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """In a thread, since what comes may only be asked for when its length is known."""
        queue = self._queues.setdefault((src, tag), WorkQueue())
        return queue.start("recv", lambda: self._take(tensor, src, tag), [tensor], True)

    def _take(self, tensor: torch.Tensor, src: int, tag: int) -> int:
        """Receives a message and gives its sender.

        Raises:
            DistMismatchError: it has another length; it is gone then.
        """
        length = torch.zeros(1, dtype=torch.int64)
        length_work = self._recv([length], src, tag + LENGTHS)
        length_work.wait()
        sender, sent = int(length_work.source if src < 0 else src), int(length)
        fits = sent == tensor.nbytes
        self._recv([tensor if fits else torch.empty(sent, dtype=torch.uint8)], sender, tag).wait()
        if not fits:
            raise DistMismatchError(f"{self.name()}: recv: {tensor.nbytes} bytes are required, {sent} were sent")
        return sender

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


class TorchStore(Store):
    """A store of torch as one of ours: for torchrun, whose agent keeps a store of its own at MASTER_PORT."""

    def __init__(self, store: Any, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._store = store

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        if command == "add":
            return b"%d" % self._store.add(key, int(values[0]))
        if command in ("delete", "has"):
            found = self._store.delete_key(key) if command == "delete" else self._store.check([key])
            return b"1" if found else b"0"
        if command == "count":
            return b"%d" % self._store.num_keys()
        # as bytes: torch would write text as UTF-8
        return bytes(getattr(self._store, command)(key, *values) or b"")
