"""Collectives called as in c10d inside a traced function: each becomes its operator and exactly one wait."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep import comm
from wholestep.errors import UnsupportedError
from wholestep.testing import run_ranks


def all_reduce(x, n):
    return comm.all_reduce(x, async_op=True), x


def all_gather(x, n):
    outs = [torch.zeros_like(x) for _ in range(n)]
    work = comm.all_gather(outs, x, async_op=True)
    work.wait()
    return work, sum(outs)


def all_gather_into_tensor(x, n):
    out = torch.cat([torch.zeros_like(x) for _ in range(n)])
    work = comm.all_gather_into_tensor(out, x, async_op=True)
    work.wait()
    return work, out


def reduce_scatter(x, n):
    out = torch.zeros_like(x)
    return comm.reduce_scatter(out, [x.clone() + i for i in range(n)], async_op=True), out


def reduce_scatter_tensor(x, n):
    out = torch.zeros_like(x).chunk(n, dim=0)[comm.get_rank()]
    return comm.reduce_scatter_tensor(out, x, async_op=True), out


def broadcast(x, n):
    return comm.broadcast(x, src=0, async_op=True), x


def scatter(x, n):
    out = torch.zeros_like(x)
    parts = [x + i for i in range(n)] if comm.get_rank() == 0 else None
    return comm.scatter(out, parts, src=0, async_op=True), out


def all_to_all(x, n):
    outs = [torch.zeros_like(x) for _ in range(n)]
    return comm.all_to_all(outs, [x for _ in range(n)], async_op=True), outs


def consecutive(x, n):
    comm.all_reduce(x, async_op=True).wait()
    return comm.all_reduce(x, async_op=True), x


def reduce(x, n):
    return comm.reduce(x, 0, async_op=True), x


def gather(x, n):
    outs = [torch.zeros_like(x) for _ in range(n)] if comm.get_rank() == 0 else None
    return comm.gather(x, outs, 0, async_op=True), outs or x


FORMS = [
    all_reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
    broadcast,
    scatter,
    all_to_all,
    consecutive,
    reduce,
    gather,
]
TWICE = {"consecutive"}


def trace_all():
    return {form.__name__: traced(form) for form in FORMS}


def traced(form):
    """Results of the function and of its traced form on two inputs, and the names of the recorded operators."""
    n = comm.get_world_size()

    def fn(x):
        work, out = form(x + x, n)
        work.wait()
        return [one * 2 for one in out] if isinstance(out, list) else out * 2

    x = torch.ones(4, 4) * (comm.get_rank() + 1)
    recorded = make_fx(fn)(x.clone())
    names = [str(node.target) for node in recorded.graph.nodes if node.op == "call_function"]
    first, again = fn(x + 1), recorded(x + 1)
    other = recorded(x + 2)
    same = all(torch.equal(a, b) for a, b in zip(_listed(first), _listed(again), strict=True))
    differs = not all(torch.equal(a, b) for a, b in zip(_listed(first), _listed(other), strict=True))
    return names, same, differs


def _listed(value):
    return value if isinstance(value, list) else [value]


@pytest.fixture(scope="module")
def recordings():
    """One run for all forms: importing what `make_fx` needs takes seconds in each process."""
    return run_ranks(trace_all, 2, "gloo")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_traced_work_wait(form, recordings):
    for names, same, differs in (recording[form.__name__] for recording in recordings):
        ours = [name for name in names if name.startswith("wholestep.")]
        waits = [name for name in ours if name.startswith("wholestep.wait")]
        started = [name for name in ours if name not in waits]
        assert len(started) == len(waits) == (2 if form.__name__ in TWICE else 1), ours
        assert ours[0] not in waits
        assert ours.index(waits[0]) == 1
        assert names.index(waits[-1]) < max(i for i, name in enumerate(names) if "mul" in name)
        assert same
        assert differs


def views():
    """In-place collectives on parts of tensors, inside of a compiled step and in eager."""
    def rows(y):
        comm.all_reduce(y[1:3])

    def strided(y):
        comm.broadcast(y[:, 0], 1)
        comm.all_reduce(y.diagonal())

    def apart(y):
        work = comm.all_reduce(y[0], async_op=True)
        y[1] += 1
        work.wait()
        y[0] += 1

    def overlapping(y):
        comm.all_reduce(y[0:3])
        comm.all_reduce_coalesced([y[1:4], y[3]])

    def of_a_view(y):
        part = y.flatten()[3:].detach()
        comm.all_reduce(part)
        comm.reduce(part[4:], 1)
        comm.all_gather_into_tensor(y[1:3], part[:3].clone())

    x = torch.arange(12.0).view(4, 3) * (1 + comm.get_rank())
    wrong = []
    for write in (rows, strided, apart, overlapping, of_a_view):
        for made in (True, False):
            def step(x):
                y = x * 2 if made else x  # noqa: B023
                write(y)  # noqa: B023
                return y + 0

            for run in (ws.compile(step, fullgraph=True), ws.compile(step)):
                given, expected = x.clone(), x.clone()
                if not torch.equal(run(given), step(expected)) or not torch.equal(given, expected):
                    wrong.append((write.__name__, made))

    def beside(whole, part):
        comm.all_reduce(whole)
        return part + 1

    given, expected = x.clone(), x.clone()
    if not torch.equal(ws.compile(beside, fullgraph=True)(given, given[1]), beside(expected, expected[1])):
        wrong.append((beside.__name__, False))
    return wrong


def test_collectives_in_place_on_parts_of_tensors():
    assert run_ranks(views, 2, "shm") == [[], []]


def by_python():
    """What ranks say to each other by Python code: what a whole graph answers, and what steps give by default."""
    rank = comm.get_rank()

    def gathers(x):
        found = [None, None]
        comm.all_gather_object(found, rank + 1)
        return x * sum(found)

    def broadcasts(x):
        found = [rank + 5]
        comm.broadcast_object_list(found, 0)
        return x * found[0]

    def scatters(x):
        found = [None]
        comm.scatter_object_list(found, [3, 4] if rank == 0 else None, 0)
        return x * found[0]

    def sends(x):
        found = [7]
        comm.send_object_list(found, 1) if rank == 0 else comm.recv_object_list(found, 0)
        comm.monitored_barrier()
        return x * found[0]

    def splits(x):
        comm.all_reduce(y := x * 1, group=comm.new_group([0, 1]))
        return y

    def from_anybody(x):
        y = x * 2
        if rank == 0:
            comm.send(y, 1)
            return y
        y += 1
        sender = comm.recv(y[:])
        return y * (sender + 5)

    compiled = ws.compile(from_anybody)
    x = torch.arange(3.0)
    said, right = [], all(torch.equal(compiled(x * i), from_anybody(x * i)) for i in range(5))
    for step in (gathers, broadcasts, scatters, sends, splits):
        try:
            ws.compile(step, fullgraph=True)(torch.ones(3))
        except UnsupportedError as error:
            said.append(str(error))
        compiled = ws.compile(step)
        right &= all(torch.equal(compiled(x), step(x)) for x in (torch.ones(3), torch.full((3,), 2.0), torch.ones(3)))
    return said, right


def test_what_reaches_other_ranks_by_python_is_refused_by_name_or_run_again():
    names = "all_gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "new_group"
    for rank, (said, right) in enumerate(run_ranks(by_python, 2, "shm")):
        assert right and len(said) == len(names)
        for text, name in zip(said, names, strict=True):
            expected = "recv_object_list" if rank and name.startswith("send") else name
            assert f"comm.{expected} reaches other ranks" in text and "test_traced_calls.py:" in text
