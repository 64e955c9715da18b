"""Transports without processes: ranks that are threads (`thread`), and one process that plays a rank of many (`null`).

Both have one primitive, `_exchange`: every rank gives an object and gets everyone's. Each collective over it is one
line, which also serves as the oracle that the fast transports are tested against.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.engines.reference_reduce import naive_reduce
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup, description, part_of, require_equal
from wholestep.comm.stores.store import Store
from wholestep.comm.work import Work, WorkQueue, seconds
from wholestep.errors import DistBackendError, DistError, DistMismatchError, DistRankError, DistTimeoutError

Given = list[list[torch.Tensor]]  # what each rank gives

# Each collective in its plainest form: what rank `me` gets.
_RESULTS: dict[str, Callable[[Given, int, Options], list[torch.Tensor]]] = {
    "all_reduce": lambda given, me, opts: [naive_reduce([one[0] for one in given], opts)],
    "reduce": lambda given, me, opts: [naive_reduce([one[0] for one in given], opts)] if me == opts.root else [],
    "reduce_scatter": lambda given, me, opts: [naive_reduce([one[me] for one in given], opts)],
    "broadcast": lambda given, me, opts: given[opts.root],
    "all_gather": lambda given, me, opts: [one[0] for one in given],
    "gather": lambda given, me, opts: [one[0] for one in given] if me == opts.root else [],
    "scatter": lambda given, me, opts: [given[opts.root][me]],
    "all_to_all": lambda given, me, opts: [one[me] for one in given],
    "barrier": lambda given, me, opts: [],
}


class ExchangeGroup(ProcessGroup):
    """Every collective over `_exchange`; asynchronous calls end before they return."""

    def _exchange(self, what: str, given: Any, opts: Options) -> list[Any]:
        """Gives an object to all ranks, and returns what each of them gives."""
        raise NotImplementedError

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        self.sequence += 1
        words = description(self.sequence, op, part_of(op, outs, ins), opts)
        found = self._exchange(words, (words, [one.clone() for one in ins]), opts)
        require_equal(self, [theirs for theirs, _ in found])
        parts = _RESULTS[op]([given for _, given in found], self._rank, opts)
        for rank, (out, part) in enumerate(zip(outs, parts, strict=False)):
            if part.numel() != out.numel() or part.dtype != out.dtype:
                raise DistMismatchError(
                    f"{op}: rank {rank} sends {list(part.shape)} {part.dtype}, "
                    f"rank {self._rank} expects {list(out.shape)} {out.dtype}"
                )
            out.copy_(part.view_as(out))
        return Work(outs)


class _Rendezvous:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.size, self.changed = size, threading.Condition()
        self.shown: dict[int, dict[int, Any]] = {}  # by meeting number, then rank
        self.last_call: dict[int, str] = {}
        self.mailboxes: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.left: dict[int, str] = {}  # ranks, and why they cannot go on where they said so


_rendezvous: dict[str, _Rendezvous] = {}


class ThreadGroup(ExchangeGroup):
    """Ranks that are threads of one process, for tests of up to 64 ranks."""

    backend_name = "thread"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        self.timeout, self._exchanges = timeout, 0
        self._queues: dict[tuple[int, int], WorkQueue] = {}  # by sender and tag
        if rank == 0:
            self._key = secrets.token_hex(8)
            _rendezvous[self._key] = _Rendezvous(size)
            store.set("room", self._key)
        else:
            self._key = store.get("room").decode()
        if self._key not in _rendezvous:
            raise DistBackendError("thread: rank 0 is in another process: use shm or gloo")
        self._shared = _rendezvous[self._key]

    def _exchange(self, what: str, given: Any, opts: Options) -> list[Any]:
        shared, number = self._shared, self._exchanges
        self._exchanges += 1
        limit = seconds(opts.timeout or self.timeout)
        with shared.changed:
            if reason := shared.left.get(self._rank):
                raise DistRankError(f"group {self.group_name!r} has ended: {reason}")
            shared.last_call[self._rank] = what
            found = shared.shown.setdefault(number, {})
            found[self._rank] = given
            shared.changed.notify_all()
            came = shared.changed.wait_for(lambda: len(found) == shared.size or bool(shared.left), limit)
            if len(found) < shared.size:
                raise self._missing_ranks(what, found, limit if not came else None)
            shared.shown.pop(number - 1, None)  # all came here, so all have read the meeting before
            return [found[rank] for rank in range(shared.size)]

    def _missing_ranks(self, what: str, found: dict[int, Any], limit: float | None) -> DistError:
        last_call, left = self._shared.last_call, self._shared.left
        missing = [rank for rank in range(self._size) if rank not in found]
        gone = sorted(left.keys() & missing, key=lambda rank: (not left[rank], rank))  # those first that said why
        here = f"group {self.group_name!r}: rank {self._rank} waits in {what}"
        stood = "; ".join(f"rank {r} last stood at {last_call.get(r, 'no collective yet')}" for r in missing)
        if gone:
            why = f"cannot go on: {left[gone[0]]}" if left[gone[0]] else "has left the group"
            return DistRankError(f"{here}; rank {gone[0]} {why}; {stood}")
        return DistTimeoutError(f"{here} for {limit:g} s; {stood}")

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        with self._shared.changed:
            self._shared.mailboxes.setdefault((self._rank, dst, tag), []).append(tensors[0].clone())
            self._shared.changed.notify_all()
        return Work(tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """In a thread, one for all receives of one kind: their messages come in order."""
        queue = self._queues.setdefault((src, tag), WorkQueue())
        return queue.start("recv", lambda: self._take(tensors[0], src, tag), tensors, True)

    @torch.no_grad()
    def _take(self, tensor: torch.Tensor, src: int, tag: int) -> int:
        """Receives a message and gives its sender."""
        shared, limit = self._shared, seconds(self.timeout)
        keys = [(rank, self._rank, tag) for rank in (range(self._size) if src < 0 else [src])]

        def found() -> tuple[int, int, int] | None:
            return next((key for key in keys if shared.mailboxes.get(key)), None)

        with shared.changed:
            came = shared.changed.wait_for(lambda: found() is not None or src in shared.left, limit)
            key = found()
            if key is None:
                here = f"rank {self._rank} of group {self.group_name!r}: recv from rank {src}"
                raise DistRankError(f"{here}: it has left") if came else DistTimeoutError(f"{here}: {limit:g} s passed")
            message = shared.mailboxes[key].pop(0)
        if message.numel() != tensor.numel() or message.dtype != tensor.dtype:
            raise DistMismatchError(
                f"recv from rank {key[0]}: {list(tensor.shape)} {tensor.dtype} is required, "
                f"{list(message.shape)} {message.dtype} was sent"
            )
        tensor.copy_(message.view_as(tensor))
        return key[0]

    def abort(self, reason: str) -> None:
        with self._shared.changed:
            self._shared.left[self._rank] = reason
            self._shared.changed.notify_all()

    def shutdown(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self.abort(self._shared.left.get(self._rank, ""))
        if len(self._shared.left) == self._size:
            _rendezvous.pop(self._key, None)


class NullGroup(ExchangeGroup):
    """One process that plays rank r of N: every other rank shows what this one shows. For tracing and simulation."""

    backend_name = "null"
    ends_with_fork = False

    def __init__(self, store: Store | None, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        self.timeout = timeout

    def _exchange(self, what: str, given: Any, opts: Options) -> list[Any]:
        return [given] * self._size

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        if op == "all_to_all":  # as much comes from each rank as is expected of it, from our own part for us
            mine = ins[self._rank].reshape(-1)
            for out in outs:
                repeats = -(-out.numel() // max(mine.numel(), 1))
                part = mine.repeat(repeats)[: out.numel()] if mine.numel() else torch.zeros_like(out)
                out.copy_(part.view_as(out))
            return Work(outs)
        return Work(outs) if op == "scatter" and not ins else super()._run(op, outs, ins, opts)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return Work(tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        tensors[0].zero_()
        return Work(tensors)
