"""Models from `transformers`: compiled as eager over five steps, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.equal import assert_same_or_refused, assert_same_run
from tests.zoo.hf import FIRST, HELD_OUT, READS_DATA, training


@pytest.mark.parametrize("name", FIRST)
def test_model(name: str) -> None:
    """Some return the whole output of the model, not its loss alone."""
    assert_same_run(training(*FIRST[name], outputs=name in ("bert", "gpt2")))


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_model(name: str) -> None:
    assert_same_run(training(*HELD_OUT[name]))


@pytest.mark.parametrize("name", READS_DATA)
def test_models_that_ask_for_data(name: str) -> None:
    """They look at values while they run (labels in range, a mask without padding): as eager, or refused."""
    assert_same_or_refused(training(*READS_DATA[name]))
