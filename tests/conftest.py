"""Settings of the whole suite.

WHOLESTEP_TEST_COMPILE=identity judges the worlds and the judge instead of the compiler: the tests of
refusals, which only a compiler can pass, are then left out.
WHOLESTEP_TEST_LONG=1 (`make soak`) lengthens the property tests; it also makes the smallest program of a failing one,
which the quick form leaves out, since that can take minutes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from wholestep import comm

REFUSALS = [f"capture/test_{name}.py" for name in ("bad_input", "changes_between_calls", "failures")]
collect_ignore_glob = REFUSALS if os.environ.get("WHOLESTEP_TEST_COMPILE") == "identity" else []

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}
QUICK = (Phase.explicit, Phase.generate)
settings.register_profile("quick", derandomize=True, max_examples=60, phases=QUICK, **COMMON)
settings.register_profile("long", max_examples=20_000, **COMMON)
settings.load_profile("long" if os.environ.get("WHOLESTEP_TEST_LONG") else "quick")

gc.set_threshold(10_000, 10, 20)  # most of the many objects are torch's own: the collector looks at them less often


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks() -> None:
    """Ranks are forked from a server that has imported what most of them need."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def no_group_left_behind() -> Iterator[None]:
    """A mesh makes the default group; the next test of this process meets none."""
    yield
    if comm.is_initialized():
        comm.destroy_process_group()


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> None:
    """Each test starts from the same random state, on one thread, so that sums have one order."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
