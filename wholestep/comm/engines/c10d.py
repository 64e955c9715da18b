"""The engines of torch.distributed (Gloo, NCCL, MPI, UCC) behind our `ProcessGroup`.

The only file of the package, beside the backend registration, that imports `torch.distributed`. It uses the
engines alone, never torch's own default group, so that a program may use both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as options  # the home of the options that not every release re-exports

from wholestep.comm.api import collective_table as table
from wholestep.comm.engines.c10d_adapters import KNOWN, EngineWork, LengthPrefixed, TorchStore, movable
from wholestep.comm.engines.reference_reduce import average
from wholestep.comm.process_group import (
    DEFAULT_TIMEOUT,
    DebugLevel,
    Options,
    ProcessGroup,
    description,
    get_debug_level,
    in_bytes,
    in_words,
    part_of,
    require_equal,
)
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.stores.store import DEFAULT_STORE_TIMEOUT, PrefixStore, Store
from wholestep.comm.stores.store_barrier import exchange
from wholestep.comm.work import All, Work, checked_timeout
from wholestep.errors import DistBackendError, DistError, DistNetworkError, DistRankError
from wholestep.torch_compat import gloo_options

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # the ecosystem's way to say which network Gloo uses
_OPS: dict[RedOpType, Any] = {
    kind: getattr(dist.ReduceOp, kind.name) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM
}


# Each other collective.
_CALLS = {row.name: row for row in (table.BROADCAST, table.ALL_GATHER, table.GATHER, table.SCATTER, table.BARRIER)}


class _ForTorch(dist.Store):
    """A store of ours as one of torch, for its engines."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.ours = store


for _name in ("set", "add", "compare_set", "get", "wait", "check", "delete_key", "set_timeout"):
    setattr(_ForTorch, _name, lambda self, *args, name=_name: getattr(self.ours, name)(*args))


def agent_store(host: str, port: int, timeout: timedelta) -> Store:
    """The store of torchrun's agent.

    Raises:
        DistNetworkError: nothing answers there.
    """
    try:
        return TorchStore(dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False), timeout)
    except RuntimeError as failure:
        raise DistNetworkError(f"no store of a torchrun agent at {host}:{port}: {failure}") from failure


def torch_world() -> tuple[int, int, Store] | None:
    """Rank, size and a store of the process group that torch.distributed has made in this process, if there is one."""
    whole: Any = dist.group.WORLD if dist.is_initialized() else None
    if whole is None:
        return None
    store = TorchStore(whole.get_group_store(), DEFAULT_STORE_TIMEOUT)
    return dist.get_rank(), dist.get_world_size(), PrefixStore("wholestep", store)


def ranks_of(group: Any) -> list[int] | None:
    """The global ranks of a group of torch.distributed's, over whichever backend; None for others."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    return dist.get_process_group_ranks(group)


def _engine_class(backend: str) -> Any:
    return getattr(dist, f"ProcessGroup{'Gloo' if backend == 'gloo' else backend.upper()}", None)


def has_engine(backend: str) -> bool:
    """True when this build of torch has the engine."""
    return _engine_class(backend) is not None


class C10dGroup(ProcessGroup):
    """A group over one engine.

    Args:
        backend: "gloo", "nccl", "mpi" or "ucc".
        store: shared by the ranks of the group.
        rank, size: within the group.
        timeout: for each collective.
        checked: whether lengths of messages are compared, where the engine does not see to it itself.

    Raises:
        DistBackendError: this build of torch has no such engine.
    """

    in_profiles = True

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT,
        checked: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self.backend_name, self.timeout = backend, checked_timeout(timeout)
        engine = _engine_class(backend)
        if engine is None:
            raise DistBackendError(f"torch {torch.__version__} was built without {backend}: use gloo or shm")
        self._ours, self._store = store, _ForTorch(store)
        exchange(rank, store, "engine", size, timeout)  # the engine itself would not say who is missing
        address = store.local_address() if backend == "gloo" and INTERFACE_VARIABLE not in os.environ else ""
        try:
            # where the store was reached, the others are too: Gloo itself would ask for the host's name, which many a
            # host resolves to an address that others cannot reach, or to one beyond loopback without need
            self._engine = engine(
                self._store, rank, size, gloo_options(engine, address, self.timeout) if address else self.timeout
            )
        except RuntimeError as failure:
            raise DistBackendError(f"{backend} cannot start on rank {rank}: {failure}") from failure

        self._messages = LengthPrefixed(self._send, self._recv, self._here) if checked and backend == "gloo" else None

    def shutdown(self) -> None:
        if self._messages is not None:
            self._messages.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(RuntimeError):
                engine.shutdown()
            # Here the engine ends and joins its threads: one that still lets go of a tensor while the interpreter ends
            # would abort the program ("terminate called without an active exception").
            del engine

    def abort(self, reason: str) -> None:
        if self._engine is not None:
            with contextlib.suppress(DistError):  # the store may have ended with its master
                self._ours.compare_set("aborted", "", f"rank {self.labels[self._rank]} cannot go on: {reason}")
            self.shutdown()  # which the others' engines notice

    def _here(self) -> str:
        return f"rank {self.labels[self._rank]} of group {self.group_name!r}"

    def abort_reason(self) -> str:
        """What a rank that aborted the group said; nothing where none did."""
        with contextlib.suppress(DistError):
            if self._ours.check(["aborted"]):
                return self._ours.get("aborted").decode()
        return ""

    def _call(self, op: str, words: str, result: list[torch.Tensor], start: Callable[[], Any]) -> Work:
        """Starts something in the engine.

        Args:
            words: what must be equal on all ranks; empty for messages and comparisons.
        """
        if self._engine is None:
            reason = self.abort_reason()
            kind = DistRankError if reason else DistBackendError
            raise kind(f"{op}: group {self.group_name!r} has ended. {reason}")
        if words and get_debug_level() is DebugLevel.DETAIL:
            self.compare(words)
        try:
            return EngineWork(start(), f"{self._here()}: {op}", self.abort_reason, result)
        except RuntimeError as failure:
            raise DistBackendError(f"{self.backend_name} cannot run {op}: {failure}") from failure

    def compare(self, text: str) -> None:
        """Shows what this rank is about to call to all others, and raises when one calls something else.

        Raises:
            DistMismatchError: a rank shows another text.
        """
        mine = in_bytes(text)
        shown = [torch.empty_like(mine) for _ in range(self._size)]
        made = self._options(options.AllgatherOptions, Options())
        self._call("comparison", "", shown, lambda: self._engine.allgather([shown], [mine], made)).wait()
        require_equal(self, list(map(in_words, shown)))

    def _options(self, kind: type, opts: Options) -> Any:
        made = kind()
        made.timeout = checked_timeout(opts.timeout or self.timeout)
        if hasattr(made, "rootRank"):
            made.rootRank = opts.root
        return made

    def _run(self, op: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        if op == "all_to_all":
            return self._all_to_all(outs, ins, opts)
        self.sequence += 1
        words = description(self.sequence, op, part_of(op, outs, ins), opts)
        if op in ("all_reduce", "reduce", "reduce_scatter"):
            return self._reduce(op, words, outs, ins, opts)
        kind = getattr(options, f"{op.replace('_', '').capitalize()}Options")
        row, made, to, source = _CALLS[op], self._options(kind, opts), movable(outs), movable(ins)
        return self._call(op, words, outs, lambda: row.start(self._engine, to, source, made))

    def _reduce(self, op: str, words: str, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        """Gloo knows neither AVG nor PREMUL_SUM, so they scale after or before. It has no reduce-scatter: an all-reduce
        of which one part is kept. Its reduce sums in the tensors of all ranks.

        Raises:
            TypeError: a dtype that engines do not reduce.
        """
        if ins[0].dtype not in KNOWN:
            raise TypeError(f"{op}: {self.backend_name} does not reduce {ins[0].dtype}: convert to a wider type first")
        scratch = ins[0] if op == "all_reduce" else torch.stack(ins)
        if opts.op is RedOpType.PREMUL_SUM and opts.factor is not None:
            scratch.copy_(scratch * opts.factor)
        made = self._options(options.ReduceOptions if op == "reduce" else options.AllreduceOptions, opts)
        made.reduceOp = dist.ReduceOp.SUM if opts.op in (RedOpType.AVG, RedOpType.PREMUL_SUM) else _OPS[opts.op]

        def start() -> Any:
            return (self._engine.reduce if op == "reduce" else self._engine.allreduce)([scratch], made)

        def finish() -> None:
            if opts.op is RedOpType.AVG:
                scratch.copy_(average(scratch, self._size))
            if op == "reduce_scatter" or (op == "reduce" and opts.root == self._rank):
                outs[0].copy_(scratch[self._rank if op == "reduce_scatter" else 0].view_as(outs[0]))

        work = self._call(op, words, outs, start)
        plain = op == "all_reduce" and opts.op is not RedOpType.AVG
        return work if plain else All([work], outs, finish)

    def _all_to_all(self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Options) -> Work:
        """Over `alltoall_base`, which every engine has."""
        sent = torch.cat([one.reshape(-1) for one in ins])
        received = sent.new_empty(sum(out.numel() for out in outs))
        sizes = [out.numel() for out in outs], [one.numel() for one in ins]
        plain = Options(timeout=opts.timeout, out_splits=sizes[0], in_splits=sizes[1])

        def spread() -> None:
            for out, part in zip(outs, received.split(sizes[0]), strict=True):
                out.copy_(part.view_as(out))

        return All([self.alltoall_base(received, sent, plain)], outs, spread)

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = opts or Options()
        made, splits = self._options(options.AllToAllOptions, opts), (opts.out_splits, opts.in_splits)
        to, source = movable([output, input])
        self.sequence += 1
        words = description(self.sequence, "all_to_all", None, opts)
        return self._call("all_to_all", words, [output], lambda: self._engine.alltoall_base(to, source, *splits, made))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        to = movable(tensors)
        return self._messages.send(to[0], dst, tag) if self._messages else self._send(to, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        to = movable(tensors)
        return self._messages.recv(to[0], src, tag) if self._messages else self._recv(to, src, tag)

    def _send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        return self._call("send", "", tensors, lambda: self._engine.send(tensors, dst, tag))

    def _recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        def start() -> Any:
            return self._engine.recv_anysource(tensors, tag) if src < 0 else self._engine.recv(tensors, src, tag)

        return self._call("recv", "", tensors, start)
