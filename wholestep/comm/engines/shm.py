"""The shared-memory transport: ranks that are processes of one host, over the compiled engine in `native/`."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.engines import native_codes as codes
from wholestep.comm.engines.native_codes import Outcome, collective_error, message_error
from wholestep.comm.engines.shm_segment import attach
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup, part_of
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.shared_tensors import native
from wholestep.comm.stores.store import Store
from wholestep.comm.work import Work, seconds
from wholestep.errors import DistBackendError, DistError, DistTimeoutError

MANY = 256  # works under way, from which on those that have ended are let go
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_PART_FROM_EACH = ("all_gather", "gather", "all_to_all")  # outputs are a list, with a tensor from each rank
_PART_FOR_EACH = ("reduce_scatter", "scatter", "all_to_all")  # inputs are


def _packed(numbers: Sequence[int]) -> bytes | None:
    """Addresses or sizes as the engine takes them; None where there are none."""
    return struct.pack(f"{len(numbers)}Q", *numbers) if numbers else None


class ShmWork(Work):
    """A collective or a message under way. Any number of threads may wait for it. Keeps its tensors until it ends."""

    def __init__(self, group: ShmGroup, ticket: Any, result: list[torch.Tensor], keep: Any = None) -> None:
        self._group, self._ticket, self._result, self._keep = group, ticket, result, keep
        self._closing = threading.Lock()
        group.track(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        ticket = self._ticket
        if ticket is not None:
            ended = self._finish(ticket, None if timeout is None else seconds(timeout))
            with self._closing:
                if self._ticket is not None:
                    self._group.under_way.pop(id(self), None)
                    failure = ended()
                    if failure is not None:
                        self._failed(failure)
                    self._ticket = self._keep = None
        if self._failure is not None:
            raise self._failure
        return True

    def _finish(self, ticket: Any, limit: float | None) -> Callable[[], DistError | None]:
        """Waits in the engine; gives what then tells how it ended."""
        group = self._group
        outcome = native.finish(group._live("wait"), ticket, -1.0 if limit is None else float(limit))
        if isinstance(outcome, bool):
            raise DistTimeoutError(f"{group!r}: the collective did not end within {limit:g} s")
        return lambda: None if outcome is None else group.error(outcome)

    def is_completed(self) -> bool:
        ticket = self._ticket
        return ticket is None or not self._group._handle or self._test(ticket)

    def _test(self, ticket: Any) -> bool:
        return bool(native.test(self._group._handle, ticket))


class MessageWork(ShmWork):
    """A send or a receive."""

    def __init__(self, group: ShmGroup, ticket: Any, op: int, peer: int, tensor: torch.Tensor) -> None:
        self._op, self._peer = op, peer
        super().__init__(group, ticket, [tensor])

    def _finish(self, ticket: Any, limit: float | None) -> Callable[[], DistError | None]:
        group, (tensor,) = self._group, self._result or []
        limit = group._seconds if limit is None else limit
        status, source, received = native.p2p_finish(group._live(codes.OPS[self._op]), ticket, float(limit))

        def ended() -> DistError | None:
            self.source = source
            peer = self._peer if source < 0 else source
            return message_error(group, self._op, peer, status, received, tensor, limit) if status else None

        return ended

    def _test(self, ticket: Any) -> bool:
        return bool(native.p2p_test(self._group._handle, ticket))


class ShmGroup(ProcessGroup):
    """A group whose ranks are processes of one host and one user.

    Args:
        store: shared by all ranks of the group, and by them alone.
        rank, size: within the group; at most 256 ranks.
        timeout: for each collective.

    Attributes:
        culprit: the rank that the last failure named.
        latest: what the last call told the engine, for `plan_cache.learn`.
        under_way: works that have not been waited for, by their ids.

    Raises:
        DistBackendError: shared memory is full, or there are more ranks.
        DistStoreError: not all ranks came within the time-out.
    """

    backend_name = "shm"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        if size > 256:
            raise DistBackendError(f"shm carries at most 256 ranks, {size} are required: use gloo")
        self.timeout, self._seconds = timeout, seconds(timeout)
        self.under_way: dict[int, Work] = {}
        self.culprit = -1
        self.latest: tuple[int, ...] | None = None
        self._handle = self._ended = 0
        self._handle = attach(store, rank, size, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._seconds = seconds(timeout)
        native.forget_plans()  # which have it too

    @property
    def sequence(self) -> int:  # type: ignore[override]
        return native.sequence(self._handle) if self._handle else self._ended

    def shutdown(self) -> None:
        if self._handle:
            outcome = native.settle(self._handle, self._seconds)
            failure = None if outcome is None else self.error(outcome)
            handle, self._handle, self._ended = self._handle, 0, self.sequence
            native.stop(handle)
            self.under_way.clear()
            if failure is not None:
                raise failure

    def abort(self, reason: str) -> None:
        if self._handle:
            native.abort(self._handle, reason.encode())

    def track(self, work: Work) -> None:
        """Keeps a work, and its tensors, until it ends; of many lets go of those that have and nobody waited for."""
        self.under_way[id(work)] = work
        if len(self.under_way) > MANY:
            for one in list(self.under_way.values()):
                if one is not work and one.is_completed():
                    with contextlib.suppress(DistError):  # the work keeps it, for whoever waits later
                        one.wait()

    def error(self, outcome: Outcome) -> DistError:
        """The failure that the engine tells of."""
        self.culprit = outcome[1]
        return collective_error(self, outcome, self._handle, self._seconds)

    def _live(self, what: str) -> int:
        if not self._handle:
            raise ValueError(f"{what}: group {self.group_name!r} has been destroyed")
        return self._handle

    def _reducible(self, tensors: list[torch.Tensor], opts: Options, what: str) -> tuple[list[torch.Tensor], int]:
        """The tensors, multiplied for PREMUL_SUM, and the code of the reduction."""
        dtype, factor = tensors[0].dtype, opts.factor
        if codes.DTYPES.get(dtype, codes.UNKNOWN) >= len(codes.NUMBERS):
            raise TypeError(f"{what}: {dtype} cannot be reduced: one of {', '.join(codes.NUMBERS)} is required")
        if opts.op is RedOpType.PREMUL_SUM and factor is not None:
            if dtype in (torch.float32, torch.float64) and isinstance(factor, float) and factor == 1 / self._size:
                return tensors, codes.MEAN
            tensors = [(tensor * factor).to(dtype) for tensor in tensors]
        return tensors, codes.REDUCTIONS[opts.op]

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        part = part_of(op, outs, ins)
        shape = 0 if part is None else codes.shape_code(part.shape)
        return self._submit(op, outs, ins, opts, 0 if part is None else part.nbytes, shape)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        size = input.nbytes
        return self._submit("all_gather", [output], [input], opts, size, codes.shape_code(input.shape), (0, size))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        size = output.nbytes
        return self._submit("reduce_scatter", [output], [input], opts, size, codes.shape_code(output.shape), (size, 0))

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        shape = codes.shape_code(input.shape[1:])
        if opts is None or not (opts.in_splits or opts.out_splits):
            strides = input.nbytes // self._size, output.nbytes // self._size
            return self._submit("all_to_all", [output], [input], opts, 0, shape, strides)
        outs, ins = self.rows(output, opts.out_splits), self.rows(input, opts.in_splits)
        return self._submit("all_to_all", outs, ins, opts, 0, shape)

    def _submit(
        self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options | None, nbytes: int,
        shape: int, strides: tuple[int, int] | None = None,
    ) -> Work:  # fmt: skip
        """Hands a collective to the engine.

        Args:
            nbytes, shape: of the part that all ranks have in common, by which they notice that they disagree.
            strides: bytes from part to part, where inputs and outputs are one tensor each with the parts of all ranks.
        """
        opts, code, handle = opts or Options(), codes.OPS.index(op), self._live(op)
        dtype, elem, red = 0, 1, 0
        if ins or outs:
            like = (ins or outs)[0]
            if not like.is_cpu:
                raise ValueError(
                    f"{op}: shm moves CPU tensors, found one on {like.device}: use backend='cpu:shm,cuda:nccl'"
                )
            dtype, elem = codes.DTYPES.get(like.dtype, codes.UNKNOWN), like.element_size()
        if op in _REDUCTIONS:
            ins, red = self._reducible(ins, opts, op)
        sources, targets = [one.data_ptr() for one in ins], [one.data_ptr() for one in outs]
        in_list = _packed(sources) if strides is None and op in _PART_FOR_EACH else None
        out_list = _packed(targets) if strides is None and op in _PART_FROM_EACH else None
        src = sources[0] if sources and in_list is None else 0
        dst = targets[0] if targets and out_list is None else 0
        in_stride, out_stride = strides or (0, 0)
        in_sizes = out_sizes = None
        if op == "all_to_all":
            out_stride = out_stride or outs[0].nbytes
            in_sizes = _packed([one.nbytes for one in ins] if strides is None else [in_stride] * self._size)
            out_sizes = _packed([one.nbytes for one in outs] if strides is None else [out_stride] * self._size)
        limit = self._seconds if opts.timeout is None else seconds(opts.timeout)
        outcome = native.run(
            handle, code, dtype, red, opts.root, nbytes, shape, src, dst, in_stride, out_stride, elem, float(limit),
            opts.async_op, in_list, out_list, in_sizes, out_sizes,
        )  # fmt: skip
        plain = limit == self._seconds
        self.latest = (code, dtype, red, opts.root, nbytes, shape, in_stride, out_stride, elem) if plain else None
        if outcome is None:
            return Work(outs)
        if isinstance(outcome, tuple):
            raise self.error(outcome)
        return ShmWork(self, outcome, outs, (ins, outs))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return self._message(codes.SEND, tensors[0], dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """``src`` -1 takes a message from any rank; the work's ``source`` tells which."""
        return self._message(codes.RECV, tensors[0], src, tag)

    def _message(self, op: int, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        nbytes, dtype = tensor.nbytes, codes.DTYPES.get(tensor.dtype, codes.UNKNOWN)
        ticket = native.p2p_start(self._live(codes.OPS[op]), op == codes.SEND, peer, tag, tensor.data_ptr(), nbytes)
        self.latest = (op, dtype, 0, peer, nbytes, 0, 0, 0, tensor.element_size())
        return MessageWork(self, ticket, op, peer, tensor)
