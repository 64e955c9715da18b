"""Adapts `torch.distributed.Store` to `wholestep.comm.Store`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from wholestep.comm.stores.store import Store


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
