"""Collectives: random programs on every transport against the oracle, arguments that do not fit, odd tensors."""

import itertools
import os

import pytest
import torch

from tests.support.comm_programs import run_program
from wholestep import comm
from wholestep.comm.engines.reference_reduce import naive_reduce
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import as_op
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))  # `make test-long`: 10,000 collectives
SHARED = ("plain", "strided", "shared")


@pytest.mark.parametrize(("transport", "size", "steps"), [("shm", 2, 4000), ("shm", 3, 3000), ("shm", 4, 3000)])
def test_random_programs_on_shm(transport, size, steps):
    steps = steps if LONG else steps // 20
    assert min(run_ranks(run_program, size, transport, (11, steps, SHARED), timeout=300)) > 0.9 * steps


@pytest.mark.parametrize(("transport", "size"), [("thread", 3), ("gloo", 2), ("shm", 1)])
def test_random_programs_elsewhere(transport, size):
    assert min(run_ranks(run_program, size, transport, (5, 100))) > 80


def test_many_threads():
    assert run_ranks(run_program, 16, "thread", (3, 30)) == run_ranks(run_program, 16, "thread", (3, 30))


def wrong_dtypes():
    n = comm.get_world_size()
    tensor = torch.ones(2, 2) * 7
    half = tensor.half()
    whole = [torch.zeros(2, 2) for _ in range(n)]
    mixed = [whole[0], whole[1].half()]
    calls = [
        lambda: comm.all_gather(mixed, tensor),
        lambda: comm.all_gather(whole, half),
        lambda: comm.all_gather_coalesced([mixed], whole),
        lambda: comm.all_gather_coalesced([whole], mixed),
        lambda: comm.all_reduce_coalesced(mixed),
        lambda: comm.reduce_scatter(tensor, mixed),
        lambda: comm.reduce_scatter(half, whole),
        lambda: comm.all_to_all_single(half, tensor),
        lambda: comm.all_to_all(mixed, whole),
        lambda: comm.all_to_all(whole, mixed),
        lambda: comm.scatter(tensor, mixed),
        lambda: comm.gather(half, whole),
        lambda: comm.gather(tensor, mixed),
        lambda: comm.scatter(half, whole),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="tensors with different dtypes"):
            call()


def wrong_sizes():
    n, x = comm.get_world_size(), torch.ones(4)
    calls = {
        "`tensor_list` has 1 entries": lambda: comm.all_gather([x], x),
        "has 3 elements, 4 are required": lambda: comm.all_gather([torch.ones(3)] * n, x),
        "`output_tensor` has 4 elements, 8 are required": lambda: comm.all_gather_into_tensor(x.clone(), x),
        "`input` has 4 elements, 8 are required": lambda: comm.reduce_scatter_tensor(x.clone(), x),
        "`input_list` has 3 entries": lambda: comm.reduce_scatter(x, [x] * 3),
        "`output` has 4 elements, 3 are required": lambda: comm.reduce_scatter(
            x, [x[1:], x[:0]] if comm.get_rank() == 0 else [x[:0], x[1:]]
        ),
        "3 rows of `input` do not divide": lambda: comm.all_to_all_single(x.clone(), torch.ones(3)),
        "`input_split_sizes` has 3 elements, 4": lambda: comm.all_to_all_single(x.clone(), x, None, [1, 2]),
        "`input` is a scalar": lambda: comm.all_to_all_single(x.clone(), torch.tensor(1.0)),
        "not part of group": lambda: comm.broadcast(x, src=7),
        "group_src 5 is not in a group of 2": lambda: comm.broadcast(x, group_src=5),
        "exactly one of src": lambda: comm.broadcast(x, src=0, group_src=0),
        "`object_list` has 1 entries": lambda: comm.all_gather_object([None], 1),
        "at least one P2POp": lambda: comm.batch_isend_irecv([]),
        "isend or irecv is required": lambda: comm.P2POp(comm.send, x, 0),
        "Invalid source rank": lambda: comm.recv(x, comm.get_rank()),
        "on no other": lambda: comm.gather(x, [x, x] if comm.get_rank() else None, 0),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words.replace("(", r"\(")):
            call()
    for words, call in {
        "Expected parameter `tensor` of type torch.Tensor": lambda: comm.all_reduce([x]),
        "Expected parameter `tensor_list` of type List": lambda: comm.all_gather(x, x),
        "AVG of bool": lambda: comm.all_reduce(torch.ones(2, dtype=torch.bool), "avg"),
        "MAX of complex": lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64), "max"),
        "BAND of torch.float32": lambda: comm.all_reduce(x, "band"),
        "a dense tensor is required": lambda: comm.all_reduce(torch.eye(2).to_sparse()),
    }.items():
        with pytest.raises(TypeError, match=words):
            call()


def odd_tensors():
    rank, n = comm.get_rank(), comm.get_world_size()
    scalar = torch.tensor(float(rank + 1))
    comm.all_reduce(scalar)
    assert scalar.item() == n * (n + 1) / 2
    empty = torch.empty(0, 3)
    comm.all_reduce(empty)
    comm.broadcast(empty, 0)
    grid = torch.arange(12.0).view(3, 4)
    comm.all_reduce(grid.t()[1:3])
    assert torch.equal(grid[:, 1:3], n * torch.arange(12.0).view(3, 4)[:, 1:3])
    assert torch.equal(grid[:, 0], torch.arange(12.0).view(3, 4)[:, 0])
    flags = torch.tensor([1, 0, 0, 1], dtype=torch.bool) if rank == 0 else torch.zeros(4, dtype=torch.bool)
    comm.broadcast(flags, src=0)
    assert flags.tolist() == [True, False, False, True]
    pair = torch.complex(torch.ones(3), torch.ones(3) * rank)
    comm.all_reduce(pair)
    assert torch.equal(pair, torch.complex(torch.ones(3) * n, torch.ones(3) * (n * (n - 1) / 2)))
    real, couple = torch.rand(2), torch.view_as_complex(torch.rand(2))
    outs = [torch.rand(2) for _ in range(n)]
    mixed = [outs[0], torch.view_as_complex(outs[1]), *outs[2:]]
    for given in (real, couple):
        comm.all_gather(outs, given)
        comm.all_gather(mixed, given)
    whole = torch.arange(5.0) + rank
    for op, sums in (("sum", 2 * torch.arange(5.0) + 1), ("max", torch.arange(5.0) + 1)):
        part, uneven = torch.empty(1 + 3 * rank), list(whole.clone().split([1, 4]))
        comm.reduce_scatter(part, uneven, op)
        assert torch.equal(part, sums.split([1, 4])[rank]) and torch.equal(torch.cat(uneven), whole)
    averaged = torch.tensor([-7, 7]) * (1 - rank)
    comm.all_reduce(averaged, "avg")
    assert averaged.tolist() == [-3, 3]
    halved = torch.tensor([4, 7]) * (1 - rank)
    comm.all_reduce(halved, comm.premul_sum(0.5))
    assert halved.tolist() == [2, 3]
    nan = torch.tensor([float("nan") if rank == 0 else 1.0])
    comm.all_reduce(nan, "max")
    assert nan.isnan().item()
    many = [torch.ones(10, 10), torch.ones(3)]
    comm.all_reduce_coalesced(many)
    assert all((one == n).all() for one in many)
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
    comm.all_gather_coalesced(lists, [torch.full((2,), rank + 1.0), torch.full((3,), rank + 1.0)])
    assert [[one[0].item() for one in per] for per in lists] == [[i + 1.0] * 2 for i in range(n)]


def rounding():
    """bf16 and fp16 are summed in float32 and rounded once; every value of fp16 passes through unchanged."""
    rank, n = comm.get_rank(), comm.get_world_size()
    for dtype in (torch.bfloat16, torch.float16):
        parts = [torch.randn(5000, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(n)]
        mine = parts[rank].clone()
        comm.all_reduce(mine)
        assert torch.equal(mine, naive_reduce(parts, Options()))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    kept = every.clone()
    comm.all_reduce(kept, "max")
    usual = ~every.isnan()
    assert torch.equal(kept[usual].view(torch.int16), every[usual].view(torch.int16))
    assert kept[~usual].isnan().all()


def unsigned():
    """Order and wrap-around of the unsigned integers, at both ends of each."""
    rank, n = comm.get_rank(), comm.get_world_size()
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        top = 2 ** (8 * dtype.itemsize) - 1
        ends = torch.tensor([0, top, top // 2, top // 2 + 1], dtype=dtype)
        parts = [ends[torch.arange(4) - i] for i in range(n)]
        for op in ("min", "max", "sum", "avg", "product", "band", "bor", "bxor"):
            mine = parts[rank].clone()
            comm.all_reduce(mine, op)
            wanted = naive_reduce(parts, Options(as_op(op)[0]))
            assert torch.equal(mine, wanted), f"{op} {dtype}: {mine} is not {wanted}"
    mirrored = ends[torch.tensor([3, 2, 1, 0])]
    largest = naive_reduce([ends, mirrored], Options(as_op("max")[0])).tolist()
    assert largest == [top // 2 + 1, top, top, top // 2 + 1]


def messages():
    rank, n = comm.get_rank(), comm.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    out, came = torch.full((100_000,), float(rank)), torch.zeros(100_000)
    works = comm.batch_isend_irecv([comm.P2POp(comm.isend, out, right), comm.P2POp(comm.irecv, came, left)])
    for work in works:
        work.wait()
    assert (came == left).all()
    if rank == 0:
        sent = [comm.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
        assert all(work.wait() for work in sent)
    if rank == 1:
        first, second = torch.zeros(1), torch.zeros(1)
        comm.recv(second, 0, tag=2)
        assert comm.recv(first, tag=1) == 0
        assert (first.item(), second.item()) == (1.0, 2.0)
    comm.monitored_barrier()


def objects():
    rank, n = comm.get_rank(), comm.get_world_size()
    found = [None] * n
    comm.all_gather_object(found, {"rank": rank, "pad": "x" * 1000 * rank})
    assert [one["rank"] for one in found] == list(range(n))
    shared = [rank, "a"] if rank == 1 else [None, None]
    comm.broadcast_object_list(shared, src=1)
    assert shared == [1, "a"]
    gathered = [None] * n if rank == 0 else None
    comm.gather_object(rank, gathered)
    assert gathered is None or gathered == list(range(n))
    got = [None]
    comm.scatter_object_list(got, [i * "y" for i in range(n)] if rank == 0 else None)
    assert got == [rank * "y"]
    if rank == 0:
        comm.send_object_list([1, {"two": 2}], 1)
    if rank == 1:
        box = [None, None]
        assert comm.recv_object_list(box, 0) == 0
        assert box == [1, {"two": 2}]


def futures():
    x = torch.ones(3)
    work = comm.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4.0] * 3
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def everything():
    for part in (wrong_dtypes, wrong_sizes, odd_tensors, rounding, unsigned, messages, objects, futures):
        part()


@pytest.mark.parametrize("transport", ["thread", "shm"])
def test_arguments_odd_tensors_messages_and_objects(transport):
    run_ranks(everything, 2, transport)


def what_gloo_can():
    for part in (wrong_dtypes, wrong_sizes, odd_tensors, messages, objects, futures):
        part()
    rank = comm.get_rank()
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        moved = torch.tensor([rank + 7], dtype=dtype)
        with pytest.raises(TypeError, match=f"all_reduce: gloo does not reduce {dtype}: convert to a wider type first"):
            comm.all_reduce(moved)
        comm.broadcast(moved, 1)
        assert moved.item() == 8


def test_arguments_messages_and_objects_over_gloo():
    run_ranks(what_gloo_can, 2, "gloo")


def test_three_ranks_fold_in_the_same_order():
    a, b, c = run_ranks(sums_of_noise, 3, "shm")
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def sums_of_noise():
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(comm.get_rank()))
    comm.all_reduce(x)
    return x


def means():
    """Means by a product before the sum, of private and of shared memory, with numbers of every kind."""
    found = []
    for shared, count, dtype in itertools.product((False, True), (5, 50_001), (torch.float32, torch.float64)):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=dtype) for rank in range(3)]
        for rank, part in enumerate(parts):
            part[:5] = torch.tensor([1e-45, 3e38, -0.0, 1e-40, torch.inf], dtype=dtype) * (rank + 1)
        x = comm.empty(count, dtype=dtype, shared=shared).copy_(parts[comm.get_rank()])
        comm.all_reduce(x, comm.premul_sum(1 / 3))
        found.append(torch.equal(x, parts[0] * (1 / 3) + parts[1] * (1 / 3) + parts[2] * (1 / 3)))
    return found


def test_a_mean_is_rounded_as_a_product_and_a_sum():
    assert run_ranks(means, 3, "shm") == [[True] * 8] * 3


def test_shared_tensors():
    x = comm.empty(3, 4, dtype=torch.bfloat16, shared=True)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((3, 4), torch.bfloat16, True)
    address = x.data_ptr()
    view = x[1:]
    del x
    view.fill_(1)
    other = comm.empty(3, 4, dtype=torch.bfloat16, shared=True)
    assert other.data_ptr() != address
    del view
    assert comm.empty((3, 4), dtype=torch.bfloat16, shared=True).data_ptr() == address
    assert comm.empty(0, shared=True).numel() == 0
    with pytest.raises(comm.DistBackendError, match="bytes of shared memory are required"):
        comm.empty(1 << 44, shared=True)
