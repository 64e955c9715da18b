"""`dynamic=None`: sizes that differ between captures become symbols, with eager's results bit for bit at each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.sized_models import convnet, gpt, mlp, own_loss, pictures, rows, same, tokens, train
from wholestep.autograd import aot_function
from wholestep.errors import CaptureError
from wholestep.ir import StepGraph
from wholestep.runtime.program_cache import MAX_SIZES
from wholestep.testing import CompileCounter, run_ranks

F = nn.functional
Batch = tuple[Tensor, Tensor]


class Cells(nn.Module):
    """A recurrent network written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 8)
        for row in x:
            state = self.cell(row, state)
        return self.out(state)


class Recurrent(nn.Module):
    """torch's own recurrent network, which asks in C++ for sizes as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def time_first(batch: int, time: int) -> Batch:
    return torch.randn(time, batch, 4), torch.randn(batch, 8)


def sequences(batch: int, time: int) -> Batch:
    return torch.randn(batch, time, 4), torch.randn(batch, 8)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


# name -> model, batch of given sizes, loss
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (mlp, rows, mse),
    "convnet": (convnet, pictures, mse),
    "gpt": (gpt, tokens, own_loss),
    "cells": (Cells, time_first, mse),
    "lstm": (Recurrent, sequences, mse),
}
SIZES = [(6, 5), (6, 5), (4, 5), (5, 5), (6, 5), (6, 7), (3, 7), (2, 4), (9, 8), (1, 5), (4, 5)]


@pytest.mark.parametrize("name", MODELS)
def test_training_with_sizes_that_vary(name: str) -> None:
    make, batch, loss_of = MODELS[name]
    torch.manual_seed(0)
    models = [make()]
    models.append(copy.deepcopy(models[0]))
    batches = [batch(*size) for size in SIZES]
    _, expected = train(models[0], batches, loss_of, None)
    step, found = train(models[1], batches, loss_of, {})
    assert same(expected, found)
    assert "shape: expected" in step.recompiles[0]
    if name in ("mlp", "convnet"):  # one static, one with a symbol, one for the single row
        assert len(step.recompiles) == 2 and step.recompiles[1].endswith("expected 2 or more, found 1")
    if name == "lstm":
        tried = [line.partition(" ended in UnsupportedError")[0] for line in step.specialized]
        assert tried == ["L['x'].shape[0], L['y'].shape[0] as symbols", "L['x'].shape[1] as a symbol"]


def test_the_last_smaller_batch_of_each_epoch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(70, 8), torch.randn(70, 8)
    batches = [*zip(x.split(16), y.split(16), strict=True)] * 3
    models = [mlp()]
    models.append(copy.deepcopy(models[0]))
    _, expected = train(models[0], batches, mse, None)
    step, found = train(models[1], batches, mse, {})
    assert same(expected, found) and step.captures == 2 and len(step.recompiles) == 1


def test_only_sizes_that_differ_become_symbols() -> None:
    def fn(x: Tensor) -> Tensor:
        return sum((x[:, i] for i in range(x.shape[1])), torch.zeros(x.shape[0]))

    compiled = ws.compile(fn, fullgraph=True)
    for size in (4, 6, 8, 5):
        x = torch.randn(size, 3)
        assert torch.equal(compiled(x), fn(x))
    assert len(compiled.recompiles) == 1 and compiled.specialized == []
    for shape in ((5, 4), (9, 4), (9, 2)):  # a loop over the columns: each number of them is a capture
        x = torch.randn(*shape)
        assert torch.equal(compiled(x), fn(x))
    assert compiled.specialized[0].startswith("L['x'].shape[1] is 4 (decided at") and len(compiled.recompiles) == 3


def test_false_never_and_true_at_once() -> None:
    counts = {}
    for dynamic in (False, None, True):
        counter = CompileCounter()
        step = ws.compile(lambda x: x.sin() + x.shape[0], backend=counter, dynamic=dynamic, fullgraph=True)
        for size in (4, 5, 6, 4):
            x = torch.randn(size, 2)
            assert torch.equal(step(x), x.sin() + size)
        counts[dynamic] = len(step.recompiles)
        assert counter.frame_count == 3  # a program for each size
    assert counts == {False: 2, None: 1, True: 0}


def test_no_symbols_where_capture_refuses_them_and_the_reason_is_told() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * {x.shape: 2.0}[x.shape]

    compiled = ws.compile(fn, fullgraph=True)
    for size in (4, 6, 4, 7):
        x = torch.randn(size, 2)
        assert torch.equal(compiled(x), x * 2)
    assert "shape: expected [4, 2], found [6, 2]; L['x'].shape[0] as a symbol ended in" in compiled.recompiles[0]
    assert compiled.recompiles[1] == "L['x'] shape: expected [4, 2], found [7, 2]"
    assert len(compiled.recompiles) == 2 and compiled.captures == 3


def test_the_steps_own_error_is_the_users_and_loses_nothing() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    compiled = ws.compile(fn, fullgraph=True)
    x, y = torch.randn(4, 3), torch.randn(3, 2)
    assert torch.equal(compiled(x, y), x @ y)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        compiled(torch.randn(4, 5), y)
    for size in (5, 6):
        assert torch.equal(compiled(z := torch.randn(size, 3), y), z @ y)
    assert torch.equal(compiled(x, y), x @ y)


def test_sizes_of_zero_and_one() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(0) + x.shape[0], torch.cat([x, x])

    compiled = ws.compile(fn, fullgraph=True)
    for size in (3, 0, 1, 5, 0, 1, 7, 2):
        x = torch.randn(size, 2)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), fn(x), strict=True))
    assert len(compiled.recompiles) == 3  # none, one, and all others


def conjugated(size: int) -> Tensor:
    """Made of a tensor whose conjugation is still to be done: a step with such has a program for each size."""
    return torch.ones(size, dtype=torch.complex64).conj() * 2


def accumulating(x: Tensor, y: Tensor, model: nn.Module, opt: Any, last: bool) -> tuple[Tensor, Tensor]:
    loss = mse(model, x, y)
    loss.backward()
    if last:
        opt.step()
        opt.zero_grad()
    return loss.detach(), conjugated(x.shape[0])


def test_gradients_that_accumulate_over_batches_of_many_sizes() -> None:
    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        call: Any = ws.compile(accumulating, fullgraph=True) if compiled else accumulating
        sizes = (4, 4, 3, 5, 6, 2, 4, 7, 3)
        losses = [t for i, n in enumerate(sizes) for t in call(*rows(n), model, opt, i % 3 == 2)]
        return [*losses, *model.state_dict().values()]

    assert same(run(False), run(True))


def test_a_module_trained_and_evaluated_at_other_sizes() -> None:
    def run(compiled: bool) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = convnet()
        call: Any = ws.compile(model, fullgraph=True) if compiled else model
        opt, found = torch.optim.Adam(model.parameters()), []
        for epoch in range(2):
            call.train()
            for n in (6, 6, 4):
                x, y = pictures(n)
                loss = F.mse_loss(call(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                found.append(loss.detach())
            call.eval()
            with torch.no_grad():
                found += [call(pictures(n)[0]) for n in (8, 5 + epoch)]
        return call, [*found, *model.state_dict().values()]

    call, found = run(True)
    assert same(run(False)[1], found)
    assert len(call.recompiles) <= 4


def test_ever_new_sizes_leave_a_bounded_number_of_programs() -> None:
    compiled = ws.compile(of_one_size, fullgraph=True)
    for size in range(2, 80):
        assert same(compiled(x := torch.randn(size)), of_one_size(x))
    assert compiled.captures == MAX_SIZES and len(compiled.recompiles) == 1


def test_ever_new_sizes_that_cannot_be_symbols_are_refused() -> None:
    compiled = ws.compile(lambda x: x * len({x.shape}), fullgraph=True)
    with pytest.raises(CaptureError, match="captured 32 times in .* calls; .*shape: expected") as error:
        for size in range(2, 80):
            compiled(torch.ones(size))
    assert "pad to a few sizes" in str(error.value) and "dynamic" not in str(error.value)


def test_ahead_of_time_autograd() -> None:
    torch.manual_seed(0)
    compiled = aot_function(fn := lambda x, y: (x * y).tanh().sum(0), "aten")
    for size in (4, 6, 3, 8):
        found = []
        for run in (fn, compiled):
            torch.manual_seed(size)
            x, y = (torch.randn(size, 3, requires_grad=True) for _ in range(2))
            found.append([r := run(x, y), *torch.autograd.grad(r.sum(), [x, y])])
        assert same(*found)
    assert len(compiled.recompiles) == 1  # type: ignore[attr-defined]


def of_one_size(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, conjugated(x.shape[0])


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_come_once_run_in_eager_and_get_a_program_when_they_come_again(make: Any, dynamic: Any) -> None:
    batch = rows if make is mlp else pictures
    sizes = (8, 8, 4, 5, 4, 6, 8, 7, 5, 9, 5, 9, 6, 3)  # 5, 6 and 9 come again, 7 and 3 do not

    def run(compiled: bool) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = make()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step: Any = ws.compile(accumulating, dynamic=dynamic) if compiled else accumulating
        losses = [t for i, n in enumerate(sizes) for t in step(*batch(n), model, opt, i % 2 == 1)]
        return step, [*losses, *model.state_dict().values(), torch.randn(2)]

    step, found = run(True)
    assert same(run(False)[1], found)
    assert step.breaks == [] and step.eager_calls >= 5
    assert f"in eager: {step.eager_calls} calls" in str(step.explain(*batch(8), make(), None, False))


def test_ever_new_sizes_cost_no_program_each() -> None:
    compiled = ws.compile(of_one_size)
    for size in range(2, 90):
        assert same(compiled(x := torch.randn(size)), of_one_size(x))
    assert compiled.captures == 2 and compiled.eager_calls == 86


def test_eager_takes_the_place_of_nothing_that_the_user_asked_for() -> None:
    def unchanged(step: StepGraph) -> StepGraph:
        return step

    for asked in ({"fullgraph": True}, {"passes": [unchanged]}, {"backend": CompileCounter()}, {"dynamic": False}):
        compiled = ws.compile(of_one_size, **asked)
        for size in (2, 3, 4, 5):
            compiled(torch.randn(size))
        assert compiled.eager_calls == 0 and compiled.captures == 4, asked


def test_what_a_step_logs_is_logged_in_eager_too() -> None:
    seen: list[tuple[int, float]] = []

    def fn(x: Tensor) -> Tensor:
        ws.log(lambda **values: seen.append((len(seen), values["total"])), total=x.sum())
        seen_before = len(seen)
        return x + seen_before * 0

    compiled = ws.compile(fn)
    for size in (2, 3, 4, 5):
        compiled(torch.ones(size))
    assert [total for _, total in seen] == [2, 3, 4, 5]


def test_a_program_for_a_size_that_comes_often_takes_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.runtime.program_cache.MAX_SIZES", 3)
    monkeypatch.setattr("wholestep.runtime.program_cache.OFTEN", 4)
    compiled = ws.compile(of_one_size)
    for size in (2, 3, 4, 4, *[5] * 6, 4):
        assert same(compiled(x := torch.randn(size)), of_one_size(x))
    assert compiled.captures == 3 and compiled.eager_calls == 1 + 3


def on_two_ranks() -> tuple[list[str], int, bool]:
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    other = copy.deepcopy(model)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    compiled, right = ws.compile(step, mesh=mesh, plan=ws.DataParallel("dp")), True
    for size in (4, 6, 8, 6):
        torch.manual_seed(size)  # the same rows on each rank, so that the mean of gradients is one rank's
        x = torch.randn(size, 8)
        right &= torch.equal(compiled(model, x), step(other, x))
        right &= torch.allclose(model.weight.grad, other.weight.grad)  # type: ignore[arg-type]
        model.zero_grad()
        other.zero_grad()
    return compiled.recompiles, compiled.eager_calls, right


def test_under_a_plan_each_set_of_shapes_is_a_capture() -> None:
    for recompiles, eager_calls, right in run_ranks(on_two_ranks, 2, "shm"):
        assert right and eager_calls == 0
        assert [reason.partition(":")[0] for reason in recompiles] == ["L['x'] shape"] * 2


def test_comparisons_of_sizes_that_a_step_returns_are_bools() -> None:
    served = ws.compile(lambda x: (x + 1, x.shape[0] > 4), fullgraph=True)
    for size in (4, 5, 6, 3, 9):
        result = served(torch.ones(size))[1]
        assert type(result) is bool and result == (size > 4)
