"""Every collective as a pure operator: its result, its shape without data, its gradient against plain arithmetic."""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep import comm
from wholestep.comm.ops.functional_collectives import pending
from wholestep.testing import run_ranks

N = 2
W = torch.arange(1.0, 13.0).view(2, 6)  # weights of the losses, by rank


def inputs():
    """Every rank's input, of four rows."""
    return [torch.arange(4.0) + 10 * rank + 1 for rank in range(N)]


def done(name, *args):
    return torch.ops.wholestep.wait(getattr(torch.ops.wholestep, name)(*args))


def scattered(x, rank):
    return done("scatter", x, [x * 2, x * 3] if rank == 0 else [], 0, "")


# operator -> the call in a rank, and all ranks' results from all ranks' inputs
CASES = {
    "all_reduce sum": (lambda x, r: done("all_reduce", x, "sum", ""), lambda a, b: [a + b] * 2),
    "all_reduce avg": (lambda x, r: done("all_reduce", x, "avg", ""), lambda a, b: [(a + b) / 2] * 2),
    "all_reduce premul": (lambda x, r: done("all_reduce", x, "premul_sum:0.5", ""), lambda a, b: [(a + b) / 2] * 2),
    "broadcast": (lambda x, r: done("broadcast", x, 1, ""), lambda a, b: [b, b]),
    "all_gather": (lambda x, r: done("all_gather", x, ""), lambda a, b: [torch.cat([a, b])] * 2),
    "reduce_scatter sum": (lambda x, r: done("reduce_scatter", x, "sum", ""), lambda a, b: list((a + b).view(2, 2))),
    "reduce_scatter premul": (
        lambda x, r: done("reduce_scatter", x, "premul_sum:2", ""),
        lambda a, b: list((2 * (a + b)).view(2, 2)),
    ),
    "all_to_all": (
        lambda x, r: done("all_to_all", x, [[1, 2], [3, 2]][r], [[1, 3], [2, 2]][r], ""),
        lambda a, b: [torch.cat([a[:1], b[:2]]), torch.cat([a[1:], b[2:]])],
    ),
    "reduce sum": (lambda x, r: done("reduce", x, 1, "sum", ""), lambda a, b: [a, a + b]),
    "reduce avg": (lambda x, r: done("reduce", x, 0, "avg", ""), lambda a, b: [(a + b) / 2, b]),
    "gather": (lambda x, r: done("gather", x, 1, ""), lambda a, b: [a[:0], torch.cat([a, b])]),
    "scatter": (scattered, lambda a, b: [a * 2, a * 3]),
    "messages": (
        lambda x, r: done("send", x, 1, 7, "") if r == 0 else done("recv", x, 0, 7, "") * 2,
        lambda a, b: [a, a * 2],
    ),
    "barrier": (lambda x, r: done("barrier", x, ""), lambda a, b: [a, b]),
}


def loss(result, rank):
    return (result * W.reshape(-1)[: result.numel()] * (rank + 1)).sum()


def all_cases():
    rank, found = comm.get_rank(), {}
    for name, (call, _) in CASES.items():
        x = inputs()[rank].requires_grad_()
        result = call(x, rank)
        loss(result, rank).backward()
        with FakeTensorMode() as mode:
            shape = call(mode.from_tensor(inputs()[rank]), rank).shape
        found[name] = result.detach(), x.grad, tuple(shape)
    comm.barrier()  # ranks that are threads count as one
    return found, pending()


@pytest.fixture(scope="module", params=["shm", "thread"])
def found(request):
    return run_ranks(all_cases, N, request.param)


@pytest.mark.parametrize("name", CASES)
def test_results_shapes_and_gradients(name, found):
    whole = [x.requires_grad_() for x in inputs()]
    wanted = CASES[name][1](*whole)
    sum(loss(result, rank) for rank, result in enumerate(wanted)).backward()
    for rank, (rank_found, left) in enumerate(found):
        result, grad, shape = rank_found[name]
        assert torch.equal(result, wanted[rank].detach())
        assert shape == tuple(wanted[rank].shape)
        assert torch.equal(grad, whole[rank].grad if whole[rank].grad is not None else torch.zeros(4))
        assert left == 0


def test_every_operator_is_among_the_cases():
    plain = {name for name in comm.OPERATORS if not name.endswith("_") and name != "wait"}
    assert plain - {"send", "recv", "share_rows"} == {name.split()[0] for name in CASES} - {"messages"}


def no_gradient():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="wholestep::all_reduce with 'max' has no gradient: sum, avg"):
        done("all_reduce", x, "max", "").sum().backward()
    for op in ("median", "premul_sum:x"):
        with pytest.raises(ValueError, match="unknown reduction"):
            done("all_reduce", torch.ones(2), op, "")


def test_reductions_without_a_gradient_say_so():
    run_ranks(no_gradient, N, "thread")


# Calls as in c10d, recorded ---------------------------------------------------------------------------------------


def premul(x, factor):
    comm.all_reduce(x, comm.premul_sum(factor))
    return x


def premul_reduce(x, factor):
    comm.reduce(x, 0, comm.premul_sum(factor))
    return x


def premul_scatter(x, factor):
    out, flat = torch.zeros(2), torch.zeros(2)
    comm.reduce_scatter(out, list(x.view(2, 2)), comm.premul_sum(factor))
    comm.reduce_scatter_tensor(flat, x, comm.premul_sum(factor))
    return out + flat


def coalesced(x, factor):
    parts = [x * factor, x + 1]
    work = comm.all_reduce_coalesced(parts, async_op=True)
    work.wait()
    return torch.cat(parts)


def ring(x, factor):
    rank, came = comm.get_rank(), torch.zeros_like(x)
    works = comm.batch_isend_irecv(
        [comm.P2POp(comm.isend, x * factor, 1 - rank), comm.P2POp(comm.irecv, came, 1 - rank)]
    )
    for work in works:
        work.wait()
    return came


def one_way(x, factor):
    if comm.get_rank() == 0:
        comm.send(x * factor, 1, tag=3)
    else:
        assert comm.recv(x, 0, tag=3) == 0
    comm.barrier()
    return x


FORMS = [premul, premul_reduce, premul_scatter, coalesced, ring, one_way]


def record(form, factor):
    """The names of the recorded operators, after dead code is gone, and two runs of the recording against eager."""
    x = torch.arange(4.0) * (comm.get_rank() + 1)
    recorded = make_fx(form)(x.clone(), factor)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    names = [
        str(node.target).split(".")[1] for node in recorded.graph.nodes if str(node.target).startswith("wholestep.")
    ]
    same = [torch.equal(form(x + i, factor), recorded(x + i, factor)) for i in range(3)]
    return names, all(same)


def record_all():
    numbers = {form.__name__: record(form, 0.5) for form in FORMS}
    tensors = {form.__name__: record(form, torch.tensor(3.0)) for form in FORMS[:3]}
    with pytest.raises(ValueError, match="name the source"):
        make_fx(lambda x: comm.recv(x))(torch.ones(1))
    return numbers, tensors


def test_recorded_calls_run_as_they_did():
    started = {
        "premul": ["all_reduce_"],
        "premul_reduce": ["reduce"],
        "premul_scatter": ["reduce_scatter", "reduce_scatter"],
        "coalesced": ["all_reduce_", "all_reduce_"],
        "ring": ["send", "recv"],
    }
    for rank, (numbers, tensors) in enumerate(run_ranks(record_all, N, "shm")):
        for name, (names, same) in [*numbers.items(), *tensors.items()]:
            wanted = started.get(name, [["send", "recv"][rank], "barrier"])
            assert [one for one in names if not one.startswith("wait")] == wanted
            assert sum(one.startswith("wait") for one in names) == len(wanted)
            assert same, name


def step(x, y):
    """Nobody reads what the send and the barrier give."""
    comm.barrier()
    if comm.get_rank() == 0:
        comm.send(x * 2, 1)
    else:
        comm.recv(y, 0)
    return y + 1


def every_move(x, y):
    n, rank = comm.get_world_size(), comm.get_rank()
    rows, flat, part = [torch.zeros_like(x) for _ in range(n)], torch.zeros(n * len(x)), torch.zeros(2)
    comm.all_gather(rows, x)
    work = comm.all_gather_into_tensor(flat, x * 2, async_op=True)
    comm.reduce_scatter(part, list((x + 1).view(n, 2)))
    work.wait()
    comm.broadcast(y, 1)
    moved, got = torch.zeros_like(x), [torch.zeros(2) for _ in range(n)]
    comm.all_to_all_single(moved, x * 3)
    comm.all_to_all(got, list((x * 5).view(n, 2)))
    mine = torch.zeros_like(x)
    comm.scatter(mine, [x, x * 7] if rank == 0 else None, 0)
    comm.gather(x, rows if rank == 0 else None, 0)
    total = x * 1
    comm.all_reduce(total)
    comm.all_reduce(total, "max")
    comm.reduce(total, 0, comm.premul_sum(0.5))
    return torch.cat([*rows, flat, part, y, moved, *got, mine, total])


def captured_moves():
    x, y = torch.arange(4.0) + 10 * comm.get_rank(), torch.full((4,), float(comm.get_rank()))
    compiled = ws.compile(every_move, fullgraph=True)
    same = [torch.equal(compiled(x + i, y.clone()), every_move(x + i, y.clone())) for i in range(3)]
    return same, pending()


def test_collectives_of_a_captured_step_are_those_of_eager():
    assert run_ranks(captured_moves, N, "shm") == [([True] * 3, 0)] * N


def captured():
    compiled, found = ws.compile(step, fullgraph=True), []
    for i in range(3):
        found.append(compiled(torch.full((3,), i + 1.0), torch.zeros(3)).tolist())
    names = [str(node.target) for node in compiled.graphs[0].graph.nodes if "wholestep." in str(node.target)]
    return found, names, pending()


def test_messages_and_barriers_of_a_captured_step_stay_in_it():
    (zero, zeros, left), (one, ones, kept) = run_ranks(captured, N, "shm")
    assert zero == [[1.0] * 3] * 3
    assert one == [[3.0] * 3, [5.0] * 3, [7.0] * 3]
    assert [name.split(".")[1] for name in zeros] == ["barrier", "wait", "send", "wait"]
    assert [name.split(".")[1] for name in ones] == ["barrier", "wait", "recv", "wait"]
    assert left == kept == 0


def repeated_factor():
    """A factor is not lost where a call like an earlier one takes the short way."""
    for op in ("premul_sum:0.5", comm.premul_sum(0.5)):
        for _ in range(4):
            x = torch.ones(4)
            comm.all_reduce(x, op)
            assert x.tolist() == [1.0] * 4
    return os.getpid()


def test_a_factor_is_kept_in_repeated_calls():
    assert len(set(run_ranks(repeated_factor, N, "shm"))) == N


def unread_results():
    """Collectives in compiled steps whose results nobody reads: a reduce off its root, an all-reduce."""

    def reduces(x, factor):
        y = x * 2
        comm.reduce(y, 0, comm.premul_sum(factor))
        z = x * 3
        return y + z if comm.get_rank() == 0 else z

    def drops(x, factor):
        work = comm.all_reduce(x * factor, async_op=True)
        z = x * 3
        work.wait()
        return z

    found = []
    for step in (reduces, drops):
        compiled = ws.compile(step, fullgraph=True)
        results = [compiled(torch.ones(4), torch.tensor(0.5)).tolist() for _ in range(3)]
        found.append((results[-1], compiled.code.count("wait(") + compiled.code.count("_blocking("), pending()))
    return found


def test_a_collective_is_waited_for_where_nobody_reads_its_result():
    root, other = run_ranks(unread_results, 2)
    assert [root[0][0], other[0][0]] == [[5.0] * 4, [3.0] * 4] and root[1][0] == other[1][0] == [3.0] * 4
    assert all(waits >= 1 and left == 0 for rank in (root, other) for _, waits, left in rank)
