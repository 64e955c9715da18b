"""Mixtures of plans on meshes of two and three axes are one device with the whole batch."""

from __future__ import annotations

import functools
import os

import pytest
import spmd_meshes as programs
import torch
from torch import nn

import wholestep as ws
from wholestep import comm
from wholestep.pipeline import capture
from wholestep.spmd import Launch
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


def order_of_collectives(make, rank):
    """Of the step of one of 2 x 2 ranks: what is called along which axis, in the order of the graph."""
    comm.init_process_group("null", rank=rank, world_size=4)
    try:
        mesh = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        plans, arguments = make()
        launch = Launch(mesh, plans)
        step = capture(train, arguments, {}, differentiable=False, parts=launch.parts)[1].step
        made = functools.reduce(lambda step, one: one(step), launch.passes_of(step), step)
        calls = [node for node in made.graph.nodes if str(node.target).startswith("wholestep.")]
        started = [node for node in calls if "wait" not in str(node.target)]
        return [(str(node.target), launch.axes[node.args[-1]]) for node in started]
    finally:
        comm.destroy_process_group()


@pytest.mark.parametrize("make", [wide, turned])
def test_ranks_with_unequal_parts_call_all_collectives_in_one_order(make):
    first, *others = (order_of_collectives(make, rank) for rank in range(4))
    assert {axis for _, axis in first} == {"a", "b"} and others == [first] * 3
