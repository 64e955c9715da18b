"""The backend ``shm``; over several hosts, shared memory inside each and an engine of torch.distributed between them.

The first rank of each host leads it. A collective runs inside the hosts, then among the leaders, then inside the
hosts again, so that data crosses between hosts once per host and not once per rank. The engine only moves bytes: the
leaders fold what they exchange themselves, in the order of the hosts, for every dtype and reduction, and all ranks
get equal bits. Sums of floats are those of one host up to rounding (each host's ranks are summed first); everything
else is equal to the bit. bf16 and fp16 are summed in float32 all the way, and rounded once.

With n ranks, H hosts and N bytes a rank (steps inside a host are those of `shm.py`):

| collective | bytes that leave a host |
|---|---|
| all_reduce, reduce | 2 (H-1)/H N; (H-1) N up to 64 KB; twice that for bf16 and fp16 |
| broadcast, scatter | (H-1) N from the root's host; of a scatter N is all parts |
| all_gather, gather | (H-1) times its ranks' parts |
| reduce_scatter | the parts of the other hosts' ranks, summed over this host |
| all_to_all, messages | what its ranks send to other hosts, directly |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from wholestep.comm.engines.host_groups import HostGroups, Topology
from wholestep.comm.engines.reference_reduce import average, fold, wide
from wholestep.comm.engines.shm import ShmGroup
from wholestep.comm.engines.shm_segment import host_identity
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup, description, part_of
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.stores.store import Store
from wholestep.comm.stores.store_barrier import exchange
from wholestep.comm.work import Work, WorkQueue
from wholestep.errors import DistBackendError, DistMismatchError

PIECE = 1 << 20  # bytes of an all-reduce that are in one step at a time
SMALL = 64 * 1024  # bytes up to which leaders show each other all they have: one step in place of two
Tensors = list[torch.Tensor]


class HierarchicalGroup(ProcessGroup):
    """A group whose ranks are on several hosts.

    Args:
        store: shared by all ranks of the group, and by them alone.
        rank: within the group.
        topology: where the ranks are.
        timeout: for each collective.

    Raises:
        DistBackendError: an engine cannot be made.
        DistStoreError: not all ranks came within the time-out.
    """

    backend_name = "shm+gloo"

    def __init__(self, store: Store, rank: int, topology: Topology, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, len(topology.homes))
        self.timeout, self.topology = timeout, topology
        self._queue, self._hosts = WorkQueue(), HostGroups(self, store, topology)
        self._inside = self._hosts.inside
        self.name_parts("", range(self._size))

    def name_parts(self, name: str, labels: Sequence[int]) -> None:
        super().name_parts(name, labels)
        self._hosts.name_parts(name, labels)

    def shutdown(self) -> None:
        self._queue.close()
        self._hosts.stop()

    def abort(self, reason: str) -> None:
        if self._hosts.abort(reason):
            self._queue.start("abort", self._hosts.stop, [], True)  # behind what is under way

    def _run(self, op: str, outs: Tensors, ins: Tensors, opts: Options) -> Work:
        self.sequence += 1
        words, plain = description(self.sequence, op, part_of(op, outs, ins), opts), Options(timeout=opts.timeout)

        def steps() -> None:
            self._hosts.run(words, lambda: getattr(self, f"_{op}")(outs, ins, opts, plain))

        return self._queue.start(f"{self!r}: {words}", steps, outs, opts.async_op)

    # Reductions -------------------------------------------------------------------------------------------------

    def _to_leader(self, tensor: torch.Tensor, opts: Options) -> None:
        """Reduces inside the host to its leader; what AVG and PREMUL_SUM add is done elsewhere."""
        op = RedOpType.SUM if opts.op in (RedOpType.AVG, RedOpType.PREMUL_SUM) else opts.op
        self._inside.reduce([tensor], Options(op=op, timeout=opts.timeout)).wait()

    def _fold(self, parts: Tensors, opts: Options, to: torch.Tensor) -> torch.Tensor:
        """The sums of all hosts as the result."""
        total = fold(parts, opts.op, to if to.dtype is parts[0].dtype else None)
        total = average(total, self._size) if opts.op is RedOpType.AVG else total
        return to if total.data_ptr() == to.data_ptr() else to.copy_(total)

    def _all_reduce(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        """In pieces: one is under way between the hosts while the one before it is folded and spread, and the one after
        it is reduced inside the hosts."""
        total = wide(ins[0], opts)
        size = max(1, PIECE // total.element_size())
        finish: Callable[[], None] | None = None
        for piece, to in zip(total.view(-1).split(size), outs[0].view(-1).split(size), strict=True):
            self._to_leader(piece, opts)
            later = self._exchange(piece, to, opts, plain)
            if finish is not None:
                finish()
            finish = later
        if finish is not None:
            finish()

    def _exchange(self, total: torch.Tensor, to: torch.Tensor, opts: Options, plain: Options) -> Callable[[], None]:
        """Starts the all-reduce of a piece among the leaders: everything to all of them, or where that is much, each a
        share. Returns what ends it and spreads the result."""
        groups, me, hosts = self._hosts, self._hosts.host, self._hosts.hosts
        whole = total.nbytes <= SMALL or len(hosts) == 2
        shares = dict.fromkeys(hosts, total) if whole else dict(enumerate(total.tensor_split(len(hosts))))
        rows = {host: torch.empty_like(shares[me]) if host != me else shares[me] for host in hosts}
        works = groups.post(rows, shares)

        def finish() -> None:
            groups.settle(works, plain)
            if groups.place == 0 and whole:
                self._fold(list(rows.values()), opts, to)
            elif groups.place == 0:
                results = dict(enumerate(to.tensor_split(len(hosts))))
                self._fold(list(rows.values()), opts, results[me])
                groups.swap(results, dict.fromkeys(hosts, results[me]), plain)
            self._inside.broadcast([to], groups.later(plain)).wait()

        return finish

    def _reduce(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        """An all-reduce that one rank keeps."""
        total = [ins[0].clone()]
        self._all_reduce(total, total, opts, plain)
        if self._rank == opts.root:
            ins[0].copy_(total[0])

    def _reduce_scatter(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        (output,), rows, groups = outs, self.topology.rows, self._hosts
        table = torch.stack([ins[rank].reshape(-1) for ranks in self.topology.hosts for rank in ranks])
        total = wide(table, opts)
        self._to_leader(total, opts)
        theirs = {host: total[rows[host]] for host in groups.hosts}
        mine = theirs[groups.host]
        found = {host: torch.empty_like(mine) if host != groups.host else mine for host in theirs}
        groups.swap(found, theirs, plain)
        result = output.new_empty(mine.shape)
        if groups.place == 0:
            self._fold(list(found.values()), opts, result)
        self._spread(output, result, plain)

    # Moves ------------------------------------------------------------------------------------------------------

    def _broadcast(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        host, groups = self.topology.host_of[opts.root], self._hosts
        if host == groups.host:
            place = self.topology.place_of[opts.root]
            self._inside.broadcast(ins, Options(root=place, timeout=plain.timeout)).wait()
            groups.swap({}, dict.fromkeys(groups.hosts, ins[0]), plain)
        else:
            groups.swap({host: outs[0]}, {}, plain)
            self._inside.broadcast(outs, groups.later(plain)).wait()

    def _table(self, tensor: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Memory for a row of each rank, and the rows of each host."""
        table = tensor.new_empty(self._size, tensor.numel())
        return table, {host: table[where] for host, where in enumerate(self.topology.rows)}

    def _collect(self, tensor: torch.Tensor, rows: torch.Tensor, plain: Options) -> None:
        """Brings the tensors of this host to its leader, into its rows of the table."""
        outs = [list(rows)] if self._hosts.place == 0 else []
        self._inside.gather(outs, [tensor.view(-1)], plain).wait()

    def _spread(self, output: torch.Tensor, rows: torch.Tensor, plain: Options) -> None:
        """Brings its row of the table from the leader to each rank of this host."""
        sources = [list(rows)] if self._hosts.place == 0 else []
        self._inside.scatter([output.view(-1)], sources, self._hosts.later(plain)).wait()

    def _all_gather(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        (table, rows), groups = self._table(ins[0]), self._hosts
        self._collect(ins[0], rows[groups.host], plain)
        groups.swap(rows, dict.fromkeys(rows, rows[groups.host]), plain)
        self._inside.broadcast([table], groups.later(plain)).wait()
        for out, row in zip(outs, self.topology.row_of, strict=False):
            out.copy_(table[row].view_as(out))

    _gather = _all_gather  # on other ranks than the root without outputs

    def _scatter(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        """A broadcast of which each rank keeps its part."""
        (out,), parts = outs, [one.view(-1) for one in ins]
        table = [torch.stack(parts) if parts else out.new_empty(self._size, out.numel())]
        self._broadcast(table, table, opts, plain)
        out.copy_(table[0][self._rank].view_as(out))

    def _all_to_all(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        """Between hosts each pair of ranks exchanges its own data: the leaders could save nothing."""
        sizes = torch.tensor([[one.numel(), one.element_size()] for one in ins])
        found = torch.empty_like(sizes)
        self._hosts.pairs.alltoall_base(found, sizes).wait()
        for rank, out in enumerate(outs):
            if found[rank].tolist() != [out.numel(), out.element_size()]:
                raise DistMismatchError(
                    f"rank {rank} sends {found[rank, 0]} elements of {found[rank, 1]} bytes, rank {self._rank} "
                    f"expects {out.numel()} of {out.element_size()}"
                )
        near, nothing = self._hosts.mates, ins[0].new_empty(0)
        self._inside.alltoall([outs[rank] for rank in near], [ins[rank] for rank in near], plain).wait()
        far = [[nothing if rank in near else one for rank, one in enumerate(side)] for side in (outs, ins)]
        self._hosts.pairs.alltoall(far[0], far[1], plain).wait()

    def _barrier(self, outs: Tensors, ins: Tensors, opts: Options, plain: Options) -> None:
        self._inside.barrier(plain).wait()
        self._hosts.cross(lambda between: between.barrier(plain).wait())
        self._inside.barrier(self._hosts.later(plain)).wait()

    # Messages ---------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        if self.topology.host_of[dst] == self._hosts.host:
            return self._inside.send(tensors, self.topology.place_of[dst], tag)
        return self._hosts.pairs.send(tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """Messages of one host and of others arrive in different places: it must be said which rank is meant."""
        if src < 0:
            raise DistBackendError(
                f"group {self.group_name!r}: a message from any rank cannot be received across hosts: "
                "name the source, or use backend='gloo'"
            )
        if self.topology.host_of[src] == self._hosts.host:
            return self._inside.recv(tensors, self.topology.place_of[src], tag)
        return self._hosts.pairs.recv(tensors, src, tag)


def create_shared(store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> ProcessGroup:
    """A group over shared memory: `ShmGroup` where all ranks are on one host, else `HierarchicalGroup`.

    Raises:
        DistBackendError: the engine cannot be started.
        DistStoreError: not all ranks came within the time-out.
    """
    topology = Topology(exchange(rank, store, "hosts", size, timeout, host_identity()))
    if len(topology.hosts) == 1:
        return ShmGroup(store, rank, size, timeout)
    return HierarchicalGroup(store, rank, topology, timeout)
