"""Mixtures of plans on meshes of two and three axes are one device with the whole batch."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
from torch import nn

import tests.support.spmd_meshes as programs
import wholestep as ws
from wholestep import comm
from wholestep.capture_call import capture
from wholestep.spmd import PlanExecutor, Shard
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
CASES = [("mlp", "thread", name) for name in programs.mixtures("mlp")]
CASES += [("gpt", "shm", name) for name in programs.mixtures("gpt") if LONG]


@pytest.mark.parametrize(("name", "transport", "mixture"), CASES)
def test_a_mixture_is_one_device(name, transport, mixture):
    world = programs.ranks_of(name, mixture)
    ranks = run_ranks(programs.against_one_device, world, transport, (name, mixture), timeout=300)
    local = mixture in ("sharded and replicated", "split, state sharded", "three axes")  # a rank's loss is its own
    for rank, steps in enumerate(ranks):
        for loss, expected, difference in steps:
            assert local or loss == pytest.approx(expected, rel=1e-10), (rank, mixture)
            assert difference < 1e-10, (rank, mixture)


def train(model, opt, x):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()


def wide():
    """513 rows: 257 or 256 along the first axis, whose gradients meet in 258 or 256 of 256 bytes along the second."""
    plans = [ws.FullyShard("a", gather="always"), ws.FullyShard("b", gather="always")]
    model = nn.Sequential(nn.Linear(64, 513), nn.Linear(513, 64), nn.Linear(64, 513))
    return plans, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 64))


class Turned(nn.Module):
    """One head whose halves change places and of which one column is read, as by rotary embeddings and poolers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.up(x)
        left, right = y[..., :8], y[..., 8:]
        return self.down(y * torch.cat((-right, left), -1)) + y[..., 3:4] * y.select(-1, 5).unsqueeze(-1)


def turned():
    plans = [ws.TensorParallel(axis, {"up": "column", "down": "row"}) for axis in "ab"]
    model = Turned()
    return plans, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6, 8))


def at_the_edge():
    """32 or 31 columns along the first axis, of which 32 or more are worth to stay where they are along the second."""
    plans = [ws.TensorParallel("a", {"1": "column"}), ws.FullyShard("b", min_bytes=1)]
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 63, bias=False))
    return plans, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8))


class Picks(nn.Module):
    """Of five rows, a rank of four has none."""

    def __init__(self):
        super().__init__()
        self.table, self.marks, self.head = nn.Embedding(5, 12), nn.Parameter(torch.randn(5, 12)), nn.Linear(12, 5)

    def forward(self, x):
        y = self.table(x) + self.marks[x] + self.marks.index_select(0, x[0])
        found = self.marks.gather(0, x[:, :1].expand(-1, 12)).amax(-1, keepdim=True)
        return self.head(y).softmax(-1).logsumexp(-1) + found


def with_nothing():
    roles = {"table": "embedding", "marks": ws.Shard(0), "head": "column"}
    plans = [ws.TensorParallel("a", roles), ws.FullyShard("b", min_bytes=1)]
    model = Picks()
    return plans, (model, torch.optim.AdamW(model.parameters()), torch.randint(5, (4, 4)))


class Scattered(nn.Module):
    """Its gradient along the second axis wants what is on its way along the first in another placement."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        picked = nn.functional.rms_norm(self.weight, [4]).t().take(torch.tensor([0, 1]))
        table = torch.where(self.weight > 0, self.weight, self.weight)
        return picked.sum() * 0.01 + nn.functional.embedding(ids, table).sum() * 0.01


def scattered():
    plans = [ws.TensorParallel("a", {"weight": Shard(1)}), ws.FullyShard("b", min_bytes=1, gather="always")]
    model = Scattered()
    return plans, (model, torch.optim.SGD(model.parameters()), torch.randint(4, (4,)))


def single_rows():
    """Of two rows three ranks have one, one and none: a bias's gradient has dimensions of size 1 alone, or is empty."""
    plans = [ws.TensorParallel("a", {"0": "column"}), ws.FullyShard("b", min_bytes=1)]
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.ReLU(), nn.Linear(2, 7))
    return plans, (model, torch.optim.Adam(model.parameters()), torch.randn(6, 3))


def order_of_collectives(make, rank, shape):
    """Of the step of one of the ranks: what is called along which axis, in the order of the graph."""
    comm.init_process_group("null", rank=rank, world_size=math.prod(shape))
    try:
        mesh = ws.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        plans, arguments = make()
        executor = PlanExecutor(mesh, plans)
        step = capture(train, arguments, {}, differentiable=False, parts=executor.parts)[1].step
        made = functools.reduce(lambda step, one: one(step), executor.passes_of(step), step)
        calls = [node for node in made.graph.nodes if str(node.target).startswith("wholestep.")]
        started = [node for node in calls if "wait" not in str(node.target)]
        assert all(user in calls for node in started for user in node.users), "nothing else reads what is on its way"
        return [(str(node.target), executor.axes[node.args[-1]]) for node in started]
    finally:
        comm.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "shape"),
    [(wide, (2, 2)), (turned, (2, 2)), (at_the_edge, (2, 2)), (with_nothing, (4, 2)), (single_rows, (3, 3)),
     (scattered, (2, 2))],
)
def test_ranks_of_axes_that_do_not_divide_call_all_collectives_in_one_order(make, shape):
    first, *others = (order_of_collectives(make, rank, shape) for rank in range(0, math.prod(shape), shape[1]))
    assert {axis for _, axis in first} == {"a", "b"} and others == [first] * len(others)
