"""A whole training loop as people write it: schedule, odd last batch, evaluation, checkpoints in between."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.errors import LeakError

Batch = dict[str, Tensor]


def batches() -> list[Batch]:
    torch.manual_seed(1)
    return [{"x": torch.randn(n, 1, 8, 8), "y": torch.randint(10, (n,))} for n in (8, 8, 8, 5)]


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)]
    model = nn.Sequential(*layers)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=20)


def step(model: nn.Module, opt: torch.optim.Optimizer, batch: Batch) -> dict[str, Any]:
    opt.zero_grad()
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return {"loss": loss.item(), "norm": norm, "lr": opt.param_groups[0]["lr"]}


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    right = (model(batch["x"]).argmax(-1) == batch["y"]).float().mean()
    model.train()
    return right


def loop(train: Any, judge: Any) -> tuple[list[Any], nn.Module, torch.optim.Optimizer]:
    model, opt, schedule = build()
    history: list[Any] = []
    for _ in range(3):
        for batch in batches():
            result = train(model, opt, batch)
            schedule.step()
            history.append((result["loss"], result["norm"].item(), result["lr"]))
        history.append(judge(model, batches()[0]).item())
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}, saved)
        saved.seek(0)
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        schedule.load_state_dict(state["schedule"])
    return history, model, opt


def test_a_loop_with_checkpoints_is_eagers_to_the_bit() -> None:
    compiled, judge = ws.compile(step, fullgraph=True), ws.compile(evaluate, fullgraph=True)
    ours, model, opt = loop(compiled, judge)
    theirs, other, other_opt = loop(step, evaluate)
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert str(opt.state_dict()) == str(other_opt.state_dict())
    assert compiled.recompiles == ["L['batch']['x'] shape: expected [8, 1, 8, 8], found [5, 1, 8, 8]"]
    assert judge.recompiles == []


@pytest.mark.parametrize("backend", ["inductor", lambda gm, inputs: gm], ids=["inductor", "function"])
def test_other_backends_train_alike(backend: Any) -> None:
    losses = []
    for train in (step, ws.compile(step, backend=backend, fullgraph=True)):
        model, opt, _ = build()
        losses.append([train(model, opt, batch)["loss"] for batch in batches()[:3]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_loss_of_a_step_that_ran_its_backward_says_where_backward_belongs() -> None:
    model = nn.Linear(3, 3)

    def whole(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    result = ws.compile(whole, fullgraph=True)(torch.ones(2, 3))
    assert result.requires_grad and not result.is_leaf
    with pytest.raises(RuntimeError, match="inside of the step"):
        result.sum().backward()


def test_trace_gives_the_graph_and_runs_nothing() -> None:
    x = torch.ones(2, 2)
    gm = ws.trace(lambda x: x.mul_(2).t() + 1, x)
    assert torch.equal(x, torch.ones(2, 2)) and x._version == 0
    assert "aten.mul.Tensor" in gm.code and "mul_" not in gm.code.replace("mul_tensor", "")


def _double(*args: Any) -> Any:
    return args[-1] * 2


def _halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("add", [
    lambda m: m.register_forward_hook(_double), lambda m: m.weight.register_hook(_double),
    lambda m: m.weight.register_post_accumulate_grad_hook(_halve_gradient),
    lambda m: m.register_full_backward_hook(lambda m, g, _: (g[0] * 2,)),
])  # fmt: skip
def test_hooks_that_are_added_anew_for_each_call_are_those_of_the_last(add: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def gradients(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    step, x = ws.compile(gradients, fullgraph=True), torch.randn(2, 3)
    gradients(x)
    for _ in range(3):
        handle = add(model[1])
        assert all(map(torch.equal, step(x), gradients(x)))
        handle.remove()
    assert step.captures == 1
    assert all(map(torch.equal, step(x), gradients(x)))
    assert step.captures == 2 and "expected 1 hook, found 0 hooks" in step.recompiles[0]


def test_a_step_that_takes_a_hook_away_takes_that_of_each_call() -> None:
    layer = nn.Linear(2, 2)
    handles = [layer.register_forward_hook(_double)]

    @ws.compile(fullgraph=True)
    def step(x: Tensor) -> Tensor:
        out = layer(x)
        handles[0].remove()
        return out

    x = torch.randn(2, 2)
    for _ in range(3):
        assert torch.equal(step(x), layer(x) * 2) and not layer._forward_hooks
        handles[0] = layer.register_forward_hook(_double)


@pytest.mark.parametrize("add", [
    lambda log, out: log.append("step"), lambda log, out: log.append((tuple(out.shape), 3)),
    lambda log, out: log.extend(["loss", out.detach()]), lambda log, out: log.append({"batch": len(out)}),
])  # fmt: skip
def test_a_log_that_grows_by_anything_is_one_step(add: Any) -> None:
    """More calls than a step may be captured for."""
    layer, logs, x = nn.Linear(2, 2), ([], []), torch.ones(3, 2)

    def training(log: list[Any]) -> Any:
        def step(x: Tensor) -> Tensor:
            out = layer(x)
            add(log, out)
            return out

        return step

    eager, compiled = training(logs[0]), ws.compile(training(logs[1]), fullgraph=True)
    for _ in range(40):
        eager(x), compiled(x)
    assert compiled.captures <= 2 and len(logs[0]) == len(logs[1])
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(*logs, strict=True))


def test_a_log_that_the_step_reads_is_no_replay() -> None:
    """Each length would be a capture: the step's Python runs at each call, and is refused in a whole graph."""
    log: list[str] = []

    def step(x: Tensor) -> Tensor:
        log.append("step")
        return x * len(log)

    compiled: Any = ws.compile(step)
    assert [compiled(torch.ones(())).item() for _ in range(4)] == [1, 2, 3, 4]
    assert len(compiled.breaks) == 1 and log == ["step"] * 4
    with pytest.raises(LeakError, match="grows by values made in the step, at each call, and the step reads it"):
        ws.compile(step, fullgraph=True)(torch.ones(()))
    assert log == ["step"] * 4


def test_a_set_that_grows_by_tensors_is_refused() -> None:
    kept: set[Tensor] = set()

    @ws.compile(fullgraph=True)
    def step(x: Tensor) -> None:
        kept.add(x * 2)

    step(torch.ones(()))
    with pytest.raises(LeakError, match="grows by 1 values, at each call"):
        step(torch.ones(()))
    assert len(kept) == 1
