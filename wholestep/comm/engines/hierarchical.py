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
| reduce | N, except from the root's host |
| broadcast | (H-1) N from the root's host |
| all_gather | (H-1) times its ranks' parts |
| gather, scatter | the parts that go to, or come from, the root's host |
| reduce_scatter | the parts of the other hosts' ranks, summed over this host |
| all_to_all, messages | what its ranks send to other hosts, directly |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep.comm.dist_errors import DistBackendError, DistMismatchError
from wholestep.comm.engines.leader_group import LedGroup
from wholestep.comm.engines.reference_reduce import HALVES, average, fold
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.work import Work

PIECE = 1 << 20  # bytes of an all-reduce that are in one step at a time
SMALL = 64 * 1024  # bytes up to which leaders show each other all they have: one step in place of two


class HierarchicalGroup(LedGroup):
    """The collectives of a group whose ranks are on several hosts."""

    backend_name = "shm+gloo"

    # Reductions -------------------------------------------------------------------------------------------------

    def _wide(self, tensor: torch.Tensor, opts: Options, copy: bool) -> torch.Tensor:
        """The tensor to reduce in: float32 for halves, multiplied for PREMUL_SUM; else the same if not ``copy``."""
        if opts.op is RedOpType.PREMUL_SUM and opts.factor is not None:
            tensor, copy = (tensor * opts.factor).to(tensor.dtype), False
        if tensor.dtype in HALVES:
            return tensor.float()
        return tensor.clone() if copy else tensor

    def _inner(self, opts: Options, plain: Options) -> Options:
        """Options of a reduction to the leader; what AVG and PREMUL_SUM add is done elsewhere."""
        op = RedOpType.SUM if opts.op in (RedOpType.AVG, RedOpType.PREMUL_SUM) else opts.op
        return Options(op=op, timeout=plain.timeout)

    def _fold(self, parts: list[torch.Tensor], opts: Options, to: torch.Tensor) -> torch.Tensor:
        """The sums of all hosts as the result."""
        total = fold(parts, opts.op, to if to.dtype is parts[0].dtype else None)
        return to.copy_(average(total, self._size) if opts.op is RedOpType.AVG else total)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()

        def steps(plain: Options) -> None:
            for tensor in tensors:
                self._all_reduce(tensor, opts, plain)

        return self._start("all_reduce", tensors[0] if tensors else None, opts, tensors, steps)

    def _all_reduce(self, tensor: torch.Tensor, opts: Options, plain: Options) -> None:
        """In pieces: one is under way between the hosts while the one before it is folded and spread, and the one after
        it is reduced inside the hosts."""
        total = self._wide(tensor, opts, copy=False)
        size = max(1, PIECE // total.element_size())
        finish: Callable[[], None] | None = None
        for piece, to in zip(total.view(-1).split(size), tensor.view(-1).split(size), strict=True):
            self._inside.reduce([piece], self._inner(opts, plain)).wait()
            later = self._exchange(piece, to, opts, plain)
            if finish is not None:
                finish()
            finish = later
        if finish is not None:
            finish()

    def _exchange(self, total: torch.Tensor, to: torch.Tensor, opts: Options, plain: Options) -> Callable[[], None]:
        """Starts the all-reduce of a piece among the leaders: everything to all of them, or where that is much, each a
        share. Returns what ends it and spreads the result."""
        me, all_hosts = self._host, range(self._hosts)
        whole = total.nbytes <= SMALL or self._hosts == 2
        shares = dict.fromkeys(all_hosts, total) if whole else dict(enumerate(total.tensor_split(self._hosts)))
        rows = {host: torch.empty_like(shares[me]) if host != me else shares[me] for host in all_hosts}
        works = self._post(rows, shares)

        def finish() -> None:
            self._settle(works, plain)
            if self._place == 0 and whole:
                self._fold(list(rows.values()), opts, to)
            elif self._place == 0:
                results = dict(enumerate(to.tensor_split(self._hosts)))
                self._fold(list(rows.values()), opts, results[me])
                self._swap(results, dict.fromkeys(all_hosts, results[me]), plain)
            self._inside.broadcast([to], self._later(plain)).wait()

        return finish

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]
        (tensor,) = tensors

        def steps(plain: Options) -> None:
            total = self._wide(tensor, opts, copy=True)
            self._inside.reduce([total], self._inner(opts, plain)).wait()
            if host != self._host:
                self._swap({}, {host: total}, plain)
                return
            rows = {other: torch.empty_like(total) if other != host else total for other in range(self._hosts)}
            self._swap(rows, {}, plain)
            result = tensor if self._rank == opts.root else torch.empty_like(tensor)
            if self._place == 0:
                self._fold(list(rows.values()), opts, result)
            self._hand(result, 0, place)

        return self._start("reduce", tensor, opts, tensors, steps)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = opts or Options()
        (output,), (parts,), rows = outputs, inputs, self.layout.rows

        def steps(plain: Options) -> None:
            table = torch.stack([parts[rank].reshape(-1) for ranks in self.layout.hosts for rank in ranks])
            total = self._wide(table, opts, copy=False)
            self._inside.reduce([total], self._inner(opts, plain)).wait()
            ins = {host: total[rows[host]] for host in range(self._hosts)}
            mine = ins[self._host]
            outs = {host: torch.empty_like(mine) if host != self._host else mine for host in ins}
            self._swap(outs, ins, plain)
            result = output.new_empty(mine.shape)
            if self._place == 0:
                self._fold(list(outs.values()), opts, result)
            sources = [list(result)] if self._place == 0 else []
            self._inside.scatter([output.view(-1)], sources, self._later(plain)).wait()

        return self._start("reduce_scatter", output, opts, outputs, steps)

    # Moves ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]

        def steps(plain: Options) -> None:
            for tensor in tensors:
                if host == self._host:
                    self._inside.broadcast([tensor], Options(root=place, timeout=plain.timeout)).wait()
                    self._swap({}, dict.fromkeys(range(self._hosts), tensor), plain)
                else:
                    self._swap({host: tensor}, {}, plain)
                    self._inside.broadcast([tensor], self._later(plain)).wait()

        return self._start("broadcast", tensors[0], opts, tensors, steps)

    def _table(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(self._size, tensor.numel())

    def _collect(self, tensor: torch.Tensor, table: torch.Tensor, plain: Options) -> None:
        """Brings the tensors of this host to its leader, into its rows of the table."""
        outs = [list(table[self.layout.rows[self._host]])] if self._place == 0 else []
        self._inside.gather(outs, [tensor.view(-1)], plain).wait()

    def _by_rank(self, table: torch.Tensor) -> list[torch.Tensor]:
        return [table[row] for row in self.layout.row_of]

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (outs,), (tensor,) = outputs, inputs

        def steps(plain: Options) -> None:
            table = self._table(tensor)
            self._collect(tensor, table, plain)
            rows = {host: table[where] for host, where in enumerate(self.layout.rows)}
            self._swap(rows, dict.fromkeys(rows, rows[self._host]), plain)
            self._inside.broadcast([table], self._later(plain)).wait()
            for out, row in zip(outs, self._by_rank(table), strict=True):
                out.copy_(row.view_as(out))

        return self._start("all_gather", tensor, opts, outs, steps)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]
        (tensor,), outs = inputs, outputs[0] if outputs else []

        def steps(plain: Options) -> None:
            table = self._table(tensor)
            self._collect(tensor, table, plain)
            rows = {other: table[where] for other, where in enumerate(self.layout.rows)}
            if host != self._host:
                self._swap({}, {host: rows[self._host]}, plain)
                return
            self._swap(rows, {}, plain)
            self._hand(table, 0, place)
            for out, row in zip(outs, self._by_rank(table) if outs else [], strict=True):
                out.copy_(row.view_as(out))

        return self._start("gather", tensor, opts, outs, steps)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = opts or Options()
        host, place = self.layout.host_of[opts.root], self.layout.place_of[opts.root]
        (output,), parts = outputs, inputs[0] if inputs else []

        def steps(plain: Options) -> None:
            table = self._table(output)
            rows = {other: table[where] for other, where in enumerate(self.layout.rows)}
            if host == self._host:
                for row, part in zip(self._by_rank(table) if parts else [], parts, strict=True):
                    row.copy_(part.view(-1))
                self._hand(table, place, 0)
                self._swap({}, rows, plain)
            else:
                self._swap({host: rows[self._host]}, {}, plain)
            sources = [list(rows[self._host])] if self._place == 0 else []
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
            self._cross(lambda between: between.barrier(plain).wait())
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
