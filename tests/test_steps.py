"""Every form that a training step takes: compiled as eager, bit for bit."""

from __future__ import annotations

import pytest
from equal import assert_same_run
from zoo.arguments import ARGUMENTS
from zoo.gradients import GRADIENTS
from zoo.hooks import HOOKS
from zoo.steps import STEPS


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
