"""Bools that Python decides on under plans of the global view: ranks with parts of a batch go one way, one device's."""

from __future__ import annotations

import torch
from torch import nn

import wholestep as ws
from wholestep import comm
from wholestep.testing import run_ranks

ROWS, RANKS = 8, 2


def make(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, mask):
        optimizer.zero_grad()
        out = model(nn.functional.dropout(x, 0.5) if kind == "drawn" else x)
        if (x.abs() > 100).any():
            raise ValueError("a batch out of range")
        if mask.all():  # known before the step
            loss = out.square().mean()
        else:
            loss = (out * mask[:, None]).square().sum() / mask.sum()
        if kind == "on each" and x[:, 0].sum() > 0:
            loss = loss * 2
        if kind == "on each" and x[:, 1].sum() > 0:
            loss = loss + 1
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind == "mask alone" or torch.isfinite(norm):
            optimizer.step()
        return loss.detach()

    return step


def losses(step, rows):
    draws = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    for call in range(8):
        x, mask = torch.randn(ROWS, 8, generator=draws, dtype=torch.float64), torch.ones(ROWS, dtype=torch.bool)
        mask[-1] = call not in (0, 3, 4, 6)  # of the last rank's part
        if call == 5:
            x[0, 0] = float("nan")
        yield step(x[rows].clone(), mask[rows].clone()).item()


def compiled(kind, fullgraph):
    mesh = ws.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    return ws.compile(make(kind), mesh=mesh, plan=ws.FullyShard("dp", min_bytes=1), fullgraph=fullgraph)


CASES = {"mask alone": True, "with the norm": False, "drawn": False, "on each": False}


def ranked():
    mine = slice(comm.get_rank() * ROWS // RANKS, (comm.get_rank() + 1) * ROWS // RANKS)
    steps = {kind: compiled(kind, fullgraph) for kind, fullgraph in CASES.items()}
    found = {kind: [*losses(step, mine)] for kind, step in steps.items()}
    return {kind: (found[kind], step.breaks, step.recompiles, step.captures) for kind, step in steps.items()}


def test_decisions_are_one_devices():
    expected = {kind: torch.tensor([*losses(make(kind), slice(None))]) for kind in CASES}
    for rank in run_ranks(ranked, RANKS):
        for kind, (found, breaks, recompiles, captures) in rank.items():
            torch.testing.assert_close(torch.tensor(found), expected[kind], rtol=1e-12, atol=0.0, equal_nan=True)
            if kind == "on each":
                assert "Python decides otherwise from call to call" in breaks[0]
            else:
                assert not breaks and captures == 2 + (kind != "mask alone"), (kind, breaks, recompiles)
                assert "all(L['mask']).item(): expected True, found False" in recompiles[0]


def raising():
    step = compiled("with the norm", fullgraph=False)
    x, mask = torch.ones(ROWS // RANKS, 8, dtype=torch.float64), torch.ones(ROWS // RANKS, dtype=torch.bool)
    said = []
    for factor in (1.0, 1000.0, 1.0):  # of one rank's part
        try:
            said.append(step(x * (factor if comm.get_rank() else 1.0), mask).item())
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_step_that_raises_for_one_ranks_part_raises_on_all():
    for first, second, third in run_ranks(raising, RANKS, "thread"):
        assert isinstance(first, float) and isinstance(third, float) and first != third
        assert second == "a batch out of range"
