"""Modules that random calls make within `deferred()` are those that the calls make otherwise.

WHOLESTEP_TEST_LONG=1 makes many more, from WHOLESTEP_TEST_SEED on.
"""

from __future__ import annotations

import os

import pytest

from tests.support.random_inits import differences, drawn
from wholestep.deferred_init import deferred_tensors

FIRST = int(os.environ.get("WHOLESTEP_TEST_SEED", "0"))
COUNT = 3000 if os.environ.get("WHOLESTEP_TEST_LONG") else 70


@pytest.mark.filterwarnings("ignore::UserWarning")  # of deprecated uses, as in eager
def test_random_modules_are_made_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_tensors, "LIMIT", 64)
    for seed in range(FIRST, FIRST + COUNT):
        assert [*differences(drawn(seed))] == [], (seed, drawn(seed))
