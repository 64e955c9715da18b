"""``import wholestep.comm.torch_backend``: then ``torch.distributed.init_process_group("shm")`` uses our transport.

Stock DistributedDataParallel and FSDP2 gain it unchanged. The other file, beside `c10d.py`, that imports
`torch.distributed`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wholestep.comm.launching import launch
from wholestep.comm.process_group import Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.shared import create_shared
from wholestep.comm.torch_store import TorchStore
from wholestep.comm.work import All, Work
from wholestep.comm.world import world

_KINDS = [(getattr(dist.ReduceOp, kind.name), kind) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]


# As Any: the signatures of torch's stubs differ between the releases that this file serves.
_TorchWork: Any = dist._Work
_TorchGroup: Any = dist.ProcessGroup


class TorchWork(_TorchWork):
    """Our work as torch's."""

    def __init__(self, work: Work, waiter: Waiter, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._waiter, self._tensors = work, waiter, result
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._future is not None:  # the waiter has the work now
            try:
                self._future.wait()
            except RuntimeError as failure:
                raise self._work.exception() or failure from None
            return True
        return self._work.wait(timeout or None)

    def is_completed(self) -> bool:
        return self._future.done() if self._future is not None else self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        if self._future is None:
            ended: torch.futures.Future = torch.futures.Future()
            self._future = ended.then(_settled)
            self._waiter.give(self._work, ended, self._tensors)
        return self._future


def _settled(ended: torch.futures.Future) -> Any:
    """The result, or the failure raised: only so does torch's C++ see it. DDP would take an exception for tensors."""
    outcome = ended.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class Waiter:
    """A thread that completes futures, so that communication goes on behind the backward pass."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, torch.futures.Future, list[torch.Tensor]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def give(self, work: Work, future: torch.futures.Future, result: list[torch.Tensor]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="wholestep-futures", daemon=True)
            self._thread.start()
        self._queue.put((work, future, result))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5)

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, future, result = entry
            try:
                work.wait()
            except Exception as failure:  # noqa: BLE001 - whatever it is belongs to who waits on the future
                future.set_result(failure)
            else:
                future.set_result(result)


def _options(opts: Any, root: int = 0) -> Options:
    made = Options(root=root, async_op=True)
    if opts is not None and getattr(opts, "timeout", None) and opts.timeout > timedelta(0):
        made.timeout = opts.timeout
    if hasattr(opts, "reduceOp"):
        for theirs, kind in _KINDS:
            if opts.reduceOp == theirs:
                made.op = kind
                return made
        raise ValueError(f"shm: reduction {opts.reduceOp} is not available: multiply the tensor, then SUM")
    return made


class ShmProcessGroup(_TorchGroup):
    """A group over shared memory in torch's clothes."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._group = create_shared(TorchStore(store, timeout), rank, size, timeout)
        self._waiter = Waiter()
        self._name = ""
        self._ranks = _global_ranks(store, rank, size)

    def getBackendName(self) -> str:
        return "shm"

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self._group.name_parts(name, self._ranks)
        world().members[name] = self._ranks

    @property
    def group_name(self) -> str:
        """torch keeps the name in a C++ backend, which this group has none of."""
        return self._name

    def _work(self, what: str, result: list[torch.Tensor], start: Callable[[ProcessGroup], Work]) -> TorchWork:
        work = launch(self._group, what, result[0] if result else None, True, start)
        assert work is not None
        return TorchWork(work, self._waiter, result)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self._work("all_reduce", tensors, lambda group: group.allreduce(tensors, _options(opts)))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self._work("reduce", tensors, lambda group: group.reduce(tensors, _options(opts, opts.rootRank)))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self._work("broadcast", tensors, lambda group: group.broadcast(tensors, _options(opts, opts.rootRank)))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self._work("all_gather", outputs[0], lambda group: group.allgather(outputs, inputs, _options(opts)))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self._work(
            "all_gather_into_tensor",
            [output],
            lambda group: group._allgather_base(output, input.contiguous(), _options(opts)),
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        pairs = zip(outputs, inputs, strict=True)

        def start(group: ProcessGroup) -> list[Work]:
            return [group._allgather_base(out, one.contiguous(), _options(opts)) for out, one in pairs]

        return self._work("all_gather_coalesced", outputs, lambda group: All(start(group), outputs))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> TorchWork:
        return self._work(
            "reduce_scatter", outputs, lambda group: group.reduce_scatter(outputs, inputs, _options(opts))
        )

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self._work(
            "reduce_scatter_tensor",
            [output],
            lambda group: group._reduce_scatter_base(output, input.contiguous(), _options(opts)),
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        pairs = zip(outputs, inputs, strict=True)

        def start(group: ProcessGroup) -> list[Work]:
            return [group._reduce_scatter_base(out, one.contiguous(), _options(opts)) for out, one in pairs]

        return self._work("reduce_scatter_coalesced", outputs, lambda group: All(start(group), outputs))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self._work("gather", inputs, lambda group: group.gather(outputs, inputs, _options(opts, opts.rootRank)))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> TorchWork:
        return self._work(
            "scatter", outputs, lambda group: group.scatter(outputs, inputs, _options(opts, opts.rootRank))
        )

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self._work("all_to_all", outputs, lambda group: group.alltoall(outputs, inputs, _options(opts)))

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> TorchWork:
        made = _options(opts)
        made.out_splits, made.in_splits = list(out_splits), list(in_splits)
        return self._work(
            "all_to_all_single", [output], lambda group: group.alltoall_base(output, input.contiguous(), made)
        )

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> TorchWork:
        return self._work("send", tensors, lambda group: group.send([one.contiguous() for one in tensors], dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> TorchWork:
        return self._work("recv", tensors, lambda group: group.recv(tensors, src, tag))

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._work("barrier", [], lambda group: group.barrier(_options(opts)))

    # Names of torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def shutdown(self) -> None:
        self._waiter.close()
        self._group.shutdown()
        world().members.pop(self._name, None)


def _global_ranks(store: Any, rank: int, size: int) -> list[int]:
    """What the world calls the ranks of a group; of the first group they are the world."""
    if not dist.is_initialized():
        return list(range(size))
    store.set(f"global{rank}", str(dist.get_rank()))
    return [int(store.get(f"global{other}")) for other in range(size)]


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ShmProcessGroup:
    return ShmProcessGroup(store, rank, size, timeout)


if "shm" not in dist.Backend.backend_list:
    dist.Backend.register_backend("shm", _create, devices=["cpu"])
