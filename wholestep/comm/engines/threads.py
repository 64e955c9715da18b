"""Transports without processes: ranks that are threads (`thread`), and one process that plays a rank of many (`null`).

Both have one primitive, `_meet`: every rank shows an object and sees everyone's. Each collective is the plainest
form over it, which also serves as the oracle that the fast transports are tested against.
"""

from __future__ import annotations

import secrets
import threading
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.dist_errors import DistBackendError, DistError, DistMismatchError, DistRankError, DistTimeoutError
from wholestep.comm.engines.reference_reduce import naive_reduce
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup
from wholestep.comm.stores.store import Store
from wholestep.comm.work import Finished, Work


class MeetingGroup(ProcessGroup):
    """Every collective over `_meet`; asynchronous calls end before they return."""

    def _meet(self, what: str, shown: Any, opts: Options | None) -> list[Any]:
        raise DistBackendError(f"{type(self).__name__} does not implement {what}")

    def _show(self, what: str, like: torch.Tensor | None, shown: Any, opts: Options | None) -> list[Any]:
        """`_meet` with a description that must be alike on all ranks."""
        self.sequence += 1
        opts = opts or Options()
        words = f"#{self.sequence} {what} {opts.op.name} root {opts.root}"
        if like is not None:
            words += f" {str(like.dtype).removeprefix('torch.')} {list(like.shape)}"
        met = self._meet(words, (words, shown), opts)
        for rank, (theirs, _) in enumerate(met):
            if theirs != words:
                raise DistMismatchError(
                    f"group {self.group_name!r}: the ranks disagree: rank {self._rank} calls {words}; "
                    f"rank {rank} calls {theirs}"
                )
        return [value for _, value in met]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        for tensor in tensors:
            tensor.copy_(naive_reduce(self._show("all_reduce", tensor, tensor.clone(), opts), opts or Options()))
        return Finished(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        for tensor in tensors:
            parts = self._show("reduce", tensor, tensor.clone(), opts)
            if opts.root == self._rank:
                tensor.copy_(naive_reduce(parts, opts))
        return Finished(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        for tensor in tensors:
            tensor.copy_(self._show("broadcast", tensor, tensor.clone(), opts)[opts.root])
        return Finished(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        for outs, tensor in zip(outputs, inputs, strict=True):
            for out, part in zip(outs, self._show("all_gather", tensor, tensor.clone(), opts), strict=True):
                out.copy_(part.view_as(out))
        return Finished(outputs[0])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        for out, parts in zip(outputs, inputs, strict=True):
            met = self._show("reduce_scatter", out, [part.clone() for part in parts], opts)
            out.copy_(naive_reduce([theirs[self._rank] for theirs in met], opts or Options()))
        return Finished(outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        met = self._show("gather", inputs[0], inputs[0].clone(), opts)
        for out, part in zip(outputs[0] if outputs else [], met, strict=False):
            out.copy_(part)
        return Finished(outputs[0] if outputs else [])

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        shown = [part.clone() for part in inputs[0]] if inputs else []
        met = self._show("scatter", outputs[0], shown, opts)
        outputs[0].copy_(met[(opts or Options()).root][self._rank])
        return Finished(outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        met = self._show("all_to_all", None, [part.clone() for part in inputs], opts)
        for rank, out in enumerate(outputs):
            part = met[rank][self._rank]
            if part.numel() != out.numel() or part.dtype != out.dtype:
                raise DistMismatchError(
                    f"all_to_all: rank {rank} sends {list(part.shape)} {part.dtype}, "
                    f"rank {self._rank} expects {list(out.shape)} {out.dtype}"
                )
            out.copy_(part.view_as(out))
        return Finished(outputs)

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        even = [len(input) // self._size] * self._size, [len(output) // self._size] * self._size
        ins = list(input.split((opts and opts.in_splits) or even[0]))
        return self.alltoall(list(output.split((opts and opts.out_splits) or even[1])), ins, opts)

    def barrier(self, opts: Any = None) -> Work:
        self._show("barrier", None, None, opts)
        return Finished([])


class _Room:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.size, self.changed = size, threading.Condition()
        self.shown: dict[int, dict[int, Any]] = {}  # by meeting number, then rank
        self.standing: dict[int, str] = {}
        self.mail: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.left: set[int] = set()
        self.reasons: dict[int, str] = {}  # of ranks that said why they cannot go on


_rooms: dict[str, _Room] = {}
_rooms_lock = threading.Lock()


class ThreadGroup(MeetingGroup):
    """Ranks that are threads of one process, for tests of up to 64 ranks."""

    backend_name = "thread"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        self.timeout, self._meetings = timeout, 0
        if rank == 0:
            self._key = secrets.token_hex(8)
            with _rooms_lock:
                _rooms[self._key] = _Room(size)
            store.set("room", self._key)
        else:
            self._key = store.get("room").decode()
        with _rooms_lock:
            if self._key not in _rooms:
                raise DistBackendError("thread: rank 0 is in another process: use shm or gloo")
            self._room = _rooms[self._key]

    def _meet(self, what: str, shown: Any, opts: Options | None) -> list[Any]:
        room, number = self._room, self._meetings
        self._meetings += 1
        limit = ((opts and opts.timeout) or self.timeout).total_seconds()
        with room.changed:
            if self._rank in room.reasons:
                raise DistRankError(f"group {self.group_name!r} has ended: {room.reasons[self._rank]}")
            room.standing[self._rank] = what
            met = room.shown.setdefault(number, {})
            met[self._rank] = shown
            room.changed.notify_all()
            came = room.changed.wait_for(lambda: len(met) == room.size or bool(room.left), limit)
            if len(met) < room.size:
                raise self._absent(what, met, limit if not came else None)
            room.shown.pop(number - 1, None)  # all came here, so all have read the meeting before
            return [met[rank] for rank in range(room.size)]

    def _absent(self, what: str, met: dict[int, Any], limit: float | None) -> DistError:
        missing = [rank for rank in range(self._size) if rank not in met]
        gone = [rank for rank in missing if rank in self._room.left]
        here = f"group {self.group_name!r}: rank {self._rank} waits in {what}"
        stood = "; ".join(f"rank {r} last stood at {self._room.standing.get(r, 'no collective yet')}" for r in missing)
        if gone:
            first = next((rank for rank in gone if rank in self._room.reasons), gone[0])
            why = f"cannot go on: {self._room.reasons[first]}" if first in self._room.reasons else "has left the group"
            return DistRankError(f"{here}; rank {first} {why}; {stood}")
        return DistTimeoutError(f"{here} for {limit:g} s; {stood}")

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        with self._room.changed:
            self._room.mail.setdefault((self._rank, dst, tag), []).append(tensors[0].clone())
            self._room.changed.notify_all()
        return Finished(tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        return _Receipt(self, tensors[0], src, tag)

    def abort(self, reason: str) -> None:
        with self._room.changed:
            self._room.reasons[self._rank] = reason
            self._room.left.add(self._rank)
            self._room.changed.notify_all()

    def shutdown(self) -> None:
        with self._room.changed:
            self._room.left.add(self._rank)
            self._room.changed.notify_all()
        with _rooms_lock:
            if len(self._room.left) == self._size:
                _rooms.pop(self._key, None)


class _Receipt(Work):
    """A receive between threads: takes the letter when it is waited for."""

    def __init__(self, group: ThreadGroup, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._group, self._result, self._src, self._tag = group, [tensor], src, tag
        self.source, self._done = -1, False

    def _find(self) -> tuple[int, int, int] | None:
        me, mail = self._group.rank(), self._group._room.mail
        ranks = range(self._group.size()) if self._src < 0 else [self._src]
        return next((key for rank in ranks if mail.get(key := (rank, me, self._tag))), None)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._done:
            return True
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        limit = self._group.timeout.total_seconds() if limit is None else limit
        room, (tensor,) = self._group._room, self._result or []
        with room.changed:
            came = room.changed.wait_for(lambda: self._find() is not None or self._src in room.left, limit)
            key = self._find()
            if key is None:
                here = f"rank {self._group.rank()} of group {self._group.group_name!r}: recv from rank {self._src}"
                raise DistRankError(f"{here}: it has left") if came else DistTimeoutError(f"{here}: {limit:g} s passed")
            letter = room.mail[key].pop(0)
        self._done, self.source = True, key[0]
        if letter.numel() != tensor.numel() or letter.dtype != tensor.dtype:
            raise DistMismatchError(
                f"recv from rank {key[0]}: {list(tensor.shape)} {tensor.dtype} is required, "
                f"{list(letter.shape)} {letter.dtype} was sent"
            )
        tensor.copy_(letter.view_as(tensor))
        return True

    def is_completed(self) -> bool:
        with self._group._room.changed:
            return self._done or self._find() is not None


class NullGroup(MeetingGroup):
    """One process that plays rank r of N: every other rank shows what this one shows. For tracing and simulation."""

    backend_name = "null"
    ends_with_fork = False

    def __init__(self, store: Store | None, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        self.timeout = timeout
        self._mail: dict[int, list[torch.Tensor]] = {}

    def _meet(self, what: str, shown: Any, opts: Options | None) -> list[Any]:
        return [shown] * self._size

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """What comes from each rank is as much as is expected of it, from our own part for us."""
        mine = inputs[self._rank].reshape(-1)
        for out in outputs:
            if out.numel():
                repeats = -(-out.numel() // max(mine.numel(), 1))
                out.copy_(mine.repeat(repeats)[: out.numel()].view_as(out) if mine.numel() else torch.zeros_like(out))
        return Finished(outputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        if inputs and inputs[0]:
            outputs[0].copy_(inputs[0][self._rank])
        return Finished(outputs)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        self._mail.setdefault(tag, []).append(tensors[0].clone())
        return Finished(tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        letters = self._mail.get(tag)
        tensors[0].copy_(letters.pop(0).view_as(tensors[0])) if letters else tensors[0].zero_()
        return Finished(tensors)
