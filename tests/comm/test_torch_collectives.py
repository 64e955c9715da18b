"""torch.distributed over shm against Gloo: the same calls in the same processes, on tensors of all layouts."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import wholestep.comm.torch_backend  # noqa: F401 - the import registers the backend
from wholestep import comm
from wholestep.testing import run_ranks

RANKS = 2
LAYOUTS = ["contiguous", "step", "transposed", "column"]


def laid_out(layout, shape, dtype, first):
    """A tensor of some values, as a view into a larger one whose other elements are not to be touched."""
    values = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
    values = values % 3 == 0 if dtype is torch.bool else values.to(dtype) * (1 + 1j if dtype.is_complex else 1)
    if layout == "contiguous" or not shape:
        base = values.new_ones(values.numel() + 4)
        view = base[2 : 2 + values.numel()].view(shape)
    elif layout == "step":
        base = values.new_ones(*shape[:-1], 2 * shape[-1] + 1)
        view = base[..., 1::2]
    elif layout == "transposed":
        base = values.new_ones(shape[::-1])
        view = base.permute(*reversed(range(len(shape))))
    else:
        base = values.new_ones(*shape, 3)
        view = base[..., 1]
    view.copy_(values)
    return base, view


def view_of(base, like):
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


class Case:
    """Tensors of one call, and all that they are views of. Without a layout all are contiguous."""

    def __init__(self, group, rank, layout, other, dtype, shape):
        self.group, self.rank, self.dtype, self.shape = group, rank, dtype, shape
        self.layouts, self.made = [layout, other, "contiguous", "step"], []

    def make(self, at, rows=None, first=None):
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        first = 7 * at + 10 * self.rank if first is None else first
        base, view = laid_out(self.layouts[at % 4] if self.layouts[0] else "contiguous", shape, self.dtype, first)
        self.made.append((base, view, base.clone()))
        return view

    def neighbours_are_untouched(self):
        for _, view, before in self.made:
            view.copy_(view_of(before, view))
        return all(torch.equal(base, before) for base, _, before in self.made)

    def one_each(self, at):
        return [self.make(at + rank) for rank in range(RANKS)]

    def all_reduce(self):
        return dist.all_reduce(self.make(0), group=self.group, async_op=True)

    def all_reduce_max(self):
        kind = dist.ReduceOp.SUM if self.dtype.is_complex else dist.ReduceOp.MAX
        return dist.all_reduce(self.make(1), kind, group=self.group, async_op=True)

    def all_reduce_expanded(self):
        return dist.all_reduce(self.make(0).flatten()[:1].clone().expand(3), group=self.group, async_op=True)

    def all_reduce_coalesced(self):
        return dist.all_reduce_coalesced([self.make(0), self.make(1)], group=self.group, async_op=True)

    def all_reduce_coalesced_twice(self):
        x = self.make(0)
        return dist.all_reduce_coalesced([x, x], group=self.group, async_op=True)

    def all_reduce_coalesced_overlapping(self):
        x = self.make(0)
        return dist.all_reduce_coalesced([x[:1], x], group=self.group, async_op=True)

    def reduce(self):
        x = self.make(0)
        if self.rank == 0:
            self.made.clear()  # Gloo sums in it on the way
        return dist.reduce(x, group_dst=1, group=self.group, async_op=True)

    def broadcast(self):
        return dist.broadcast(self.make(self.rank), group_src=1, group=self.group, async_op=True)

    def all_gather(self):
        return dist.all_gather(self.one_each(1), self.make(0), group=self.group, async_op=True)

    def all_gather_coalesced(self):
        return dist.all_gather_coalesced(
            [self.one_each(at) for at in range(RANKS)], [self.make(0), self.make(1)], group=self.group, async_op=True
        )

    def all_gather_into_tensor(self):
        out = self.make(0, RANKS * self.shape[0])
        return dist.all_gather_into_tensor(out, self.make(1), group=self.group, async_op=True)

    def all_gather_into_tensor_coalesced(self):
        outs = [self.make(at, RANKS * self.shape[0]) for at in range(2)]
        return self.group.allgather_into_tensor_coalesced(outs, [self.make(1), self.make(0)])

    def gather(self):
        outs = self.one_each(0) if self.rank == 1 else None
        return dist.gather(self.make(1), outs, group_dst=1, group=self.group, async_op=True)

    def scatter(self):
        parts = self.one_each(1) if self.rank == 1 else None
        return dist.scatter(self.make(0), parts, group_src=1, group=self.group, async_op=True)

    def reduce_scatter(self):
        return dist.reduce_scatter(self.make(0), self.one_each(1), group=self.group, async_op=True)

    def reduce_scatter_tensor(self):
        whole = self.make(1, RANKS * self.shape[0])
        return dist.reduce_scatter_tensor(self.make(0), whole, group=self.group, async_op=True)

    def reduce_scatter_tensor_coalesced(self):
        wholes = [self.make(at, RANKS * self.shape[0]) for at in range(2)]
        return self.group.reduce_scatter_tensor_coalesced([self.make(0), self.make(1)], wholes)

    def all_to_all(self):
        return dist.all_to_all(self.one_each(0), self.one_each(1), group=self.group, async_op=True)


CALLS = [
    name
    for name in vars(Case)
    if name not in ("make", "one_each", "neighbours_are_untouched") and not name.startswith("_")
]
KINDS = [(torch.float32, (3, 4)), (torch.bool, (2, 3, 2)), (torch.complex64, (3, 1)), (torch.float32, (0, 4))]
# Gloo moves no complex numbers in these.
NOT_COMPLEX = ("all_gather_into_tensor_coalesced", "gather", "all_gather_coalesced")


def compared(value):
    """A value to compare: copies of tensors, in lists as they are."""
    if isinstance(value, (list, tuple)):
        return [compared(one) for one in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def outcome(name, case):
    """What a call leaves in its tensors and in its future, and whether the memory around them is as before."""
    work = getattr(case, name)()
    scratch = "reduce_scatter" in name or (name == "reduce" and case.rank == 0)  # Gloo's has none, or sums in it
    future = work.get_future() if hasattr(work, "get_future") and not scratch else None
    work.wait()
    if future is not None:
        future.wait()
    values = compared([[view for _, view, _ in case.made], None if future is None else future.value()])
    return [*values, case.neighbours_are_untouched()]


def differences(folder):
    rank = comm.get_rank()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    groups = [dist.new_group(backend=name) for name in ("gloo", "shm")]
    found = []
    for name in CALLS:
        for dtype, shape in KINDS:
            if dtype.is_complex and name in NOT_COMPLEX or 0 in shape and "expanded" in name:
                continue
            for layout in LAYOUTS:
                for other in LAYOUTS:
                    theirs = outcome(name, Case(groups[0], rank, None, None, dtype, shape))
                    ours = outcome(name, Case(groups[1], rank, layout, other, dtype, shape))
                    try:
                        torch.testing.assert_close(ours, theirs)
                    except (AssertionError, TypeError) as difference:
                        found.append(f"{name} {layout} {other} {dtype} {shape}: {difference}"[:150])
    dist.destroy_process_group()
    return found


def test_every_collective_and_layout_is_as_over_gloo(tmp_path):
    assert run_ranks(differences, RANKS, "gloo", (str(tmp_path),)) == [[], []]


def what_gloo_refuses(folder):
    """Strided tensors in messages and all_to_all_single, parts of unequal size, scalars, a receive from anybody."""
    rank = comm.get_rank()
    dist.init_process_group("shm", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    for layout in LAYOUTS:
        for dtype, shape in KINDS[:3]:
            _, sent = laid_out(layout, shape, dtype, 5)
            base, came = laid_out(layout, shape, dtype, 0)
            around = base.clone()
            work = dist.isend(sent, 1) if rank == 0 else dist.irecv(came) if layout == "step" else dist.irecv(came, 0)
            work.wait()
            assert rank == 0 or work._source_rank() == 0
            assert rank == 0 or torch.equal(came, sent)
            assert rank == 0 or torch.equal(
                (base != around).sum(), (sent != laid_out(layout, shape, dtype, 0)[1]).sum()
            )
        _, whole = laid_out(layout, (3, 2), torch.float32, 10 * rank)
        base, came = laid_out(layout, (2 * (rank + 1), 2), torch.float32, 0)
        base.fill_(-1)
        dist.all_to_all_single(came, whole, [rank + 1] * 2, [1, 2])
        first = torch.arange(6.0).view(3, 2)
        assert torch.equal(came, torch.cat([(first + 10 * r)[rank : 2 * rank + 1] for r in range(2)]))
        assert (base == -1).sum() == base.numel() - came.numel()
    dist.destroy_process_group()
    return True


def test_strided_messages_and_parts(tmp_path):
    assert run_ranks(what_gloo_refuses, RANKS, "gloo", (str(tmp_path),)) == [True, True]


def options(kind, **values):
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def bad_calls(g, n):
    f, d, sparse = torch.ones, lambda k: torch.ones(k, dtype=torch.float64), torch.eye(2).to_sparse()
    at = {root: options(dist.BroadcastOptions, rootRank=root) for root in (-1, n)}
    reduce_at = {root: options(dist.ReduceOptions, rootRank=root) for root in (-1, n)}
    gather_at = {root: options(dist.GatherOptions, rootRank=root) for root in (-1, 0, n)}
    scatter_at = {root: options(dist.ScatterOptions, rootRank=root) for root in (-1, 0, n)}
    largest = options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
    yield from (lambda o=o: g.broadcast([f(2)], o) for o in at.values())
    yield from (lambda o=o: g.reduce([f(2)], o) for o in reduce_at.values())
    yield from (lambda o=gather_at[r]: g.gather([], [f(2)], o) for r in (-1, n))
    yield from (lambda o=scatter_at[r]: g.scatter([f(2)], [], o) for r in (-1, n))
    yield lambda: g.broadcast([f(2)], options(dist.BroadcastOptions, rootTensor=1))
    yield lambda: g.reduce([f(2)], options(dist.ReduceOptions, rootTensor=1))
    yield from (lambda c=c: c([]) for c in (g.allreduce, g.allreduce_coalesced, g.broadcast))
    yield from (lambda c=c, x=x: c([f(2), x]) for c in (g.allreduce, g.broadcast) for x in (f(3), d(2)))
    yield lambda: g.allreduce_coalesced([f(2), d(2)])
    yield lambda: g.allreduce_coalesced([f(2), sparse])
    yield lambda: g.allreduce([sparse], largest)
    yield lambda: g.broadcast([sparse], options(dist.BroadcastOptions))
    yield lambda: g.reduce([f(2), f(2)], options(dist.ReduceOptions))
    yield lambda: g.allgather([[f(2)] * n], [])
    yield lambda: g.allgather([], [f(2)])
    yield from (lambda o=o: g.allgather([o], [f(2)]) for o in ([f(2)], [f(2)] * (n + 1), [f(2), d(2)], [f(2), f(3)]))
    yield lambda: g._allgather_base(f(3), f(2))
    yield lambda: g.allgather_coalesced([[f(2), f(3)]], [f(2), f(3)])
    yield lambda: g.gather([], [f(2), f(2)], gather_at[0])
    yield lambda: g.scatter([f(2), f(2)], [], scatter_at[0])
    yield lambda: g.reduce_scatter([f(2)], [[f(2)]])
    yield lambda: g.reduce_scatter([f(2)], [[f(3)] * n])
    yield lambda: g._reduce_scatter_base(f(2), f(5))
    yield lambda: g.alltoall([f(2)], [f(2)] * n)
    yield lambda: g.alltoall_base(f(4), f(4), [1, 1], [2, 2])
    yield lambda: g.send([f(2)], 1 - g.rank(), -1)
    yield lambda: g.send([], 1 - g.rank(), 0)
    yield lambda: g.recv([f(2)], 1 - g.rank(), -5)


def refusals(folder):
    rank = comm.get_rank()
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    ours = dist.new_group(backend="shm")
    missed = []
    for index, call in enumerate(bad_calls(ours, RANKS)):
        try:
            call()
            missed.append(index)
        except RuntimeError as failure:
            assert isinstance(failure, ValueError), failure
    ours.barrier().wait()  # nothing was sent
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    for index, call in enumerate(bad_calls(gloo, RANKS)):
        with pytest.raises(RuntimeError):
            call().wait()
            missed.append(-index)
    dist.destroy_process_group()
    return missed


def test_bad_arguments_of_group_methods_are_errors_as_over_gloo(tmp_path):
    assert run_ranks(refusals, RANKS, "gloo", (str(tmp_path),)) == [[], []]


def other_forms(folder, backend):
    """Overloads, sparse tensors, numbers of collectives."""
    rank = comm.get_rank()
    dist.init_process_group(backend, f"file://{folder}/{backend}", rank=rank, world_size=RANKS)
    g, x = dist.group.WORLD, torch.arange(4.0) + rank
    before = g._get_sequence_number_for_group()
    results = [x.clone() for _ in range(8)]
    g.allreduce(results[0]).wait()
    g.allreduce([results[1]], dist.ReduceOp.MAX).wait()
    g.allreduce_coalesced([results[2], results[3]]).wait()
    g.broadcast(results[4], root=1).wait()
    g.broadcast([results[5]], options(dist.BroadcastOptions, rootRank=1)).wait()
    g.reduce(results[7], 0, dist.ReduceOp.PRODUCT).wait()
    if rank:
        results.pop()  # Gloo multiplies in it
    for dense in ([0, 1, 1], [1, 0, 1]), ([0, 0, 0], [0, 0, 0]), ([1, 2, 3], [0, 0, 0]):
        one = torch.tensor(dense[rank]).double().outer(torch.ones(2, dtype=torch.float64)).to_sparse(1)
        dist.all_reduce(one)
        results.append(one.to_dense())
    g.barrier().wait()
    counted = g._get_sequence_number_for_group() - before
    dist.destroy_process_group()
    return results, counted > 6


def test_overloads_and_sparse_tensors_are_as_over_gloo(tmp_path):
    ours, theirs = [run_ranks(other_forms, RANKS, "gloo", (str(tmp_path), b)) for b in ("shm", "gloo")]
    torch.testing.assert_close(ours, theirs)
