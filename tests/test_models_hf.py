"""Models from `transformers`: compiled as eager over five steps, bit for bit."""

from __future__ import annotations

import pytest
from equal import assert_same_run
from zoo.hf import FIRST, HELD_OUT, training


@pytest.mark.parametrize("name", FIRST)
def test_model(name: str) -> None:
    assert_same_run(training(*FIRST[name]))


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_model(name: str) -> None:
    assert_same_run(training(*HELD_OUT[name]))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_whole_model_output_returned(name: str) -> None:
    assert_same_run(training(*FIRST[name], outputs=True), steps=3)
