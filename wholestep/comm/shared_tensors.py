"""Tensors in memory that the ranks of a host share, on which collectives work in place without a copy."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
import weakref
from collections.abc import Sequence

import torch

from wholestep.comm.engines import _native as native
from wholestep.errors import DistBackendError

SHARED_FOLDER = "/dev/shm"
PAGE = 4096


def unnamed_file(length: int, what: str) -> int:
    """A file in shared memory that has no name, so that nothing is left when its users end, however they end.

    Raises:
        DistBackendError: /dev/shm is missing or too small.
    """
    try:
        fd = os.open(SHARED_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        raise DistBackendError(f"{what}: no file can be made in {SHARED_FOLDER}: {failure}") from failure
    try:
        os.ftruncate(fd, length)
    except OSError as failure:
        os.close(fd)
        raise no_room(length, what, failure) from failure
    return fd


def no_room(length: int, what: str, failure: OSError) -> DistBackendError:
    """The error for shared memory that cannot be had."""
    if failure.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return DistBackendError(
            f"{what}: {length:,} bytes of shared memory are required, this process may write files of {limit:,} "
            f"({failure}): raise the limit (`ulimit -f unlimited`)"
        )
    room = os.statvfs(SHARED_FOLDER)
    return DistBackendError(
        f"{what}: {length:,} bytes of shared memory are required, {SHARED_FOLDER} has "
        f"{room.f_bavail * room.f_frsize:,} free ({failure}): enlarge it (`mount -o remount,size=…`, "
        "`docker run --shm-size=…`) or use a smaller world or tensor"
    )


class _Pool:
    """Blocks by size. A block whose tensor has died is kept for the next of its size: mapping costs page faults."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._next = 1

    def take(self, length: int) -> int:
        with self._lock:
            if self._free.get(length):
                return self._free[length].pop()
            number, self._next = self._next, self._next + 1
        what = "comm.empty(shared=True)"
        fd = unnamed_file(length, what)
        try:
            return native.allocate(fd, length, number)
        except OSError as failure:
            os.close(fd)
            raise no_room(length, what, failure) from failure

    def give(self, address: int, length: int) -> None:
        with self._lock:
            self._free.setdefault(length, []).append(address)


_pool = _Pool()


def renew_pool() -> None:
    """In a forked process: the blocks of the pool so far are its parent's, those of tensors that die here, too."""
    global _pool
    old, _pool = _pool, _Pool()
    old._lock, _pool._next = threading.Lock(), old._next


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, shared: bool = False, requires_grad: bool = False
) -> torch.Tensor:
    """An uninitialised tensor; with ``shared`` in memory on which the shm transport works in place.

    Args:
        size: the shape, as for `torch.empty`.
        shared: the storage goes back to a pool, for the next tensor of its size, when the last tensor on it dies.

    Raises:
        DistBackendError: shared memory is full.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    if not shared or shape.numel() == 0:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    count = shape.numel() * dtype.itemsize
    length = -(-count // PAGE) * PAGE
    address = _pool.take(length)
    block = (ctypes.c_char * length).from_address(address)
    weakref.finalize(block, _pool.give, address, length).atexit = False
    flat = torch.frombuffer(block, dtype=dtype, count=shape.numel())
    return flat.view(shape).requires_grad_(requires_grad)
