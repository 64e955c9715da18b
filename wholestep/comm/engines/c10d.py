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

from wholestep.comm.diagnostics.debug_level import DebugLevel, get_debug_level
from wholestep.comm.dist_errors import DistBackendError, DistError, DistNetworkError, DistRankError
from wholestep.comm.engines.c10d_work import EngineWork
from wholestep.comm.engines.dtype_carriers import movable, reducible_as
from wholestep.comm.engines.length_prefixed import Letters
from wholestep.comm.engines.reference_reduce import average
from wholestep.comm.engines.signatures import in_bytes, require_alike, shapes
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.stores.store import Store
from wholestep.comm.stores.store_barrier import barrier_keys, exchange, forget
from wholestep.comm.stores.torch_store import TorchStore
from wholestep.comm.work import All, Then, Work
from wholestep.torch_compat import gloo_options

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # the ecosystem's way to say which network Gloo uses
_OPS: dict[RedOpType, Any] = {
    kind: getattr(dist.ReduceOp, kind.name) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM
}


class _ForTorch(dist.Store):
    """A store of ours as one of torch, for its engines."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._ours = store
        self.made: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        self.made.add(key)
        self._ours.set(key, value)

    def get(self, key: str) -> bytes:
        return self._ours.get(key)

    def add(self, key: str, amount: int) -> int:
        self.made.add(key)
        return self._ours.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.made.add(key)
        return self._ours.compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ours.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._ours.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._ours.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._ours.set_timeout(timeout)


def agent_store(host: str, port: int, timeout: timedelta) -> Store:
    """The store of torchrun's agent.

    Raises:
        DistNetworkError: nothing answers there.
    """
    try:
        return TorchStore(dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False), timeout)
    except RuntimeError as failure:
        raise DistNetworkError(f"no store of a torchrun agent at {host}:{port}: {failure}") from failure


def torch_store_at(host: str, port: int) -> bool:
    """True when torch's own process group exists in this process and a store of torch's answers there."""
    if not dist.is_initialized():
        return False
    try:
        dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
    except RuntimeError:
        return False
    return True


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

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT,
        checked: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self.backend_name, self.timeout = backend, timeout
        engine = _engine_class(backend)
        if engine is None:
            raise DistBackendError(f"torch {torch.__version__} was built without {backend}: use gloo or shm")
        self._ours, self._store = store, _ForTorch(store)
        exchange(rank, store, "engine", size, timeout)  # the engine itself would not say who is missing
        forget(store, "engine", size, barrier_keys("engine", size))
        address = store.local_address() if backend == "gloo" and INTERFACE_VARIABLE not in os.environ else ""
        try:
            # where the store was reached, the others are too: Gloo itself would ask for the host's name, which many a
            # host resolves to an address that others cannot reach, or to one beyond loopback without need
            self._engine = engine(
                self._store, rank, size, gloo_options(engine, address, timeout) if address else timeout
            )
        except RuntimeError as failure:
            raise DistBackendError(f"{backend} cannot start on rank {rank}: {failure}") from failure

        self._letters = Letters(self._send, self._recv, self._here) if checked and backend == "gloo" else None

    def shutdown(self) -> None:
        if self._letters is not None:
            self._letters.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(RuntimeError):
                engine.shutdown()
            # Here the engine ends and joins its threads: one that still lets go of a tensor while the interpreter ends
            # would abort the program ("terminate called without an active exception").
            del engine
            with contextlib.suppress(RuntimeError):  # the store may have ended with its master
                self._forget()

    def _forget(self) -> None:
        """Deletes what the ranks' engines left in the store: when the last one ends, since others may still begin."""
        self._ours.set(f"keys{self._rank}", "\n".join(self._store.made))
        if self._ours.add("ended", 1) == self._size:
            names = [f"keys{rank}" for rank in range(self._size)]
            found = [key for keys in self._ours.multi_get(names) for key in keys.decode().split("\n")]
            for key in (*names, *found, "ended"):
                self._ours.delete_key(key)

    def abort(self, reason: str) -> None:
        if self._engine is not None:
            with contextlib.suppress(DistError):  # the store may have ended with its master
                self._ours.compare_set("aborted", "", f"rank {self.labels[self._rank]} cannot go on: {reason}")
            self.shutdown()  # which the others' engines notice

    def _here(self) -> str:
        return f"rank {self.labels[self._rank]} of group {self.group_name!r}"

    def told(self) -> str:
        """What a rank that aborted the group said; nothing where none did."""
        with contextlib.suppress(DistError):
            if self._ours.check(["aborted"]):
                return self._ours.get("aborted").decode()
        return ""

    def _run(self, what: str, tensors: list[torch.Tensor], start: Callable[[], Any], checked: bool = True) -> Work:
        if self._engine is None:
            told = self.told()
            raise (DistRankError if told else DistBackendError)(f"{what}: group {self.group_name!r} has ended. {told}")
        if checked:
            self.sequence += 1
            if get_debug_level() is DebugLevel.DETAIL:
                self.compare(f"#{self.sequence} {what} {shapes(tensors)}")
        try:
            return EngineWork(start(), f"{self._here()}: {what}", self.told, tensors)
        except RuntimeError as failure:
            raise DistBackendError(f"{self.backend_name} cannot run {what}: {failure}") from failure

    def compare(self, text: str) -> None:
        """Shows what this rank is about to call to all others, and raises when one calls something else.

        Raises:
            DistMismatchError: a rank shows another text.
        """
        mine = in_bytes(text)
        shown = [torch.empty_like(mine) for _ in range(self._size)]
        made = self._opts(options.AllgatherOptions, None)
        self._run("comparison", shown, lambda: self._engine.allgather([shown], [mine], made), checked=False).wait()
        require_alike(self, shown)

    def _opts(self, kind: type, opts: Options | None) -> Any:
        made = kind()
        made.timeout = (opts and opts.timeout) or self.timeout
        if hasattr(made, "rootRank"):
            made.rootRank = opts.root if opts else 0
        return made

    def _reduce(
        self,
        what: str,
        kind: type,
        tensor: torch.Tensor,
        opts: Options,
        start: Callable[[list[torch.Tensor], Any], Any],
    ) -> Work:
        """Reduces a tensor in place by ``start(tensors, options)``. Gloo knows neither AVG nor PREMUL_SUM, so they
        scale after or before, and not every dtype."""
        made = self._opts(kind, opts)
        if opts.op is RedOpType.PREMUL_SUM and opts.factor is not None:
            tensor.copy_(tensor * opts.factor)
        made.reduceOp = dist.ReduceOp.SUM if opts.op in (RedOpType.AVG, RedOpType.PREMUL_SUM) else _OPS[opts.op]
        carrier, restore = reducible_as(tensor, opts.op)
        work = self._run(what, [tensor], lambda: start([carrier], made))

        def finish() -> None:
            if restore is not None:
                restore()
            if opts.op is RedOpType.AVG:
                tensor.copy_(average(tensor, self._size))

        return work if restore is None and opts.op is not RedOpType.AVG else Then(work, finish, [tensor])

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        start, kind = lambda *given: self._engine.allreduce(*given), options.AllreduceOptions
        works = [self._reduce("all_reduce", kind, tensor, opts or Options(), start) for tensor in tensors]
        return works[0] if len(works) == 1 else All(works, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        made = self._opts(options.BroadcastOptions, opts)
        return self._run("broadcast", tensors, lambda: self._engine.broadcast(movable(tensors), made))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        made = self._opts(options.AllgatherOptions, opts)
        to = [movable(outs) for outs in outputs]
        return self._run("all_gather", inputs, lambda: self._engine.allgather(to, movable(inputs), made))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        (tensor,) = tensors
        scratch = tensor.clone()  # an engine may use the tensors of the other ranks for sums on the way
        work = self._reduce("reduce", options.ReduceOptions, scratch, opts, lambda *given: self._engine.reduce(*given))

        def keep() -> None:
            if opts.root == self._rank:
                tensor.copy_(scratch)

        return Then(work, keep, tensors)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        """As an all-reduce that keeps one part: Gloo has no reduce-scatter of its own."""
        flat = torch.stack([piece.reshape(-1) for piece in inputs[0]])
        start, kind = lambda *given: self._engine.allreduce(*given), options.AllreduceOptions
        work = self._reduce("reduce_scatter", kind, flat, opts or Options(), start)

        def keep_mine() -> None:
            outputs[0].copy_(flat[self._rank].view_as(outputs[0]))

        return Then(work, keep_mine, outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        made = self._opts(options.GatherOptions, opts)
        to = [movable(outs) for outs in outputs]
        return self._run("gather", inputs, lambda: self._engine.gather(to, movable(inputs), made))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        made = self._opts(options.ScatterOptions, opts)
        sources = [movable(parts) for parts in inputs]
        return self._run("scatter", outputs, lambda: self._engine.scatter(movable(outputs), sources, made))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Over `alltoall_base`, which every engine has."""
        sent = torch.cat([one.reshape(-1) for one in inputs])
        came = sent.new_empty(sum(out.numel() for out in outputs))
        outs, ins = [out.numel() for out in outputs], [one.numel() for one in inputs]
        plain = Options(timeout=opts and opts.timeout, out_splits=outs, in_splits=ins)

        def spread() -> None:
            for out, part in zip(outputs, came.split(outs), strict=True):
                out.copy_(part.view_as(out))

        return Then(self.alltoall_base(came, sent, plain), spread, outputs)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        to = movable(tensors)
        return self._letters.send(to[0], dst, tag) if self._letters else self._send(to, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        to = movable(tensors)
        return self._letters.recv(to[0], src, tag) if self._letters else self._recv(to, src, tag)

    def _send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        return self._run("send", tensors, lambda: self._engine.send(tensors, dst, tag), checked=False)

    def _recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        def start() -> Any:
            return self._engine.recv_anysource(tensors, tag) if src < 0 else self._engine.recv(tensors, src, tag)

        return self._run("recv", tensors, start, checked=False)

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        made = self._opts(options.AllToAllOptions, opts)
        outs, ins = (opts.out_splits, opts.in_splits) if opts else ([], [])
        to, source = movable([output, input])
        return self._run(
            "all_to_all_single", [input[:0]], lambda: self._engine.alltoall_base(to, source, outs, ins, made)
        )

    def barrier(self, opts: Any = None) -> Work:
        made = self._opts(options.BarrierOptions, opts)
        return self._run("barrier", [], lambda: self._engine.barrier(made))
