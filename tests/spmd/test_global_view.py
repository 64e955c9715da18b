"""The global view: many ranks that hold parts are one device with the whole batch."""

from __future__ import annotations

import pytest

import tests.support.spmd_unsharded as programs
from wholestep.testing import run_ranks

FEW = ["mlp, state from before", "looks", "mlp by columns"]
WAYS = {  # threads share a random generator: no dropout; the other cases are `test_spmd_fully_shard`'s
    "naively, threads": ("thread", [*FEW, "gpt", "kept"], False),
    "naively": ("shm", ["looks", "gpt with dropout"], False),
    "expanded": ("shm", [*FEW, "with history", "uneven", "gpt"], True),
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
        (gpt,) = (part for name, part in first.items() if name.startswith("gpt"))
        assert gpt.spans == (((0, 10), (10, 19))[rank], (0, 16)), "the embedding, tied to the head"
        if "mlp, state from before" in cases:
            assert cases["mlp, state from before"]["captures"] == 1, "cutting takes no second capture"
