"""Buffers in the local view: what stock DDP leaves on each rank after each step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.support.spmd_buffers as programs
import wholestep as ws
from tests.support.spmd_programs import mesh
from wholestep import comm
from wholestep.testing import run_ranks

# step -> how many messages carry buffers in one call
MESSAGES = {"plain": 1, "pair": 2, "accumulated": 1, "clipped_twice": 2, "teacher": 1, "looked_at": 1, "evaluated": 1,
            "always_eval": 1}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks saw."""
    return run_ranks(programs.everything, 2, "gloo", (str(tmp_path_factory.mktemp("stock") / "store"),), timeout=300)


@pytest.mark.parametrize("step", [step.__name__ for step in programs.STEPS])
def test_buffers_are_ddps_bit_for_bit_and_travel_in_one_message(step, found):
    for each in found:
        cases = {name: case for name, case in each.items() if name.partition(",")[0] == step}
        assert cases == dict.fromkeys(cases, ([], MESSAGES[step])) and cases


def test_broadcast_buffers_false_leaves_them_each_ranks_own(found):
    assert [each["kept"] for each in found] == [([], False)] * 2


def test_explain_shows_what_buffers_send(found):
    assert "broadcast" in found[0]["explain"]


class Overlapping(nn.Module):
    """Has buffers of which one is a part of another."""

    def __init__(self, value):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        memory = torch.full((2000, 500), value)
        self.register_buffer("row", memory[0])
        self.register_buffer("whole", memory)

    def forward(self, x):
        self.whole[1].add_(1.0)
        self.row.mul_(2.0)
        return self.layer(x) * self.whole.sum(0).sum()


def _overlapping() -> list[float]:
    model = Overlapping(comm.get_rank() + 1.0)

    def step(x):
        model(x).sum().backward()
        return model.whole.sum(), model.row.sum()

    compiled = ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"), fullgraph=True)
    return [float(v) for _ in range(2) for v in compiled(torch.ones(1, 1))]


def test_buffers_that_share_memory_are_the_firsts():
    assert run_ranks(_overlapping, 2, "gloo") == [[1e6 + 1000, 1000.0, 1e6 + 2500, 2000.0]] * 2


def _transposed() -> list[torch.Tensor]:
    """A collective of the user's own on a tensor that is not contiguous, in a step."""
    def step(x):
        y = x.t() * 1
        comm.all_reduce(y.t())
        z = x.t().clone(memory_format=torch.preserve_format)
        comm.broadcast(z, 0)
        return y, z

    x = torch.arange(6.0).view(2, 3) * (comm.get_rank() + 1)
    return [*ws.compile(step, fullgraph=True)(x), *step(x)]


def test_a_traced_collective_of_a_tensor_that_is_not_contiguous_is_waited_for():
    for y, z, y2, z2 in run_ranks(_transposed, 2, "shm"):
        assert torch.equal(y, y2) and torch.equal(z, z2)
