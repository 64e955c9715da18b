"""Random training steps under plans of the local view give what naive replicas give, with gradients averaged by hand.

WHOLESTEP_TEST_LONG=1 runs many more programs.
"""

from __future__ import annotations

import os

from tests.support.spmd_replicas import differences, drawn
from wholestep.testing import run_ranks

FIRST = int(os.environ.get("WHOLESTEP_TEST_SEED", "0"))


# In 121 and 3168 the update of a parameter of one number is not deferred, and in the latter begins a segment; in 123 a
# segment ends in a backward within another.
def test_random_steps_are_naive_replicas():
    every = [*range(FIRST, FIRST + 300)] if os.environ.get("WHOLESTEP_TEST_LONG") else [*range(3), 121, 123, 3168]
    for seeds in (every[n : n + 20] for n in range(0, len(every), 20)):
        for found in run_ranks(differences, 2, "shm", (seeds,), timeout=600):
            wrong = {seed: (what, drawn(seed)) for seed, what in found.items() if what}
            assert not wrong
