"""The shared-memory transport: ranks that are processes of one host, over the compiled engine in `native/`."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch

from wholestep.comm.errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistRankError,
    DistTimeoutError,
)
from wholestep.comm.hosts import host_identity
from wholestep.comm.memory import native, need_native, no_room, unnamed_file
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.store import Store, store_based_barrier
from wholestep.comm.work import All, Finished, Work, seconds

# Codes of native/shm.h.
OPS = [
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
]
BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL = range(9)
REDUCTIONS = {
    RedOpType.SUM: 0,
    RedOpType.PRODUCT: 1,
    RedOpType.MIN: 2,
    RedOpType.MAX: 3,
    RedOpType.BAND: 4,
    RedOpType.BOR: 5,
    RedOpType.BXOR: 6,
    RedOpType.AVG: 7,
    RedOpType.PREMUL_SUM: 0,
}
_NUMBERS = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"]
_NUMBERS += ["uint16", "uint32", "uint64"]
_OTHERS = ["bool", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2"]
DTYPES = {getattr(torch, name): code for code, name in enumerate(_NUMBERS + _OTHERS)}
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPES.items()}
TIMEOUT, DIED, MISMATCH, ABORTED, MEMORY = 1, 2, 3, 4, 5
UNKNOWN = 255
MANY = 256  # works under way, from which on those that have ended are let go


def _addresses(tensors: list[torch.Tensor]) -> bytes:
    return struct.pack(f"{len(tensors)}Q", *(tensor.data_ptr() for tensor in tensors))


def _sizes(tensors: list[torch.Tensor]) -> bytes:
    return struct.pack(f"{len(tensors)}Q", *(tensor.nbytes for tensor in tensors))


def _shape_code(shape: torch.Size) -> int:
    return hash(tuple(shape)) & 0xFFFFFFFFFFFFFFFF


class ShmWork(Work):
    """A job of the engine. Keeps the tensors alive until it ends."""

    def __init__(self, group: ShmGroup, ticket: int, result: list[torch.Tensor], keep: Any) -> None:
        self._group, self._ticket, self._result, self._keep = group, ticket, result, keep
        group._under_way[ticket] = self
        if len(group._under_way) > MANY:
            group._reap()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._ticket:
            handle = self._group._live("wait")
            limit = seconds(timeout)
            outcome = native.finish(handle, self._ticket, -1.0 if limit is None else float(limit))
            if outcome is False:
                raise DistTimeoutError(f"{self._group!r}: the collective did not end within {limit:g} s")
            self._close(outcome)
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        return not self._ticket or bool(native.test(self._group._live("is_completed"), self._ticket))

    def _close(self, outcome: Any) -> None:
        self._group._under_way.pop(self._ticket, None)
        self._ticket, self._keep = 0, None
        if outcome is not None:
            self._failed(self._group._error(outcome))


class MessageWork(Work):
    """A send or a receive under way."""

    def __init__(self, group: ShmGroup, ticket: int, what: str, tensor: torch.Tensor) -> None:
        self._group, self._ticket, self._what, self._result = group, ticket, what, [tensor]
        self.source = -1
        group._under_way[ticket] = self

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._ticket:
            group, tensor = self._group, (self._result or [])[0]
            limit = seconds(timeout) or group.timeout.total_seconds()
            ticket, self._ticket = self._ticket, 0
            status, self.source, got = native.p2p_finish(group._live(self._what), ticket, float(limit))
            group._under_way.pop(ticket, None)
            here = f"rank {group.labels[group.rank()]} of group {group.group_name!r}: {self._what}"
            if status == TIMEOUT:
                self._failed(DistTimeoutError(f"{here} did not end within {limit:g} s"))
            elif status == DIED:
                self._failed(DistRankError(f"{here}: rank {group.labels[self.source]} has exited or was killed"))
            elif status == MISMATCH:
                self._failed(DistMismatchError(f"{here}: {tensor.nbytes} bytes are required, {got} were sent"))
            elif status:
                self._failed(DistBackendError(f"{here}: no shared memory left for the message"))
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        return not self._ticket or bool(native.p2p_test(self._group._live(self._what), self._ticket))


class ShmGroup(ProcessGroup):
    """A group whose ranks are processes of one host and one user.

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

    @property
    def sequence(self) -> int:  # type: ignore[override]
        return native.sequence(self._handle) if self._handle else self._ended

    def _attach(self, store: Store, timeout: timedelta) -> int:
        length = native.group_bytes(self._size)
        host = host_identity()  # else /proc could show us somebody else's process
        if self._rank == 0:
            fd = unnamed_file(length, "shm group")
            store.set("segment", f"{os.getpid()} {fd} {host}")
        else:
            pid, there, its_host = store.get("segment").decode().split(" ", 2)
            if its_host != host:
                raise DistBackendError(f"shm: ranks {self._rank} and 0 of the group are on different hosts")
            fd = os.open(f"/proc/{pid}/fd/{there}", os.O_RDWR | os.O_CLOEXEC)
        try:
            handle = native.attach(fd, self._rank, self._size)
        except OSError as failure:
            os.close(fd)
            raise no_room(length, "shm group", failure) from failure
        try:
            store_based_barrier(self._rank, store, "shm", self._size, timeout)
        except DistError:
            native.stop(handle)
            raise
        native.ready(handle)
        return int(handle)

    def shutdown(self) -> None:
        if self._handle:
            handle, self._handle, self._ended = self._handle, 0, self.sequence
            native.stop(handle)
            self._under_way.clear()

    def abort(self, reason: str) -> None:
        if self._handle:
            native.abort(self._handle, reason.encode())

    def _live(self, what: str) -> int:
        if not self._handle:
            raise ValueError(f"{what}: group {self.group_name!r} has been destroyed")
        return self._handle

    def _error(self, outcome: tuple[int, int, bytes, bytes]) -> DistError:
        status, culprit, mine, theirs = outcome
        self.culprit = culprit
        me, other = f"rank {self.labels[self._rank]}", f"rank {self.labels[culprit]}"
        here, there = self._describe(mine), self._describe(theirs)
        group = f"group {self.group_name!r}"
        if status == MISMATCH:
            return DistMismatchError(f"{group}: the ranks disagree: {me} calls {here}; {other} calls {there}")
        if status == DIED:
            return DistRankError(
                f"{group}: {other} has exited or was killed; {me} waits in {here}; it last stood at {there}"
            )
        if status == TIMEOUT:
            return DistTimeoutError(
                f"{group}: {me} waited {self._seconds:g} s in {here} for {other}, which last stood at {there}"
            )
        reason = native.reason(self._handle, culprit).decode(errors="replace") if status == ABORTED else ""
        if reason:
            return DistRankError(f"{group}: {other} cannot go on: {reason}; {me} is in {here}")
        if status == MEMORY:
            return DistBackendError(f"{group}: {me} cannot read the memory of {other} in {here}")
        return DistBackendError(
            f"{group}: {other} has left the group, or the group has failed before; {me} is in {here}"
        )

    def _describe(self, desc: bytes) -> str:
        op, dtype, red, _, root, size, shape, seq = struct.unpack("<BBBBIQQQ", desc)
        if seq == 0 and size == 0 and op == 0:
            return "no collective yet"
        words = [f"#{seq} {OPS[op]}"]
        if op in (ALL_REDUCE, REDUCE, REDUCE_SCATTER):
            words.append(
                "/".join(kind.name for kind, code in REDUCTIONS.items() if code == red and kind.name != "PREMUL_SUM")
            )
        if op in (REDUCE, BROADCAST, GATHER, SCATTER):
            words.append(f"root {root}")
        if op != BARRIER:
            words.append(f"{_NAMES.get(dtype, 'dtype?')} {size} bytes shape {shape % 0x10000:04x}")
        return " ".join(words)

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
        plain = ins is None and outs is None and limit == self._seconds
        self.latest = (op, code, red, opts.root, nbytes, shape, in_stride, out_stride, elem) if plain else None
        if outcome is None:
            return Finished(result)
        if isinstance(outcome, int):
            return ShmWork(self, outcome, result, keep)
        raise self._error(outcome)

    def _reap(self) -> None:
        """Lets go of works that have ended and that nobody has waited for."""
        for work in list(self._under_way.values()):
            if work.is_completed():
                with contextlib.suppress(DistError):  # the work keeps it, for whoever waits later
                    work.wait()

    def _reducing(self, tensor: torch.Tensor, opts: Options | None, what: str) -> tuple[torch.Tensor, int]:
        """The tensor as a dtype that the engine reduces, multiplied for PREMUL_SUM, and the code of the reduction."""
        kind = opts.op if opts else RedOpType.SUM
        if DTYPES.get(tensor.dtype, UNKNOWN) >= len(_NUMBERS):
            raise TypeError(f"{what}: {tensor.dtype} cannot be reduced: one of {', '.join(_NUMBERS)} is required")
        if kind is RedOpType.PREMUL_SUM and opts is not None and opts.factor is not None:
            tensor = tensor * opts.factor
        return tensor, REDUCTIONS[kind]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        works = [self._all_reduce(tensor, opts) for tensor in tensors]
        return works[0] if len(works) == 1 else All(works, tensors)

    def _all_reduce(self, tensor: torch.Tensor, opts: Options | None) -> Work:
        source, red = self._reducing(tensor, opts, "all_reduce")
        at = tensor.data_ptr()
        return self._start(
            ALL_REDUCE, source, opts, [tensor], (source, tensor), nbytes=tensor.nbytes, shape=_shape_code(tensor.shape),
            src=at if source.data_ptr() == at else source.data_ptr(), dst=at, red=red,
        )  # fmt: skip

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        source, red = self._reducing(tensor, opts, "reduce")
        return self._start(
            REDUCE, source, opts, tensors, (source, tensor), nbytes=tensor.nbytes, shape=_shape_code(tensor.shape),
            src=source.data_ptr(), dst=tensor.data_ptr(), red=red,
        )  # fmt: skip

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        at = tensor.data_ptr()
        return self._start(
            BROADCAST, tensor, opts, tensors, tensor,
            nbytes=tensor.nbytes, shape=_shape_code(tensor.shape), src=at, dst=at,
        )  # fmt: skip

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,), (outs,) = inputs, outputs
        return self._start(
            ALL_GATHER, tensor, opts, outs, (tensor, outs), nbytes=tensor.nbytes, shape=_shape_code(tensor.shape),
            src=tensor.data_ptr(), outs=_addresses(outs),
        )  # fmt: skip

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._start(
            ALL_GATHER, input, opts, [output], (input, output), nbytes=input.nbytes, shape=_shape_code(input.shape),
            src=input.data_ptr(), dst=output.data_ptr(), out_stride=input.nbytes,
        )  # fmt: skip

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        (output,), (parts,) = outputs, inputs
        ready = [self._reducing(part, opts, "reduce_scatter") for part in parts]
        sources, red = [source for source, _ in ready], ready[0][1]
        return self._start(
            REDUCE_SCATTER, sources[0], opts, outputs, (sources, output), nbytes=output.nbytes,
            shape=_shape_code(output.shape), dst=output.data_ptr(), ins=_addresses(sources), red=red,
        )  # fmt: skip

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        source, red = self._reducing(input, opts, "reduce_scatter_tensor")
        return self._start(
            REDUCE_SCATTER, source, opts, [output], (source, output), nbytes=output.nbytes, red=red,
            shape=_shape_code(output.shape), src=source.data_ptr(), in_stride=output.nbytes, dst=output.data_ptr(),
        )  # fmt: skip

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = inputs
        outs = outputs[0] if outputs else []
        return self._start(
            GATHER, tensor, opts, outs, (tensor, outs), nbytes=tensor.nbytes, shape=_shape_code(tensor.shape),
            src=tensor.data_ptr(), outs=_addresses(outs) if outs else None,
        )  # fmt: skip

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        (output,) = outputs
        parts = inputs[0] if inputs else []
        return self._start(
            SCATTER, output, opts, outputs, (parts, output), nbytes=output.nbytes, shape=_shape_code(output.shape),
            dst=output.data_ptr(), ins=_addresses(parts) if parts else None,
        )  # fmt: skip

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._start(
            ALL_TO_ALL, inputs[0], opts, outputs, (outputs, inputs), ins=_addresses(inputs), outs=_addresses(outputs),
            in_sizes=_sizes(inputs), out_sizes=_sizes(outputs),
        )  # fmt: skip

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        row = math.prod(input.shape[1:]) * input.element_size()
        if opts is None or not (opts.in_splits or opts.out_splits):
            part = input.nbytes // self._size
            sizes = struct.pack(f"{self._size}Q", *[part] * self._size)
            return self._start(
                ALL_TO_ALL, input, opts, [output], (output, input), shape=_shape_code(input.shape[1:]),
                src=input.data_ptr(), dst=output.data_ptr(), in_stride=part, out_stride=part, in_sizes=sizes,
                out_sizes=struct.pack(f"{self._size}Q", *[output.nbytes // self._size] * self._size),
            )  # fmt: skip
        ins = self._rows(input.shape[0], opts.in_splits if opts else [], row)
        outs = self._rows(output.shape[0], opts.out_splits if opts else [], row)
        starts = [list(accumulate(sizes, initial=at.data_ptr()))[:-1] for sizes, at in ((ins, input), (outs, output))]
        n = f"{self._size}Q"
        return self._start(
            ALL_TO_ALL, input, opts, [output], (output, input), shape=_shape_code(input.shape[1:]),
            ins=struct.pack(n, *starts[0]), outs=struct.pack(n, *starts[1]),
            in_sizes=struct.pack(n, *ins), out_sizes=struct.pack(n, *outs),
        )  # fmt: skip

    def _rows(self, rows: int, splits: list[int], row: int) -> list[int]:
        return [split * row for split in splits or [rows // self._size] * self._size]

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return self._message(1, tensors[0], dst, tag, f"send to rank {self.labels[dst]}")

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """``src`` -1 takes a message from any rank; the work's ``source`` tells which."""
        return self._message(0, tensors[0], src, tag, "recv" if src < 0 else f"recv from rank {self.labels[src]}")

    def _message(self, sending: int, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Work:
        ticket = native.p2p_start(self._live(what), sending, peer, tag, tensor.data_ptr(), tensor.nbytes)
        return MessageWork(self, ticket, what, tensor)

    def barrier(self, opts: Any = None) -> Work:
        return self._start(BARRIER, None, opts, [])
