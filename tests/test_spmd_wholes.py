"""The global view, with the naive expansion: many ranks that hold parts are one device with the whole batch."""

from __future__ import annotations

import pytest
import spmd_wholes as programs

from wholestep.testing import run_ranks

# On threads without dropout: they share a random generator.
SOME = {"thread": ["mlp, state from before", "looks", "gpt"], "shm": list(programs.CASES)}


@pytest.mark.parametrize("transport", ["thread", "shm"])
def test_two_ranks_with_parts_are_one_device(transport):
    for rank, cases in enumerate(run_ranks(programs.run_cases, 2, transport, (SOME[transport],))):
        for name, found in cases.items():
            assert not found["wrong"], (transport, rank, name)
            mine, whole = found["bytes"]
            assert mine < 0.6 * whole, (transport, rank, name)
            assert len(found["recompiles"]) <= 1, "a momentum begins as a copy, a gradient as none"
        spans = {name: found["parts"][0] for name, found in cases.items()}
        assert spans["looks"].spans == ((5 * rank, 5 * rank + 5), (0, 6))
        assert spans["gpt"].spans == (((0, 10), (10, 19))[rank], (0, 16)), "the embedding, tied to the head"
        assert cases["mlp, state from before"]["captures"] == 1, "cutting takes no second capture"
