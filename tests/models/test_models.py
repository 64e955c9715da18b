"""Training of small models of many kinds: compiled as eager, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.equal import assert_same_run
from tests.zoo.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    assert_same_run(MODELS[name])
