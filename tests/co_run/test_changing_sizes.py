"""Sizes that follow from data, others at each call: as eager, programs for what is alike, a bound on the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.co_run.test_steps import co_run
from wholestep.co_run import prefix_tree

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda x, keep: x[keep],
    "nonzero": lambda x, keep: x[keep.nonzero().squeeze(1)],
    "masked select": lambda x, keep: x.masked_select(keep[:, None]).view(-1, x.shape[1]),
    "unique": lambda x, keep: x[torch.unique((keep * torch.arange(len(keep)))[keep], sorted=True)],
    "slice by a number": lambda x, keep: x[: int(keep.sum())],
}


def training(pick: Callable[[Tensor, Tensor], Tensor], compiled: bool, calls: int) -> tuple[Any, list[Any]]:
    """Trains on rows picked by masks of ever new counts; part of the step has always the same sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []

    def step(x: Tensor, keep: Tensor) -> float:
        x = (x * 2).sin() + 1
        loss = model(pick(x, keep)).square().mean()
        loss.backward()
        found.append(loss.item())
        opt.step()
        opt.zero_grad()
        return float(x.sum())

    run, x = co_run(step) if compiled else step, torch.randn(100, 4)
    found += [run(x, torch.arange(100) < 3 + i) for i in range(calls)]
    return run, [*found, *model.state_dict().values()]


def same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("name", STEPS)
def test_ever_new_counts_are_bounded_and_as_in_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.co_run.step.TIMED", 10**9)
    monkeypatch.setattr("wholestep.co_run.step.MANY", 10**9)
    monkeypatch.setattr(prefix_tree, "MAX_CALLS", 4)
    step, found = training(STEPS[name], True, 12)
    nodes, programs = step._signatures.count, len(step.segments)
    assert same(found, training(STEPS[name], False, 12)[1])
    for i in range(12, 40):
        step(torch.randn(100, 4), torch.arange(100) < 3 + i)
    assert step._signatures.count == nodes and len(step.segments) == programs
    assert programs and not step.refused  # of what comes before and after with always the same sizes


def test_counts_that_come_again_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.co_run.step.TIMED", 10**9)
    monkeypatch.setattr("wholestep.co_run.step.MANY", 10**9)
    step = co_run(lambda x, keep: float((x[keep] * 2).sum()))
    for _ in range(4):
        for count in range(8):
            keep = torch.arange(9) <= count
            assert step(x := torch.randn(9, 2), keep) == float((x[keep] * 2).sum())
    assert len(step.segments) == 8


def test_a_step_of_ever_new_counts_runs_in_eager_where_that_is_faster() -> None:
    step, found = training(STEPS["mask"], True, 60)
    assert same(found, training(STEPS["mask"], False, 60)[1])
    assert len(step._times[False]) == 4 and len(step._times[True]) == 4  # both ways were tried


def test_segments_end_at_reads_in_the_first_call_too() -> None:
    """Were they to end elsewhere where calls are new, each call would make known one segment alone."""
    weight = torch.ones(3)

    def step(x: Tensor) -> float:
        for _ in range(6):
            x = weight.add_(0.1) * (x * 2).sin()
            if float(x.sum()) > 100 or not bool(weight.sum() < 100):
                x = x + 1
        return float(x.sum())

    run, x = co_run(step), torch.randn(3)
    run(x)
    known = run._signatures.count
    run(x)
    assert run._signatures.count == known
