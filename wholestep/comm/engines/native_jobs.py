"""Jobs of the compiled engine in `native/`: their group, how they start and end, and their failures in words.

`shm.py` has the collectives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.diagnostics import flight_recorder
from wholestep.comm.diagnostics.debug_level import DebugLevel, get_debug_level
from wholestep.comm.dist_errors import DistBackendError, DistError, DistMismatchError, DistRankError, DistTimeoutError
from wholestep.comm.engines.hosts import host_identity
from wholestep.comm.engines.native_codes import (
    ABORTED,
    DIED,
    DTYPES,
    MEMORY,
    MISMATCH,
    OPS,
    SEND,
    TIMEOUT,
    UNKNOWN,
    describe,
    disagreement,
    sequence_of,
)
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup
from wholestep.comm.shared_tensors import native, need_native, no_room, unnamed_file
from wholestep.comm.stores.store import Store
from wholestep.comm.stores.store_barrier import barrier_keys, forget, give_up, leave_together, store_based_barrier
from wholestep.comm.work import Finished, Work, seconds

RING = 1 << 20  # bytes that a rank's messages to another one need, about
MANY = 256  # works under way, from which on those that have ended are let go


class EngineJob(Work):
    """A collective or a message under way. Any number of threads may wait for it. Keeps its tensors until it ends."""

    def __init__(self, group: JobGroup, ticket: Any, result: list[torch.Tensor], keep: Any = None) -> None:
        self._group, self._ticket, self._result, self._keep = group, ticket, result, keep
        self._closing = threading.Lock()
        group._under_way[id(self)] = self
        if len(group._under_way) > MANY:
            group._reap()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        ticket = self._ticket
        if ticket is not None:
            ended = self._finish(ticket, seconds(timeout))
            with self._closing:
                if self._ticket is not None:
                    self._group._under_way.pop(id(self), None)
                    failure = ended()
                    if failure is not None:
                        self._failed(failure)
                    self._ticket = self._keep = None
        if self._failure is not None:
            raise self._failure
        return True

    def _finish(self, ticket: Any, limit: float | None) -> Callable[[], DistError | None]:
        """Waits in the engine; gives what then tells how it ended."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        ticket = self._ticket
        return ticket is None or not self._group._handle or self._test(ticket)

    def _test(self, ticket: Any) -> bool:
        raise NotImplementedError


class ShmWork(EngineJob):
    """A collective of the engine."""

    def _finish(self, ticket: Any, limit: float | None) -> Callable[[], DistError | None]:
        group = self._group
        outcome = native.finish(group._live("wait"), ticket, -1.0 if limit is None else float(limit))
        if isinstance(outcome, bool):
            raise DistTimeoutError(f"{group!r}: the collective did not end within {limit:g} s")
        return lambda: None if outcome is None else group._error(outcome)

    def _test(self, ticket: Any) -> bool:
        return bool(native.test(self._group._handle, ticket))


class MessageWork(EngineJob):
    """A send or a receive."""

    source = -1

    def __init__(self, group: JobGroup, ticket: Any, op: int, peer: int, tensor: torch.Tensor) -> None:
        self._op, self._peer = op, peer
        super().__init__(group, ticket, [tensor])

    def _finish(self, ticket: Any, limit: float | None) -> Callable[[], DistError | None]:
        group, (tensor,) = self._group, self._result or []
        limit = limit or group.timeout.total_seconds()
        status, source, got = native.p2p_finish(group._live(OPS[self._op]), ticket, float(limit))

        def ended() -> DistError | None:
            self.source = source
            peer = self._peer if source < 0 else source
            return group._message_error(self._op, peer, status, got, tensor, limit) if status else None

        return ended

    def _test(self, ticket: Any) -> bool:
        return bool(native.p2p_test(self._group._handle, ticket))


class JobGroup(ProcessGroup):
    """A group whose ranks are processes of one host and one user: how it begins, runs jobs, and fails.

    Args:
        store: shared by all ranks of the group, and by them alone.
        rank, size: within the group; at most 256 ranks.
        timeout: for each collective.

    Raises:
        DistBackendError: the engine is not built, the ranks are not on one host, or shared memory is full.
        DistStoreError: not all ranks came within the time-out.
    """

    backend_name = "shm"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        need_native()
        if size > 256:
            raise DistBackendError(f"shm carries at most 256 ranks, {size} are required: use gloo")
        self.timeout, self._store = timeout, store
        self._seconds = timeout.total_seconds()
        self._under_way: dict[int, Work] = {}
        self.culprit = -1  # the rank that the last failure named
        self.latest: tuple[int, ...] | None = None  # what the last call told the engine, for `quick.learn`
        self._handle = self._ended = 0
        self._handle = self._attach(store, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout, self._seconds = timeout, timeout.total_seconds()
        native.forget_plans()  # which have it too

    @property
    def sequence(self) -> int:  # type: ignore[override]
        return native.sequence(self._handle) if self._handle else self._ended

    def _attach(self, store: Store, timeout: timedelta) -> int:
        handle = 0
        try:
            handle = self._map(store)
            store_based_barrier(self._rank, store, "shm", self._size, timeout)
        except (DistError, ValueError) as failure:
            if handle:
                native.stop(handle)
            elif isinstance(failure, DistError):
                self._give_up(store, failure)
            if isinstance(failure, DistBackendError):
                leave_together(store, "shm", self._size)
            raise
        forget(store, "shm", self._size, ["segment", *barrier_keys("shm", self._size)])
        native.ready(handle, get_debug_level() is DebugLevel.DETAIL)
        return int(handle)

    def _give_up(self, store: Store, failure: DistError) -> None:
        why = DistBackendError(f"rank {self._rank} of the group cannot go on: {failure}")
        give_up(store, "shm", why)
        if self._rank == 0:
            store.set("segment", f"- - {why}")

    def _map(self, store: Store) -> int:
        """The group's memory, which rank 0 makes and shows to the others.

        Raises:
            DistBackendError: there is none, on rank 0 or here.
        """
        length = native.group_bytes(self._size)
        host = host_identity()  # else /proc could show us somebody else's process
        if self._rank == 0:
            fd = unnamed_file(length, "shm group")
        else:
            pid, there, said = store.get("segment").decode().split(" ", 2)
            if pid == "-":
                raise DistBackendError(said)
            if said != host:
                raise DistBackendError(f"shm: ranks {self._rank} and 0 of the group are on different hosts")
            try:
                fd = os.open(f"/proc/{pid}/fd/{there}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as failure:
                raise DistBackendError(
                    f"shm group: the memory of rank 0, process {pid}, cannot be opened: {failure}; has it ended, or "
                    "is it another user's?"
                ) from failure
        try:
            handle = int(native.attach(fd, self._rank, self._size))
        except OSError as failure:
            os.close(fd)
            raise no_room(length, "shm group", failure) from failure
        if self._rank == 0:
            store.set("segment", f"{os.getpid()} {fd} {host}")  # now that there is room for it
        return handle

    def shutdown(self) -> None:
        if self._handle:
            outcome = native.settle(self._handle, self._seconds)
            failure = None if outcome is None else self._error(outcome)
            handle, self._handle, self._ended = self._handle, 0, self.sequence
            native.stop(handle)
            self._under_way.clear()
            if failure is not None:
                raise failure

    def abort(self, reason: str) -> None:
        if self._handle:
            native.abort(self._handle, reason.encode())

    def _live(self, what: str) -> int:
        if not self._handle:
            raise ValueError(f"{what}: group {self.group_name!r} has been destroyed")
        return self._handle

    def _error(self, outcome: tuple[int, int, bytes, bytes, int]) -> DistError:
        status, culprit, mine, theirs, late = outcome
        self.culprit = culprit
        me, other = f"rank {self.labels[self._rank]}", f"rank {self.labels[culprit]}"
        here, there = describe(mine), describe(theirs)
        group = f"group {self.group_name!r}"
        if status == MISMATCH:
            what = disagreement(mine, theirs, me, other, self.labels)
            gone_on = f"; {me} had gone on from {self._place(mine)}" if late else ""
            return DistMismatchError(f"{group}: the ranks disagree: {what}{gone_on}")
        if status == DIED:
            return DistRankError(
                f"{group}: {other} has exited or was killed; {me} waits in {here}; it last stood at {there}"
            )
        if status == TIMEOUT:
            return DistTimeoutError(
                f"{group}: {me} waited {self._seconds:g} s in {here} for {other}, which last stood at {there}"
            )
        if status == ABORTED and not self._handle:
            return DistBackendError(f"{group}: {me} destroyed the group while it waited in {here}")
        reason = native.reason(self._handle, culprit).decode(errors="replace") if status == ABORTED else ""
        if reason:
            return DistRankError(f"{group}: {other} cannot go on: {reason}; {me} is in {here}")
        if status == MEMORY:
            return DistBackendError(f"{group}: {me} cannot read the memory of {other} in {here}")
        return DistBackendError(
            f"{group}: {other} has left the group, or the group has failed before; {me} is in {here}"
        )

    def _message_error(
        self, op: int, peer: int, status: int, got: int, tensor: torch.Tensor, limit: float
    ) -> DistError:
        """Why a message to or from ``peer`` (-1: whoever sends first) ended with ``status`` after ``got`` bytes."""
        other = "" if peer < 0 else f" {'to' if op == SEND else 'from'} rank {self.labels[peer]}"
        here = f"rank {self.labels[self._rank]} of group {self.group_name!r}: {OPS[op]}{other}"
        if status == TIMEOUT:
            return DistTimeoutError(f"{here} did not end within {limit:g} s")
        if status == DIED:
            return DistRankError(f"{here}: rank {self.labels[peer]} has exited or was killed")
        if status == MISMATCH:
            return DistMismatchError(f"{here}: {tensor.nbytes} bytes are required, {got} were sent")
        if status == ABORTED:
            return DistBackendError(f"{here}: the group was destroyed")
        return no_room(RING, f"{here}: messages between two ranks", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _place(self, mine: bytes) -> str:
        """An earlier collective: its number, and the user's line while the flight recorder has it."""
        seq = sequence_of(mine)
        where = flight_recorder.place(self.group_name, seq)
        return f"#{seq}, which {where} called" if where else f"#{seq}"

    def _start(
        self,
        op: int,
        like: torch.Tensor | None,
        opts: Options | None,
        result: list[torch.Tensor],
        keep: Any = None,
        *,
        nbytes: int = 0,
        shape: int = 0,
        src: int = 0,
        dst: int = 0,
        in_stride: int = 0,
        out_stride: int = 0,
        red: int = 0,
        ins: bytes | None = None,
        outs: bytes | None = None,
        in_sizes: bytes | None = None,
        out_sizes: bytes | None = None,
    ) -> Work:
        opts = opts or Options()
        handle = self._live(OPS[op])
        if like is not None and not like.is_cpu:
            raise ValueError(
                f"{OPS[op]}: shm moves CPU tensors, found one on {like.device}: use backend='cpu:shm,cuda:nccl'"
            )
        limit = self._seconds if opts.timeout is None else opts.timeout.total_seconds()
        code, elem = (0, 1) if like is None else (DTYPES.get(like.dtype, UNKNOWN), like.element_size())
        outcome = native.run(
            handle, op, code, red, opts.root, nbytes, shape, src, dst, in_stride, out_stride,
            elem, float(limit), opts.async_op, ins, outs, in_sizes, out_sizes,
        )  # fmt: skip
        usual = limit == self._seconds
        self.latest = (op, code, red, opts.root, nbytes, shape, in_stride, out_stride, elem) if usual else None
        if outcome is None:
            return Finished(result)
        if isinstance(outcome, tuple):
            raise self._error(outcome)
        return ShmWork(self, outcome, result, keep)

    def _reap(self) -> None:
        """Lets go of works that have ended and that nobody has waited for."""
        for work in list(self._under_way.values()):
            if work.is_completed():
                with contextlib.suppress(DistError):  # the work keeps it, for whoever waits later
                    work.wait()
