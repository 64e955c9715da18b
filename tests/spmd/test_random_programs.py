"""Random training steps under random plans of the global view give what they give on one device.

WHOLESTEP_TEST_LONG=1 runs many more programs.
"""

from __future__ import annotations

import math
import os

import pytest

from tests.support.spmd_random import differences, drawn
from wholestep.testing import run_ranks

FIRST = int(os.environ.get("WHOLESTEP_TEST_SEED", "0"))


@pytest.mark.parametrize(("shape", "quick"), [((2,), 10), ((2, 2), 5)])
def test_random_steps_are_one_devices(shape, quick):
    many = 300 if os.environ.get("WHOLESTEP_TEST_LONG") else quick
    for seeds in (range(FIRST + n, FIRST + min(n + 20, many)) for n in range(0, many, 20)):
        for found in run_ranks(differences, math.prod(shape), "shm", (list(seeds), shape), timeout=600):
            wrong = {seed: (what, drawn(seed)) for seed, what in found.items() if what}
            assert not wrong
