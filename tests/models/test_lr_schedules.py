"""Every learning-rate schedule of torch, stepping outside: as eager, and never a recompile."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import wholestep as ws
from tests.support.equal import assert_same_run
from tests.zoo.optimizers import SCHEDULED, SCHEDULES, scheduled
from wholestep.errors import UnsupportedError

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


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning", "ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_may_say_what_its_schedule_has_set(schedule: str) -> None:
    """The schedule moves in the step, which then returns and keeps what it set: that of each call, as in eager."""
    said = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, rates, x = nn.Linear(2, 2), [], torch.ones(3, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULES[schedule](opt)
        by_loss = schedule == "ReduceLROnPlateau"

        def train() -> dict[str, Any]:
            loss = model(x).sum()  # noqa: B023
            loss.backward()
            opt.step()  # noqa: B023
            opt.zero_grad()  # noqa: B023
            scheduler.step(*((loss.item(),) if by_loss else ()))  # noqa: B023
            rates.append(opt.param_groups[0]["lr"])  # noqa: B023
            set_last = scheduler.get_last_lr()  # noqa: B023
            kinds = isinstance(set_last, list), type(set_last[0]), isinstance(opt.param_groups[0]["lr"], float)  # noqa: B023
            return {"rates": set_last, "part": set_last[:1], "epoch": getattr(scheduler, "last_epoch", 0), "of": kinds}  # noqa: B023

        step = ws.compile(train, fullgraph=True) if compiled else train
        results = [repr(step()) for _ in range(8)]
        said.append((results, rates, [p.detach() for p in model.parameters()]))
        assert step is train or step.captures <= 4  # type: ignore[attr-defined]
    assert said[0][:2] == said[1][:2]
    assert all(map(torch.equal, said[0][2], said[1][2]))


@pytest.mark.parametrize("read", [
    lambda scheduler, x: x * scheduler.get_last_lr()[0], lambda scheduler, x: x if scheduler.last_epoch > 2 else -x,
    lambda scheduler, x: f"{scheduler.get_last_lr()[0]:.3f}", lambda scheduler, x: scheduler.state_dict(),
    lambda scheduler, x: str(scheduler.get_last_lr()), lambda scheduler, x: scheduler.get_last_lr().copy(),
    lambda scheduler, x: json.dumps(scheduler.get_last_lr()),
])  # fmt: skip
def test_nothing_is_computed_of_what_a_schedule_sets_when_the_step_ends(read: Any) -> None:
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(opt, 1, 0.5)

    @ws.compile(fullgraph=True)
    def step(x: torch.Tensor) -> Any:
        scheduler.step()
        return read(scheduler, x)

    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(UnsupportedError, match=r"read after scheduler.step\(\)"):
        step(torch.ones(2))
    assert scheduler.state_dict() == before and opt.param_groups[0]["lr"] == 0.1


def test_a_schedule_moves_by_its_bound_method() -> None:
    said = []
    for compiled in (False, True):
        opt = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        move = lr_scheduler.CosineAnnealingLR(opt, 9).step
        run = ws.compile(lambda: (opt.step(), move())[0], fullgraph=True) if compiled else lambda: (opt.step(), move())  # noqa: B023
        said.append([(run(), opt.param_groups[0]["lr"])[1] for _ in range(4)])
    assert said[0] == said[1]


class Counting(lr_scheduler.ExponentialLR):
    def step(self, *given: Any) -> None:
        super().step(*given)
        self.calls = getattr(self, "calls", 0) + 1


def test_a_schedule_made_in_the_step_moves_by_its_own_method_and_its_bases() -> None:
    said = []
    for compiled in (False, True):
        rates = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2)]
        base = lr_scheduler.ExponentialLR(rates[0], 0.5)

        def step(x: torch.Tensor) -> Any:
            own = Counting(rates[1], 0.5)  # noqa: B023
            own.step()
            base.step()  # noqa: B023
            return x * own.calls, own.last_epoch

        run = ws.compile(step, fullgraph=True) if compiled else step
        said.append([repr((run(torch.ones(2)), [o.param_groups[0]["lr"] for o in rates])) for _ in range(3)])
    assert said[0] == said[1]


def test_what_a_step_sets_before_and_after_its_schedules_move_is_set_in_that_order() -> None:
    said = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, counts, kept, x = nn.Linear(2, 2), {"calls": 0, "ends": 0}, {}, torch.ones(3, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        group = opt.param_groups[0]
        first = lr_scheduler.LambdaLR(opt, lambda _: group["momentum"] / (1 + counts["calls"] + counts["ends"]))  # noqa: B023
        second = lr_scheduler.MultiplicativeLR(opt, lambda _: 0.5)

        def train() -> list[float]:
            counts["calls"] += 1  # noqa: B023
            group["momentum"] = 0.5 + 0.1 * counts["calls"]  # noqa: B023
            group["weight_decay"] = 0.1 * group["lr"]  # noqa: B023
            model(x).sum().backward()  # noqa: B023
            opt.step()  # noqa: B023
            first.step()  # noqa: B023
            counts["ends"] += 2  # noqa: B023
            kept["first"] = rate = group["lr"]  # noqa: B023
            second.base_lrs, group["lr"] = [0.7], 0.3  # noqa: B023
            second.step()  # noqa: B023
            kept["second"], group["momentum"] = group["lr"], 0.9  # noqa: B023
            return [rate, group["lr"], kept["first"]]  # noqa: B023

        step = ws.compile(train, fullgraph=True) if compiled else train
        seen = [(step(), dict(kept), {k: v for k, v in group.items() if k != "params"}, first.state_dict(),
                 second.state_dict(), dict(counts)) for _ in range(4)]  # fmt: skip
        said.append((seen, [p.detach() for p in model.parameters()]))
    assert repr(said[0][0]) == repr(said[1][0])
    assert all(map(torch.equal, said[0][1], said[1][1]))


def test_rates_in_tensors_are_what_the_schedule_sets() -> None:
    said = []
    for way in ("eager", "compiled", "compiled, and the optimizer once more", "eager, and the optimizer once more"):
        torch.manual_seed(0)
        model, kept, x = nn.Linear(2, 2), {}, torch.ones(3, 2)
        opt = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
        scheduler = lr_scheduler.ExponentialLR(opt, 0.5)

        def train() -> Any:
            model(x).square().sum().backward()  # noqa: B023
            opt.step()  # noqa: B023
            scheduler.step()  # noqa: B023
            kept["last"] = scheduler.get_last_lr()  # noqa: B023
            if "more" in way:  # noqa: B023
                opt.step()  # noqa: B023
            opt.zero_grad()  # noqa: B023
            return opt.param_groups[0]["lr"], scheduler.get_last_lr()  # noqa: B023

        step = ws.compile(train, fullgraph="more" not in way) if "compiled" in way else train
        seen = [repr((step(), kept, scheduler.state_dict(), opt.state_dict())) for _ in range(4)]
        said.append((seen, [p.tolist() for p in model.parameters()]))
    assert said[0] == said[1] and said[2] == said[3]
