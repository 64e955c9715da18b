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


# In 5080 two weights of one shape are split along the axes the other way round, so that on half of the ranks their
# parts are alike; what updates one is no program for the other. In 20131 a layer norm that all ranks compute has a
# gradient that is split along the third dimension: its kernel takes a mean's slice for what lies in memory.
@pytest.mark.parametrize(("shape", "quick"), [((2,), [*range(10)]), ((2, 2), [*range(4), 5080, 20131])])
def test_random_steps_are_one_devices(shape, quick):
    every = [*range(FIRST, FIRST + 300)] if os.environ.get("WHOLESTEP_TEST_LONG") else quick
    for seeds in (every[n : n + 20] for n in range(0, len(every), 20)):
        for found in run_ranks(differences, math.prod(shape), "shm", (seeds, shape), timeout=600):
            wrong = {seed: (what, drawn(seed)) for seed, what in found.items() if what}
            assert not wrong
