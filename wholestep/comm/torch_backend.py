"""``import wholestep.comm.torch_backend``: then ``torch.distributed.init_process_group("shm")`` uses our transport.

Stock DistributedDataParallel and FSDP gain it unchanged. The other file, beside `c10d.py`, that imports
`torch.distributed`. Each method of the group is the public collective of `comm/api/`,
which checks and stages tensors, and in a traced step becomes an operator; here is what torch wraps around it.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wholestep.comm.api import collective_table as table
from wholestep.comm.api import collectives, p2p
from wholestep.comm.api.collective_table import ArgumentKind, Collective
from wholestep.comm.api.groups import World, world
from wholestep.comm.api.tracing import is_traced
from wholestep.comm.engines.c10d_adapters import TorchStore
from wholestep.comm.engines.hierarchical import create_shared
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.work import All, Work, await_futures, future_of, seconds
from wholestep.torch_compat import skipped_by_dynamo

_KINDS = [(getattr(dist.ReduceOp, kind.name), kind) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]
Tensors = torch.Tensor | Sequence[torch.Tensor]


class ArgumentError(ValueError, TypeError, RuntimeError):
    """A mistake in calling a method of the group: a `RuntimeError`, as torch's own groups raise them by way of its
    dispatcher, and what their methods raise beneath it."""


# As Any: the signatures of torch's stubs differ between the releases that this file serves.
_TorchWork: Any = dist._Work
_TorchGroup: Any = dist.ProcessGroup


@skipped_by_dynamo
class TorchWork(_TorchWork):
    """Our work as torch's.

    Args:
        result: what `result` and the future give, as Gloo's works do.
        limit: seconds until `wait` gives up; None for the group's.
    """

    def __init__(self, work: Work, result: list[Any], limit: float | None) -> None:
        super().__init__()
        self._work, self._tensors, self._limit = work, result, limit
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait(seconds(timeout) if timeout else self._limit)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def _source_rank(self) -> int:
        if self._work.source < 0:
            raise RuntimeError("sourceRank() may only be called on works of a receive, after wait()")
        return self._work.source

    def get_future(self) -> torch.futures.Future:
        if self._future is None:
            self._future = future_of(self._work, self._tensors, self._limit)
        return self._future


def _limit(opts: Any, timeout: timedelta | None = None) -> float | None:
    """The time-out of one call in seconds; None for the group's, as options say by a negative one."""
    limit = timeout or getattr(opts, "timeout", None)
    return seconds(limit) if limit and limit > timedelta(0) else None


def _reduction(opts: Any) -> RedOpType:
    """The reduction that options name, or that was given in their place."""
    asked = getattr(opts, "reduceOp", opts)
    if asked is None:
        return RedOpType.SUM
    for theirs, kind in _KINDS:
        if asked == theirs:
            return kind
    raise ValueError(f"shm: reduction {asked} is not available: multiply the tensor, then SUM")


def _only(what: str, values: Any, name: str) -> Any:
    """The one entry of a list: torch has lists for the devices of a process, of which this one has one.

    Raises:
        ValueError: there are more, or none.
    """
    if isinstance(values, torch.Tensor):
        return values
    if len(values) != 1:
        raise ValueError(f"ProcessGroupShm::{what}: requires a single-element {name} list, found {len(values)} entries")
    return values[0]


def _argument(what: str, values: Any, name: str, kind: ArgumentKind, root: str) -> Any:
    """A public collective's argument from that of a group's method, which may be in a list for the one device."""
    if kind is ArgumentKind.ROWS:
        return values
    if kind is ArgumentKind.ONE:
        return _only(what, values, name)
    nested = len(values) > 0 and not isinstance(values[0], torch.Tensor)
    tensors = list(_only(what, values, name) if nested else values)
    if kind is ArgumentKind.SEVERAL and not tensors:
        raise ValueError(f"ProcessGroupShm::{what}: requires non-empty tensor list")
    return None if root and not tensors else tensors


def _checked(method: Callable[..., TorchWork]) -> Callable[..., TorchWork]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> TorchWork:
        try:
            return method(self, *args, **kwargs)
        except (ValueError, TypeError) as mistake:
            raise ArgumentError(*mistake.args) from mistake

    return checked


def _method(name: str, row: Collective) -> Callable[..., TorchWork]:
    """The group's method of a name: the public collective of a row of the table, in all overloads of torch's method."""
    collective, in_place = getattr(collectives, row.name), row.out == row.inp
    settings = ["opts", *["op"] * bool(row.root and row.reduces), "timeout"]

    def method(self: Any, *args: Any, **named: Any) -> TorchWork:
        given = [*(named[key] for key in ("tensors", "tensor") if key in named), *args]
        outputs, inputs, *rest = given[:1] * in_place + given
        named = dict(zip(settings, rest, strict=False)) | named
        opts, call = named.get("opts"), {"group": self.shm_group, "async_op": True}
        if row.reduces:
            call["op"] = _reduction(named.get("op", getattr(opts, "reduceOp", None if row.root else opts)))
        if row.root:
            call[f"group_{row.root}"] = self._root(name, named.get("root", opts))
        out = _argument(name, outputs, "tensor" if in_place else "output", row.out_kind, row.root)
        call |= {row.inp: _argument(name, inputs, "tensor" if in_place else "input", row.inp_kind, row.root)}
        call[row.out] = out
        work = (collectives.sparse_all_reduce if row is table.ALL_REDUCE and out.is_sparse else collective)(**call)
        one = row.out_kind is ArgumentKind.ONE
        result = self._by_rank(out) if row.out_kind is ArgumentKind.ROWS else [out] if one else out
        return self._work(work, result or [], opts, named.get("timeout"))

    method.__name__ = name
    return _checked(method)


def _coalesced(name: str, row: Collective) -> Callable[..., TorchWork]:
    """The group's method that runs the public collective of a row on each output and its input."""
    collective = getattr(collectives, row.name)

    def method(self: Any, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        if len(outputs) != len(inputs):
            raise ValueError(f"ProcessGroupShm: {len(outputs)} outputs were given for {len(inputs)} inputs")
        call = {"group": self.shm_group, "async_op": True} | ({"op": _reduction(opts)} if row.reduces else {})
        works = [collective(out, one, **call) for out, one in zip(outputs, inputs, strict=True)]
        result = list(outputs)
        if row.out_kind is ArgumentKind.ROWS:
            result = [list(parts) for parts in zip(*map(self._by_rank, outputs), strict=True)]
        return self._work(All(works, list(outputs)), result, opts)

    method.__name__ = name
    return _checked(method)


@skipped_by_dynamo
class ShmProcessGroup(_TorchGroup):
    """A group over shared memory in torch's clothes.

    Arguments are those of all overloads of torch's methods: lists of one tensor or the tensor, options or the reduction
    or root itself. Ranks are the group's.

    Raises:
        ValueError, TypeError: arguments that do not fit, before anything is sent.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.shm_group = create_shared(TorchStore(store, timeout), rank, size, timeout)
        self._numbers: deque[TorchWork] = deque(maxlen=32)
        self._store = store
        self.shm_group.name_parts("", _global_ranks(store, rank, size))
        self._set_group_name(world().unique("shm"))  # torch gives another to all but groups that are made by hand

    def getBackendName(self) -> str:
        return "shm"

    def _set_group_name(self, name: str) -> None:
        _forget(world(), self.group_name, self.shm_group)
        self.shm_group.name_parts(name, self.shm_group.labels)
        world().guests[name] = self.shm_group
        weakref.finalize(self, _forget, world(), name, self.shm_group)

    @property
    def group_name(self) -> str:
        """torch keeps the name in a C++ backend, which this group has none of."""
        return self.shm_group.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        """What torch's checkpoints ask a group for."""
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> ShmProcessGroup:
        """The group is its own backend."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.shm_group.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """The numbers of all ranks begin at 0 without being told."""

    def _get_sequence_number_for_group(self) -> int:
        return self.shm_group._get_sequence_number_for_group()

    def _root(self, what: str, given: Any) -> int:
        root, place = getattr(given, "rootRank", given or 0), getattr(given, "rootTensor", 0)
        if place:
            raise ValueError(f"ProcessGroupShm::{what}: invalid root tensor: {place} is not in a list of one")
        if not 0 <= root < self.size():
            raise ValueError(f"ProcessGroupShm::{what}: invalid root rank: {root} is not in a group of {self.size()}")
        return int(root)

    def _work(
        self, work: Work | None, result: list[Any], opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        made = TorchWork(work or Work(result), result, _limit(opts, timeout))
        number = len(result) == 1 and isinstance(result[0], torch.Tensor) and result[0].numel() == 1
        if number and not is_traced(result[0]):
            self._numbers.append(made)  # DDP's join leaves one to C++, which does not keep the Python object
        return made

    allreduce = _method("allreduce", table.ALL_REDUCE)
    allreduce_coalesced = _method("allreduce_coalesced", table.ALL_REDUCE_COALESCED)
    reduce = _method("reduce", table.REDUCE)
    broadcast = _method("broadcast", table.BROADCAST)
    allgather = _method("allgather", table.ALL_GATHER)
    _allgather_base = _method("_allgather_base", table.ALL_GATHER_INTO_TENSOR)
    reduce_scatter = _method("reduce_scatter", table.REDUCE_SCATTER)
    _reduce_scatter_base = _method("_reduce_scatter_base", table.REDUCE_SCATTER_TENSOR)
    gather = _method("gather", table.GATHER)
    scatter = _method("scatter", table.SCATTER)
    alltoall = _method("alltoall", table.ALL_TO_ALL)

    @_checked
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        if not inputs:
            raise ValueError("ProcessGroupShm::allgather_coalesced: requires non-empty input tensor list")
        outs = [list(row) for row in outputs]
        work = collectives.all_gather_coalesced(outs, list(inputs), self.shm_group, async_op=True)
        return self._work(work, outs, opts)

    def _by_rank(self, output: torch.Tensor) -> list[torch.Tensor]:
        """What came from each rank, as Gloo's futures have it."""
        return list(output.tensor_split(self.size())) if output.dim() else [output]

    allgather_into_tensor_coalesced = _coalesced("allgather_into_tensor_coalesced", table.ALL_GATHER_INTO_TENSOR)
    reduce_scatter_tensor_coalesced = _coalesced("reduce_scatter_tensor_coalesced", table.REDUCE_SCATTER_TENSOR)

    @_checked
    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, out_splits: list[int], in_splits: list[int],
        opts: Any = None, timeout: timedelta | None = None,
    ) -> TorchWork:  # fmt: skip
        splits = list(out_splits), list(in_splits)
        work = collectives.all_to_all_single(output, input, *splits, group=self.shm_group, async_op=True)
        return self._work(work, [output], opts, timeout)

    @_checked
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
        tensor = _only("send", tensors, "tensor")
        return self._work(p2p.isend(tensor, group=self.shm_group, tag=tag, group_dst=dst), [tensor])

    @_checked
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> TorchWork:
        tensor = _only("recv", tensors, "tensor")
        return self._work(p2p.irecv(tensor, group=self.shm_group, tag=tag, group_src=src), [tensor])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        return self.recv(tensors, None, tag)

    @_checked
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        limit = timeout or (opts if isinstance(opts, timedelta) else None)
        return self._work(collectives.barrier(self.shm_group, async_op=True, timeout=limit), [], opts, limit)

    # Names of torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        p2p.monitored_barrier(self.shm_group, timeout, wait_all_ranks)

    def shutdown(self) -> None:
        try:
            await_futures()
            self.shm_group.shutdown()
        finally:
            _forget(world(), self.group_name, self.shm_group)

    def abort(self) -> None:
        self.shm_group.abort("its process group was aborted")


def _forget(known: World, name: str, group: ProcessGroup) -> None:
    if known.guests.get(name) is group:
        del known.guests[name]


def _global_ranks(store: Any, rank: int, size: int) -> list[int]:
    """What the world calls the ranks of a group; of the first group they are the world."""
    if not dist.is_initialized():
        return list(range(size))
    store.set(f"global{rank}", str(dist.get_rank()))
    return [int(store.get(f"global{other}")) for other in range(size)]


if "shm" not in dist.Backend.backend_list:
    dist.Backend.register_backend("shm", ShmProcessGroup, devices=["cpu"])
