"""Decisions on values that a step computes: programs that end where Python would go on otherwise."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.runtime import program_cache
from wholestep.trace.numbers.decisions import MOST

Maker = Callable[[], tuple[Callable[[Tensor], Any], nn.Module, Any]]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 8))


def skips(optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Leaves out an update whose gradients are not finite."""
    model = net()
    opt = optimizer(model.parameters(), lr=0.01, **options)

    def step(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            opt.step()
        return loss.detach()

    return step, model, opt


def scales() -> Any:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    model.scaler = scaler
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Tensor) -> tuple[Tensor, float]:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach(), scaler.get_scale()

    return step, model, opt


def decides_on_what_it_updated() -> Any:
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if model[0].weight.norm() > 1.9:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        return torch.rand(2) + loss.detach()

    return step, model, opt


def returns_early() -> Any:
    """A branch that reads what the other one replaces."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        if not torch.isfinite(loss):
            return [p.grad for p in model.parameters()]
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    return step, model, opt


def writes_its_input() -> Any:
    model = net()

    def step(x: Tensor) -> Tensor:
        x.nan_to_num_(0.0).add_(1.0)
        y = model(x)
        return x * 2 if y.sum() + x[0].sum() > 8 else y - torch.rand(1)

    return step, model, None


STEPS: dict[str, Maker] = {
    "skips": skips, "foreach": lambda: skips(foreach=True), "fused": lambda: skips(fused=True),
    "sgd": lambda: skips(torch.optim.SGD), "scales": scales, "after an update": decides_on_what_it_updated,
    "returns early": returns_early, "writes its input": writes_its_input,
}  # fmt: skip


def state(model: nn.Module, opt: Any, scaler: Any = None) -> list[Any]:
    """Everything that a step may change, with version counters."""
    found = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    found += [t for s in opt.state.values() for t in s.values()] if opt is not None else []
    found += [p._version for p in model.parameters()]
    return found + ([model.scaler.get_scale(), model.scaler.state_dict()] if hasattr(model, "scaler") else [])


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["aten", "naive"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_eager_whatever_it_decides(name: str, backend: Any) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(6, 8) for _ in range(14)]
    for index in (3, 4, 9):
        batches[index][0, 0] = float("nan")
    seen = []
    for compiles in (False, True):
        step, model, opt = STEPS[name]()
        run = ws.compile(step, backend=backend) if compiles else step
        torch.manual_seed(2)
        record = []
        for index, batch in enumerate(batches):
            x = batch.clone()
            given = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, run(x))
            record.append(copy.deepcopy([given, x, state(model, opt), torch.get_rng_state()]))
            for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and index in (4, 9)):
                norm.reset_running_stats()
        seen.append(record)
    for want, got in zip(*seen, strict=True):
        same(got, want)
    assert run.breaks == []
    assert 2 <= run.captures <= 4
    assert all("decided at" in reason or "expected None" in reason for reason in run.recompiles)


def test_a_decision_after_the_first_update_reads_state_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(float("nan")))
    model = net()
    opt = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> bool:
        model(x).sum().backward()
        opt.step()
        return bool(model[0].weight.norm() < 100)

    compiled = ws.compile(step)
    assert compiled(torch.randn(6, 8)) and compiled.breaks == [] and compiled.captures == 1


def test_explain_says_what_a_step_decides_on() -> None:
    step, _, _ = skips()
    compiled, x = ws.compile(step), torch.randn(6, 8)
    (decision,) = compiled.explain(x).decisions
    assert "expected True (decided at" in decision and "test_decisions.py:" in decision
    assert "decisions: 1" in str(compiled.explain(x))
    compiled(x)
    assert any("decided(_local_scalar_dense" in line for line in compiled.code.splitlines())


def test_a_module_that_decides_is_differentiated_outside() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = net(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y) if y[0, 0] > y[1, 1] else y * 3

    eager = Gated()
    compiled = ws.compile(copy.deepcopy(eager))
    for seed in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) + seed % 3
        for module in (eager, compiled):
            torch.manual_seed(seed)
            module.zero_grad()
            module(x).square().sum().backward()
        for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
            same(q.grad, p.grad)
    assert compiled.breaks == [] and compiled.captures == 2


@pytest.mark.parametrize("count", [6, 12])
def test_outcomes_that_change_from_call_to_call_run_the_python(count: int) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            if torch.rand(()) >= 0.5:
                x = layer(x).relu()
        return x.detach()

    compiled = ws.compile(step)
    for _ in range(30):
        x, before = torch.randn(2, 8), torch.get_rng_state()
        want, after = step(x), torch.get_rng_state()
        torch.set_rng_state(before)
        same(compiled(x), want)
        assert torch.equal(torch.get_rng_state(), after)
    (reason,) = compiled.breaks
    assert "test_decisions.py:" in reason
    if count <= MOST:
        assert "decides otherwise from call to call" in reason and len(compiled.recompiles) < program_cache.BRANCHES
    else:  # at once
        assert compiled.recompiles == []


def test_only_programs_that_may_serve_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor) -> Tensor:
        if x.exp().sin().sum() + torch.zeros(1).expand(1 << 17).sum() > 0:
            return x * 2 if x[0] * x.norm() > 0 else x * 3
        return x * 5 if x[0] * x.norm() > 0 else x * 7

    compiled, runs = ws.compile(step), []
    inputs = [torch.tensor(v) for v in ([0.5, 0.1], [-0.5, 0.1], [1.5, 2.0], [0.5, 0.1])]
    for x in inputs:
        same(compiled(x), step(x))
    attempt = type(compiled._entries[0].early_exit).attempt
    monkeypatch.setattr(
        type(compiled._entries[0].early_exit), "attempt", lambda self, *args: runs.append(self) or attempt(self, *args)
    )
    for x in inputs:
        runs.clear()
        same(compiled(x), step(x))
        assert len(runs) <= 3


@torch.library.custom_op("wholestep_decisions::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    COUNT.append(1)
    return x * 2


counted.register_fake(torch.empty_like)
COUNT: list[int] = []


def test_an_operator_of_the_users_own_runs_once_a_call() -> None:
    compiled = ws.compile(lambda x: x + 1 if counted(x).exp().norm() > 5 else x - 1)
    COUNT.clear()
    for value in (1.0, -1.0, 1.0, 2.0):
        compiled(torch.full((3,), value))
    assert len(COUNT) == 4
    assert "would run twice" in compiled.breaks[0]


def test_a_container_that_each_call_makes_anew_is_followed() -> None:
    model = nn.Linear(4, 4)
    model.notes = defaultdict(dict)

    def step(x: Tensor) -> Tensor:
        y = model(x)
        model.notes = defaultdict(dict, last={"loss": y.detach().sum()}, rows=[x.shape[0]])
        return y.detach()

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(5):
        x = torch.randn(3, 4)
        same(compiled(x), step(x))
    slow = compiled._entries[0].binder.slow_calls
    for _ in range(5):
        compiled(torch.randn(3, 4))
    assert compiled._entries[0].binder.slow_calls == slow and model.notes.default_factory is dict


@pytest.mark.parametrize("make", [defaultdict, type("Own", (defaultdict,), {})])
def test_what_a_default_comes_from_is_guarded(make: Any) -> None:
    table = make(list)
    compiled = ws.compile(lambda x: x * 2 if isinstance(table[3], list) else x * 3, fullgraph=True)
    for factory, times in ((list, 2), (tuple, 3), (list, 2)):
        table.clear()
        table.default_factory = factory
        assert float(compiled(torch.ones(()))) == times and type(table[3]) is factory
    assert "default_factory" in compiled.recompiles[0]


def test_the_bound_of_a_deque_is_guarded() -> None:
    holder = nn.Module()
    holder.rows = deque([1], maxlen=2)
    compiled = ws.compile(lambda x: x * holder.rows.maxlen, fullgraph=True)
    for bound in (2, 4, 2):
        holder.rows = deque([1], maxlen=bound)
        assert float(compiled(torch.ones(()))) == bound


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes_and_outcomes_change(dynamic: bool | None) -> None:
    """One capture for many sizes serves one outcome; each further outcome is captured once for many."""
    torch.manual_seed(1)
    sizes = [6, 6, 5, 7, 9, 5, 8, 6, 7, 9, 4, 8, 5, 7, 6, 9]
    batches = [torch.randn(size, 8) for size in sizes]
    for index in (1, 4, 7, 8, 12):
        batches[index][0, 0] = float("nan")
    seen = []
    for compiles in (False, True):
        step, model, opt = skips()
        del model[1]
        run = ws.compile(step, dynamic=dynamic) if compiles else step
        torch.manual_seed(2)
        seen.append([copy.deepcopy([run(x), state(model, opt), torch.get_rng_state()]) for x in batches])
    for want, got in zip(*seen, strict=True):
        same(got, want)
    assert run.breaks == []
    assert dynamic is False or run.captures <= 6


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_guards_on_values_are_of_one_capture_for_many_sizes(dynamic: bool | None, fullgraph: bool) -> None:
    def step(x: Tensor, k: float) -> Tensor:
        y = x * k
        if k > 2:
            y = y + 1
        return y.relu() if x.sum() > 0 else y

    compiled = ws.compile(step, dynamic=dynamic, fullgraph=fullgraph)
    for rows, k, sign in ((4, 1.0, 1), (5, 1.5, 1), (6, 3.0, 1), (7, 3.5, -1), (8, 1.2, -1), (9, 2.5, 1), (5, 2.7, 1)):
        x = torch.randn(rows, 3).abs() * sign
        same(compiled(x, k), step(x, k))
    assert compiled.captures <= 5
