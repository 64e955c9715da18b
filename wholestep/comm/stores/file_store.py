"""`FileStore`: a table in a file that all ranks see."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from wholestep.comm.stores.store import DEFAULT_STORE_TIMEOUT, Store, Table
from wholestep.errors import DistStoreError

Result = TypeVar("Result")
CLOSED = "store/closed"
HEAD = b"wholestep store\n"  # how the file begins


class FileStore(Store):
    """A store over a file that all ranks see: a log of changes, written under the file's lock.

    Args:
        file_name: made with mode 0600 when it is not there.
        world_size: users of the store; the last one to `close` removes the file (-1: nobody).

    Raises:
        ValueError: there is a file of another kind.
    """

    def __init__(self, file_name: str, world_size: int = -1, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> None:
        super().__init__(timeout)
        self.path, self._size = file_name, world_size
        self._table, self._offset, self._lock, self._pid = Table(), 0, threading.Lock(), os.getpid()
        self._fd = os.open(file_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._locked(lambda: None)
        except BaseException:
            os.close(self._fd)
            raise

    def _locked(self, step: Callable[[], Result]) -> Result:
        if self._pid != os.getpid():  # a fork: the file's lock would be the parent's too
            self._lock, self._pid, self._size = threading.Lock(), os.getpid(), -1
            self._fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._catch_up()
                return step()
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Replays what others have written since, a change a line."""
        news = os.pread(self._fd, os.fstat(self._fd).st_size - self._offset, self._offset)
        head = b"" if self._offset else HEAD
        if not head.startswith(news[: len(head)]):
            raise ValueError(f"FileStore: {self.path} is not a store, and stays as it is: name a new file")
        whole = news[: news.rfind(b"\n") + 1]  # what is left had a writer that was killed: cut off by the next one
        for line in whole.removeprefix(head).splitlines():
            key, value = json.loads(line)
            if value is None:
                self._table.data.pop(key, None)
            else:
                self._table.data[key] = value.encode("latin1")
        self._offset += len(whole)

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        return self._locked(lambda: self._change(command, key, *values))

    def _change(self, command: str, key: str, *values: bytes) -> bytes:
        before = self._table.data.get(key)
        found: bytes = getattr(self._table, command)(key, *values)
        after = self._table.data.get(key)
        if after != before:
            record = json.dumps([key, None if after is None else after.decode("latin1")]).encode() + b"\n"
            self._write(record if self._offset else HEAD + record)
        return found

    def _write(self, record: bytes) -> None:
        try:
            os.ftruncate(self._fd, self._offset)
            if (written := os.pwrite(self._fd, record, self._offset)) != len(record):
                raise OSError(errno.ENOSPC, f"{written} of {len(record)} bytes written")
        except OSError as failure:  # what is half written is cut off by whoever writes next
            self._table, self._offset = Table(), 0
            raise DistStoreError(f"FileStore: {self.path} cannot be written: {failure}") from failure
        self._offset += len(record)

    def _is_there(self) -> bool:
        """False when the file has been removed, and another one may have its name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        return False

    def has_ended(self) -> bool:
        """True when a user has closed the store: one that is to begin must not use it. The file is removed then."""

        def step() -> bool:
            if self._is_there() and CLOSED in self._table.data:
                os.unlink(self.path)
            return not self._is_there()

        return self._locked(step)

    def close(self) -> None:
        def step() -> None:
            if int(self._change("add", CLOSED, b"1")) >= self._size and self._is_there():
                os.unlink(self.path)

        if self._fd >= 0:
            try:
                if self._size > 0 and self._pid == os.getpid():  # a fork is none of the users
                    self._locked(step)
            finally:
                os.close(self._fd)
                self._fd = -1
