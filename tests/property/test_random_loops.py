"""Random training loops: a step that is compiled, whole or in part, leaves after each call what eager leaves.

WHOLESTEP_TEST_LONG=1 runs many more loops, from WHOLESTEP_TEST_SEED on.
"""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.support.equal import assert_same_run
from tests.support.random_loops import compiled, drawn, world
from wholestep.aot_autograd import step_memory

FIRST = int(os.environ.get("WHOLESTEP_TEST_SEED", "0"))
# From 32 on, each has found something: parameters that are keys, state that begins with a rate, gradients that are
# penalised under a memory budget, casts that a region keeps.
QUICK = [3, 9, 10, 11, 12, 13, 32, 53, 54, 922]
SEEDS = range(FIRST, FIRST + 600) if os.environ.get("WHOLESTEP_TEST_LONG") else QUICK


@pytest.mark.filterwarnings("ignore::UserWarning")  # of schedules that go before the optimizer
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_loop_is_as_in_eager(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.co_run.step.TIMED", 10**9)  # else what runs follows from what takes longer
    monkeypatch.setattr("wholestep.co_run.step.MANY", 10**9)
    monkeypatch.setattr(step_memory, "ROUNDS", 2)
    loop = drawn(seed)
    try:
        assert_same_run(partial(world, loop), loop.calls, partial(compiled, loop.form))
    except Exception as error:
        error.add_note(str(loop))
        raise
