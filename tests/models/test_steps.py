"""Every form that a training step takes: compiled as eager, bit for bit."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from tests.support.equal import assert_same_run
from tests.zoo.arguments import ARGUMENTS
from tests.zoo.bookkeeping import BOOKKEEPING, arrays_of_numpy
from tests.zoo.gradients import GRADIENTS
from tests.zoo.hooks import HOOKS
from tests.zoo.numbers import NUMBERS
from tests.zoo.steps import STEPS


@pytest.mark.parametrize("name", STEPS)
def test_step(name: str) -> None:
    assert_same_run(STEPS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str) -> None:
    assert_same_run(HOOKS[name])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_and_results(name: str) -> None:
    assert_same_run(ARGUMENTS[name])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    assert_same_run(GRADIENTS[name])


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    assert_same_run(NUMBERS[name])


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_as_others_write_them(name: str) -> None:
    assert_same_run(BOOKKEEPING[name])


def test_arrays_of_numpy_are_read_at_each_call() -> None:
    run = assert_same_run(arrays_of_numpy, compile=ws.compile)
    assert "L['x'], a NumPy array" in run.step.breaks[0]  # type: ignore[attr-defined]


def test_numbers_that_vary_are_inputs() -> None:
    """Different at each of 40 calls, which is more than there may be captures: one reason, then none."""
    model = torch.nn.Linear(2, 2)

    @ws.compile(fullgraph=True)
    def step(x: torch.Tensor, scale: float) -> torch.Tensor:
        return model(x).sum() * scale

    for i in range(40):
        x = torch.randn(3, 2)
        assert torch.equal(step(x, i / 7), model(x).sum() * (i / 7))
    assert step.recompiles == ["L['scale']: expected 0.0, found 0.14285714285714285"]
