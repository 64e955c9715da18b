"""The Gloo engine, the pure operators and `run_ranks`."""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wholestep import comm
from wholestep.testing import RankError, run_ranks


def in_place():
    rank = comm.get_rank()
    out = []
    for op in ("sum", "avg", "max", "min"):
        x = torch.tensor([1.0, 5.0]) * (rank + 1)
        comm.all_reduce(x, op)
        out.append(x.tolist())
    strided = torch.arange(6.0).view(2, 3).t()
    comm.all_reduce(strided)
    flags = torch.tensor([rank == 0, False, True])
    comm.all_reduce(flags)
    y = torch.full((2,), float(rank))
    comm.broadcast(y, src=1)
    comm.barrier()
    return out, strided, flags, y


def operators():
    rank, ops = comm.get_rank(), torch.ops.wholestep
    x = torch.arange(4.0) + 10 * rank
    x.requires_grad_()
    summed = ops.wait(ops.all_reduce(x, "mean", ""))
    gathered = ops.wait(ops.all_gather(x, ""))
    scattered = ops.wait(ops.reduce_scatter(x, "sum", ""))
    moved = ops.wait(ops.all_to_all(x, [2, 2], [2, 2], ""))
    (gathered * torch.arange(8.0)).sum().backward()
    y = torch.ones(3) * (rank + 1)
    assert ops.wait(ops.all_reduce_(y, "sum", "")) is y
    return summed.detach(), gathered.detach(), scattered.detach(), moved.detach(), x.grad, y


def test_in_place_collectives():
    for out, strided, flags, y in run_ranks(in_place, 2, "gloo"):
        assert out == [[3.0, 15.0], [1.5, 7.5], [2.0, 10.0], [1.0, 5.0]]
        assert torch.equal(strided, 2 * torch.arange(6.0).view(2, 3).t())
        assert flags.tolist() == [True, False, True]
        assert y.tolist() == [1.0, 1.0]


def test_operators_and_their_gradients():
    a, b = torch.arange(4.0), torch.arange(4.0) + 10
    results = run_ranks(operators, 2, "gloo")
    for rank, (mean, gathered, scattered, moved, grad, y) in enumerate(results):
        half = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(mean, (a + b) / 2)
        assert torch.equal(gathered, torch.cat([a, b]))
        assert torch.equal(scattered, (a + b)[half])
        assert torch.equal(moved, torch.cat([a[half], b[half]]))
        assert torch.equal(grad, 2 * torch.arange(8.0)[4 * rank : 4 * rank + 4])
        assert y.tolist() == [3.0, 3.0, 3.0]


def fake_shapes():
    with FakeTensorMode():
        x = torch.empty(4, 3)
        ops = torch.ops.wholestep
        made = [ops.all_reduce(x, "sum", ""), ops.all_gather(x, ""), ops.reduce_scatter(x, "sum", "")]
        return [tuple(ops.wait(t).shape) for t in made]


def test_shapes_without_data():
    assert run_ranks(fake_shapes, 2, "gloo") == [[(4, 3), (8, 3), (2, 3)]] * 2


def fails_in_rank_one():
    if comm.get_rank() == 1:
        raise KeyError("lost")
    comm.barrier()


def dies_in_rank_one():
    if comm.get_rank() == 1:
        os._exit(7)


def test_errors_come_back_with_rank_and_traceback():
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(fails_in_rank_one, 2, "gloo")
    assert any("rank 1 of 2" in note and "fails_in_rank_one" in note for note in caught.value.__notes__)


def test_a_dead_rank_is_reported():
    with pytest.raises(RankError, match="rank 1 of 2 ended with exit code 7"):
        run_ranks(dies_in_rank_one, 2, "gloo")
