"""Inference mode inside of a step: functions arrive there whole, below autograd, with what they write."""

from __future__ import annotations

from collections.abc import Callable

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
