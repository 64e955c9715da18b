"""Sets up a group's shared-memory segment: rank 0 creates it, the other ranks of the host map it."""

from __future__ import annotations

import os
from datetime import timedelta

from wholestep.comm.process_group import DebugLevel, get_debug_level
from wholestep.comm.shared_tensors import native, no_room, unnamed_file
from wholestep.comm.stores.store import Store
from wholestep.comm.stores.store_barrier import give_up, leave_together, store_based_barrier
from wholestep.errors import DistBackendError, DistError

HOST_VARIABLE = "WHOLESTEP_HOST"


def host_identity() -> str:
    """Equal for processes that can share memory: one kernel, one namespace of processes, one network.

    WHOLESTEP_HOST divides a host into several; it never joins two.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return "/".join([boot.read().strip(), *spaces, os.environ.get(HOST_VARIABLE, "")])


def attach(store: Store, rank: int, size: int, timeout: timedelta) -> int:
    """Returns the engine's handle when all ranks have mapped the memory.

    Raises:
        DistBackendError: shared memory is full.
        DistStoreError: not all ranks came within the time-out.
    """
    handle = 0
    try:
        handle = _map(store, rank, size)
        store_based_barrier(rank, store, "shm", size, timeout)
    except (DistError, ValueError) as failure:
        if handle:
            native.stop(handle)
        elif isinstance(failure, DistError):
            why = DistBackendError(f"rank {rank} of the group cannot go on: {failure}")
            give_up(store, "shm", why)
            if rank == 0:
                store.set("segment", f"- {why}")
        if isinstance(failure, DistBackendError):
            leave_together(store, "shm", size)
        raise
    if rank == 0:
        store.delete_key("segment")
    native.ready(handle, get_debug_level() is DebugLevel.DETAIL)
    return handle


def _map(store: Store, rank: int, size: int) -> int:
    length = native.group_bytes(size)
    if rank == 0:
        fd = unnamed_file(length, "shm group")
    else:
        pid, number = store.get("segment").decode().split(" ", 1)
        if pid == "-":
            raise DistBackendError(number)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as failure:
            raise DistBackendError(
                f"shm group: the memory of rank 0, process {pid}, cannot be opened: {failure}; has it ended, or "
                "is it another user's?"
            ) from failure
    try:
        handle = int(native.attach(fd, rank, size))
    except OSError as failure:
        os.close(fd)
        raise no_room(length, "shm group", failure) from failure
    if rank == 0:
        store.set("segment", f"{os.getpid()} {fd}")  # now that there is room for it
    return handle
