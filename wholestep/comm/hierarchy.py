"""A group over several hosts: shared memory inside each, an engine of torch.distributed between them.

The first rank of each host leads it. A collective runs inside the hosts, then among the leaders, then inside the
hosts again, so that data crosses between hosts once per host and not once per rank. The engine only moves bytes: the
leaders fold what they exchange themselves, in the order of the hosts, for every dtype and reduction, and all ranks
get equal bits. Sums of floats are those of one host up to rounding (each host's ranks are summed first); everything
else is equal to the bit. bf16 and fp16 are summed in float32 all the way, and rounded once.

With n ranks, H hosts and N bytes a rank (steps inside a host are those of `shm.py`):

| collective | bytes that leave a host |
|---|---|
| all_reduce | 2 (H-1)/H N; (H-1) N up to 64 KB; twice that for bf16 and fp16 |
| reduce, broadcast | N, from one side alone |
| all_gather, gather, scatter | (H-1) times, or once, its ranks' parts; as if each host had as many as the widest |
| reduce_scatter | the parts of the other hosts' ranks, summed over this host |
| all_to_all, messages | what its ranks send to other hosts, directly |
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.c10d import C10dGroup
from wholestep.comm.errors import DistBackendError, DistMismatchError
from wholestep.comm.fold import HALVES, average, fold
from wholestep.comm.hosts import Layout, host_identity
from wholestep.comm.led import LedGroup
from wholestep.comm.memory import need_native
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.shm import ShmGroup
from wholestep.comm.store import Store, store_based_barrier
from wholestep.comm.work import Work

SMALL = 64 * 1024  # bytes up to which leaders show each other all they have: one step in place of two


class HierarchicalGroup(LedGroup):
    """The collectives of a group whose ranks are on several hosts."""

    backend_name = "shm+gloo"

    # Reductions -------------------------------------------------------------------------------------------------

    def _wide(self, tensor: torch.Tensor, opts: Options) -> torch.Tensor:
        """A copy of the tensor to reduce in: float32 for halves, multiplied for PREMUL_SUM."""
        if opts.op is RedOpType.PREMUL_SUM and opts.factor is not None:
            tensor = (tensor * opts.factor).to(tensor.dtype)
        return tensor.float() if tensor.dtype in HALVES else tensor.clone()

    def _fold(self, parts: list[torch.Tensor], opts: Options) -> torch.Tensor:
        """The sums of all hosts as the result."""
        total = fold(parts, opts.op)
        return average(total, self._size) if opts.op is RedOpType.AVG else total

    def _inner(self, opts: Options, plain: Options) -> Options:
        """Options of a reduction to the leader; what AVG and PREMUL_SUM add is done elsewhere."""
        op = RedOpType.SUM if opts.op in (RedOpType.AVG, RedOpType.PREMUL_SUM) else opts.op
        return Options(op=op, timeout=plain.timeout)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()

        def steps(plain: Options) -> None:
            for tensor in tensors:
                total = self._wide(tensor, opts)
                self._inside.reduce([total], self._inner(opts, plain)).wait()
                self._cross(lambda between, t=total, to=tensor: self._exchange(between, t, to, opts, plain))  # type: ignore[misc]
                self._inside.broadcast([tensor], self._later(plain)).wait()

        return self._start("all_reduce", tensors[0] if tensors else None, opts, tensors, steps)

    def _exchange(
        self, between: C10dGroup, total: torch.Tensor, to: torch.Tensor, opts: Options, plain: Options
    ) -> None:
        """All-reduce among the leaders."""
        flat, count = total.reshape(-1), total.numel()
        if total.nbytes <= SMALL or self._hosts == 2:
            rows = flat.new_empty(self._hosts, count)
            between._allgather_base(rows, flat, plain).wait()
            to.copy_(self._fold(list(rows), opts).view_as(to))
            return
        share = -(-count // self._hosts)
        mine = flat.new_zeros(self._hosts, share)
        mine.view(-1)[:count].copy_(flat)
        rows = torch.empty_like(mine)
        between.alltoall_base(rows, mine, plain).wait()
        between._allgather_base(mine, self._fold(list(rows), opts), plain).wait()
        to.copy_(mine.view(-1)[:count].view_as(to))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]
        (tensor,) = tensors

        def steps(plain: Options) -> None:
            total = self._wide(tensor, opts)
            self._inside.reduce([total], self._inner(opts, plain)).wait()
            result, here = torch.empty_like(tensor), host == self._host

            def collect(between: C10dGroup) -> None:
                rows = [torch.empty_like(total) for _ in range(self._hosts)] if here else []
                between.gather([rows] if here else [], [total], Options(root=host, timeout=plain.timeout)).wait()
                if here:
                    result.copy_(self._fold(rows, opts))

            self._cross(collect)
            if here:
                self._hand(result, 0, place)
            if self._rank == opts.root:
                tensor.copy_(result)

        return self._start("reduce", tensor, opts, tensors, steps)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = opts or Options()
        (output,), (parts,) = outputs, inputs

        def steps(plain: Options) -> None:
            by_host = torch.stack([parts[rank].reshape(-1) for ranks in self.layout.hosts for rank in ranks])
            total = self._wide(by_host, opts)
            self._inside.reduce([total], self._inner(opts, plain)).wait()
            mine = output.new_empty(len(self._mates), output.numel())

            def swap(between: C10dGroup) -> None:
                rows = total.new_empty(self._hosts * len(self._mates), output.numel())
                ins, outs = [len(ranks) for ranks in self.layout.hosts], [len(self._mates)] * self._hosts
                splits = Options(timeout=plain.timeout, in_splits=ins, out_splits=outs)
                between.alltoall_base(rows, total, splits).wait()
                mine.copy_(self._fold(list(rows.view(self._hosts, *mine.shape)), opts))

            self._cross(swap)
            flat = output.view(-1)
            self._inside.scatter([flat], [list(mine)] if self._place == 0 else [], self._later(plain)).wait()

        return self._start("reduce_scatter", output, opts, outputs, steps)

    # Moves ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]

        def steps(plain: Options) -> None:
            for tensor in tensors:
                if host == self._host:
                    self._inside.broadcast([tensor], Options(root=place, timeout=plain.timeout)).wait()
                self._cross(lambda between, t=tensor: between.broadcast([t], Options(root=host, timeout=plain.timeout)))  # type: ignore[misc]
                if host != self._host:
                    self._inside.broadcast([tensor], self._later(plain)).wait()

        return self._start("broadcast", tensors[0], opts, tensors, steps)

    def _collected(self, tensor: torch.Tensor, plain: Options) -> torch.Tensor:
        """On a leader: the tensors of its host, one a row, as many rows as the widest host has."""
        rows = tensor.new_zeros(self.layout.widest, tensor.numel()) if self._place == 0 else tensor.new_zeros(0)
        outs = [list(rows[: len(self._mates)])] if self._place == 0 else []
        self._inside.gather(outs, [tensor.reshape(-1)], plain).wait()
        return rows

    def _by_rank(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows [hosts, widest, n] in the order of the ranks."""
        return [rows[self.layout.host_of[rank], self.layout.place_of[rank]] for rank in range(self._size)]

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (outs,), (tensor,) = outputs, inputs

        def steps(plain: Options) -> None:
            mine = self._collected(tensor, plain)
            rows = tensor.new_empty(self._hosts, self.layout.widest, tensor.numel())
            self._cross(lambda between: between._allgather_base(rows, mine, plain))
            self._inside.broadcast([rows], self._later(plain)).wait()
            for out, row in zip(outs, self._by_rank(rows), strict=True):
                out.copy_(row.view_as(out))

        return self._start("all_gather", tensor, opts, outs, steps)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]
        (tensor,), outs = inputs, outputs[0] if outputs else []

        def steps(plain: Options) -> None:
            mine = self._collected(tensor, plain)
            here = host == self._host
            rows = tensor.new_empty(self._hosts if here else 0, self.layout.widest, tensor.numel())
            self._cross(
                lambda between: between.gather(
                    [list(rows)] if here else [], [mine], Options(root=host, timeout=plain.timeout)
                )
            )
            if here:
                self._hand(rows, 0, place)
            for out, row in zip(outs, self._by_rank(rows) if outs else [], strict=True):
                out.copy_(row.view_as(out))

        return self._start("gather", tensor, opts, outs, steps)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]
        (output,), parts = outputs, inputs[0] if inputs else []

        def steps(plain: Options) -> None:
            here = host == self._host
            rows = output.new_zeros(self._hosts if here else 0, self.layout.widest, output.numel())
            for row, part in zip(self._by_rank(rows) if parts else [], parts, strict=True):
                row.copy_(part.reshape(-1))
            if here:
                self._hand(rows, place, 0)
            mine = output.new_empty(self.layout.widest, output.numel())
            self._cross(
                lambda between: between.scatter(
                    [mine], [list(rows)] if here else [], Options(root=host, timeout=plain.timeout)
                )
            )
            sources = [list(mine[: len(self._mates)])] if self._place == 0 else []
            self._inside.scatter([output.view(-1)], sources, self._later(plain)).wait()

        return self._start("scatter", output, opts, outputs, steps)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Between hosts each pair of ranks exchanges its own data: the leaders could save nothing."""
        far = [host != self._host for host in self.layout.host_of]

        def steps(plain: Options) -> None:
            sizes = torch.tensor([[one.numel(), one.element_size()] for one in inputs])
            came = torch.empty_like(sizes)
            self._pairs.alltoall_base(came, sizes).wait()
            for rank, out in enumerate(outputs):
                if came[rank].tolist() != [out.numel(), out.element_size()]:
                    raise DistMismatchError(
                        f"rank {rank} sends {came[rank, 0]} elements of {came[rank, 1]} bytes, rank {self._rank} "
                        f"expects {out.numel()} of {out.element_size()}"
                    )
            nothing = inputs[0].new_empty(0)
            self._inside.alltoall(
                [outputs[rank] for rank in self._mates], [inputs[rank] for rank in self._mates], plain
            ).wait()
            self._pairs.alltoall(
                [out if is_far else nothing for out, is_far in zip(outputs, far, strict=True)],
                [one if is_far else nothing for one, is_far in zip(inputs, far, strict=True)],
                plain,
            ).wait()

        return self._start("all_to_all", None, opts, outputs, steps)

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        def parts(tensor: torch.Tensor, splits: list[int]) -> list[torch.Tensor]:
            return list(tensor.split(splits or [len(tensor) // self._size] * self._size))

        outs = parts(output, opts.out_splits if opts else [])
        return self.alltoall(outs, parts(input, opts.in_splits if opts else []), opts)

    def barrier(self, opts: Any = None) -> Work:
        def steps(plain: Options) -> None:
            self._inside.barrier(plain).wait()
            self._cross(lambda between: between.barrier(plain))
            self._inside.barrier(self._later(plain)).wait()

        return self._start("barrier", None, opts, [], steps)

    # Messages ---------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        if self.layout.host_of[dst] == self._host:
            return self._inside.send(tensors, self.layout.place_of[dst], tag)
        return self._pairs.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """Messages of one host and of others arrive in different places: it must be said which rank is meant."""
        if src < 0:
            raise DistBackendError(
                f"group {self.group_name!r}: a message from any rank cannot be received across hosts: "
                "name the source, or use backend='gloo'"
            )
        if self.layout.host_of[src] == self._host:
            return self._inside.recv(tensors, self.layout.place_of[src], tag)
        return self._pairs.recv(tensors, src, tag)


def create_shared(store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> ProcessGroup:
    """A group over shared memory: `ShmGroup` where all ranks are on one host, else `HierarchicalGroup`.

    Raises:
        DistBackendError: the engine is not built, or cannot be started.
        DistStoreError: not all ranks came within the time-out.
    """
    need_native()
    store.set(f"host{rank}", host_identity())
    store_based_barrier(rank, store, "hosts", size, timeout)
    homes = store.multi_get([f"host{other}" for other in range(size)])
    layout = Layout([home.decode() for home in homes])
    if len(layout.hosts) == 1:
        return ShmGroup(store, rank, size, timeout)
    return HierarchicalGroup(store, rank, layout, timeout)
