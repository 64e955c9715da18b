"""Key-value stores that ranks meet over: what all do, and those of one process (`HashStore`) and within another.

All are a `Table` behind a way to reach it; a key that is not there yet is waited for up to the time-out.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from wholestep.comm.work import checked_timeout, seconds
from wholestep.errors import DistStoreError

Value = str | bytes
DEFAULT_STORE_TIMEOUT = timedelta(seconds=300)


def as_bytes(value: Value) -> bytes:
    """What a store keeps of a value: text as UTF-8.

    Raises:
        TypeError: it is neither text nor bytes.
    """
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"a store keeps str or bytes, found {type(value).__name__}")
    return value.encode() if isinstance(value, str) else bytes(value)


def _names(keys: Sequence[str]) -> list[str]:
    """Several keys, as a list.

    Raises:
        TypeError: one is not a string, or they are one string.
    """
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"a store's keys are a list of strings: found {keys!r}")
    return list(keys)


class Table:
    """The content of a store, and what may be done to it in one step."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> bytes:
        self.data[key] = value
        return b""

    def add(self, key: str, amount: bytes) -> bytes:
        try:
            self.data[key] = b"%d" % (int(self.data.get(key) or b"0") + int(amount))
        except ValueError:
            raise ValueError(f"store: add to {key!r} needs a number, found {self.data[key][:40]!r}") from None
        return self.data[key]

    def append(self, key: str, value: bytes) -> bytes:
        self.data[key] = self.data.get(key, b"") + value
        return b""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets when the value is the expected one, or when there is none and none is expected."""
        found = self.data.get(key)
        if found == expected or (found is None and not expected):
            self.data[key] = found = desired
        return found if found is not None else expected

    def delete(self, key: str) -> bytes:
        return b"1" if self.data.pop(key, None) is not None else b"0"

    def count(self, key: str = "") -> bytes:
        return b"%d" % len(self.data)

    def has(self, key: str) -> bytes:
        return b"1" if key in self.data else b"0"


WRITES = ("set", "add", "append", "compare_set")
COMMANDS = (*WRITES, "delete", "count", "has")


class Store:
    """What every store offers. Subclasses implement `_apply` and `_get`."""

    def __init__(self, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = checked_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = checked_timeout(timeout)

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        raise TypeError(f"{type(self).__name__} does not implement {command}")

    def _get(self, keys: list[str], limit: float) -> list[bytes] | None:
        """Values when all keys are there within ``limit`` seconds, else None."""
        end, pause = time.monotonic() + limit, 0.001
        while not all(self._apply("has", key) == b"1" for key in keys):
            if time.monotonic() >= end:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return [self._apply("compare_set", key, b"\0", b"\0") for key in keys]  # which changes nothing

    def _await(self, given: Sequence[str], timeout: timedelta | float | None, what: str) -> list[bytes]:
        keys, limit = _names(given), seconds(timeout if timeout is not None else self._timeout)
        values = self._get(keys, limit)
        if values is None:
            absent = [key for key in keys if self._apply("has", key) != b"1"]
            raise DistStoreError(f"Timeout: {type(self).__name__}.{what} waited {limit:g} s for keys {absent or keys}")
        return values

    def _do(self, command: str, key: str, *values: bytes) -> bytes:
        (name,) = _names([key])
        return self._apply(command, name, *values)

    def set(self, key: str, value: Value) -> None:
        self._do("set", key, as_bytes(value))

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        """The value; waits for the key.

        Args:
            timeout: None for the store's.

        Raises:
            DistStoreError: the key did not appear within the time-out.
        """
        return self._await([key], timeout, "get")[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at 0 and returns its new value."""
        return int(self._do("add", key, b"%d" % operator.index(amount)))

    def append(self, key: str, value: Value) -> None:
        self._do("append", key, as_bytes(value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Sets the key if it holds ``expected`` (absent, if ``expected`` is empty); returns what it holds then."""
        return self._do("compare_set", key, as_bytes(expected), as_bytes(desired))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._await(keys, timeout, "wait")

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._apply("has", key) == b"1" for key in _names(keys))

    def delete_key(self, key: str) -> bool:
        return self._do("delete", key) == b"1"

    def num_keys(self) -> int:
        return int(self._apply("count", ""))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(keys, None, "multi_get")

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values: as many of each are required")
        for key, value in zip(_names(keys), values, strict=True):
            self.set(key, value)

    def local_address(self) -> str:
        """The address at which this process is seen by the others; empty where the store does not tell."""
        return ""

    def close(self) -> None:
        """Frees what the store holds."""


class HashStore(Store):
    """A store for the threads of one process."""

    def __init__(self, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table, self._changed = Table(), threading.Condition()

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        with self._changed:
            found: bytes = getattr(self._table, command)(key, *values)
            if command in WRITES:
                self._changed.notify_all()
            return found

    def _get(self, keys: list[str], limit: float) -> list[bytes] | None:
        data = self._table.data
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in data for key in keys), limit):
                return None
            return [data[key] for key in keys]


class PrefixStore(Store):
    """A store within a store: every key gets ``prefix/`` in front."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store.timeout)
        self.prefix, self.underlying_store = prefix, store

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        return self.underlying_store._apply(command, f"{self.prefix}/{key}", *values)

    def local_address(self) -> str:
        return self.underlying_store.local_address()

    def _get(self, keys: list[str], limit: float) -> list[bytes] | None:
        return self.underlying_store._get([f"{self.prefix}/{key}" for key in keys], limit)
