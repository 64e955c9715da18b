"""The global view: many ranks that hold parts are one device with the whole batch."""

from __future__ import annotations

import pytest
import spmd_wholes as programs

from wholestep.testing import run_ranks

FEW = ["mlp, state from before", "looks", "gpt"]
WAYS = {  # threads share a random generator: no dropout
    "naively, threads": ("thread", FEW, False),
    "naively": ("shm", [*FEW, "gpt with dropout", "mlp by columns", "kept"], False),
    "expanded": ("shm", list(programs.CASES), True),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_with_parts_are_one_device(way):
    transport, names, expanded = WAYS[way]
    for rank, cases in enumerate(run_ranks(programs.run_cases, 2, transport, (names, expanded))):
        for name, found in cases.items():
            assert not found["wrong"], (rank, name)
            mine, whole = found["bytes"]
            assert mine < 0.6 * whole or name == "uneven", (rank, name)
            assert len(found["recompiles"]) <= 1, "a momentum begins as a copy, a gradient as none"
        first = {name: found["parts"][0] for name, found in cases.items()}
        assert first["looks"].spans == ((5 * rank, 5 * rank + 5), (0, 6))
        assert first["gpt"].spans == (((0, 10), (10, 19))[rank], (0, 16)), "the embedding, tied to the head"
        assert cases["mlp, state from before"]["captures"] == 1, "cutting takes no second capture"
