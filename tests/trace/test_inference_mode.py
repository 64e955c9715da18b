"""Inference mode inside of a step: functions arrive there whole, below autograd, with what they write."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws

MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "a cumulative average": lambda: nn.BatchNorm1d(3, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(3)),
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)),
    "a recurrent layer": lambda: nn.LSTM(8, 4),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.1),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_inference_mode_write_what_they_write_in_eager(name: str) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            out = model(x)
        return out[0] if isinstance(out, tuple) else out

    runs = []
    for run in (step, ws.compile(step, fullgraph=True)):
        torch.manual_seed(0)
        model = MODULES[name]()
        outs = [run(model, torch.randn(2, 3, 8)).tolist() for _ in range(3)]
        runs.append((outs, {key: value.tolist() for key, value in model.state_dict().items()}))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("make", [
    torch.inference_mode, torch.no_grad, torch.enable_grad,
    lambda: torch.profiler.record_function("part"), lambda: torch.autocast("cpu", torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_context_manager_that_is_kept_between_steps(make: Callable[[], Any], fullgraph: bool) -> None:
    def step(holder: Any, x: Tensor) -> Tensor:
        with holder.context:
            out = x @ x.T
        return out * 2

    holder, other, x = *(SimpleNamespace(context=make()) for _ in range(2)), torch.randn(3, 4, requires_grad=True)
    compiled = ws.compile(step, fullgraph=fullgraph)
    for _ in range(3):
        found, expected = compiled(holder, x), step(other, x)
        assert torch.equal(found, expected)
        assert (found.requires_grad, found.dtype) == (expected.requires_grad, expected.dtype)
    assert compiled.recompiles == []


def test_what_the_mode_reads_first_may_have_views() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            view = x[:, :1]
            return view.mul(2).add_(view), view

    with torch.inference_mode():
        of_the_mode = torch.ones(4, 3)
    for x in (torch.ones(4, 3), of_the_mode):
        expected, found = step(x), ws.compile(step, fullgraph=True)(x)
        assert all(map(torch.equal, found, expected))
        assert [t.is_inference() for t in found] == [t.is_inference() for t in expected]
