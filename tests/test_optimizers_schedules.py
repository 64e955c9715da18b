"""Every learning-rate schedule of torch, stepping outside: as eager, and never a recompile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equal import assert_same_run
from torch.optim import lr_scheduler
from zoo.optimizers import SCHEDULED, SCHEDULES, scheduled

COMBINATIONS = [(schedule, "SGD") for schedule in SCHEDULES] + [
    (schedule, optimizer)
    for optimizer in list(SCHEDULED)[1:]
    for schedule in ("LambdaLR", "OneCycleLR", "ReduceLROnPlateau")
    if (schedule, optimizer) != ("ReduceLROnPlateau", "SGD-tensor")
]


@functools.cache
def recompiles_without(optimizer: str) -> tuple[Any, ...]:
    return tuple(assert_same_run(scheduled(None, optimizer)).recompiles[-1])


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning", "ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize(("schedule", "optimizer"), COMBINATIONS)
def test_schedule(schedule: str, optimizer: str) -> None:
    run = assert_same_run(scheduled(schedule, optimizer))
    assert len(run.recompiles[-1]) == len(recompiles_without(optimizer)), run.recompiles[-1]


def test_schedules_change_the_learning_rate() -> None:
    """The worlds are worth their name: each schedule moves a learning rate within five calls."""
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        world = scheduled(schedule, "SGD")(0)
        group = world.watch["opt"].param_groups[0]
        rates = []
        for i in range(5):
            result = world.step(*world.args[i % len(world.args)])
            assert world.after is not None
            world.after(i, result)
            rates.append(group["lr"])
        assert len(set(rates)) > 1, schedule


def test_the_table_knows_every_schedule() -> None:
    found = {
        name
        for name, cls in vars(lr_scheduler).items()
        if isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} <= set(SCHEDULES)
