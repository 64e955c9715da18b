"""Mixtures of plans on meshes of two and three axes are one device with the whole batch."""

from __future__ import annotations

import os

import pytest
import spmd_meshes as programs

from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
CASES = [("mlp", "thread", name) for name in programs.mixtures("mlp")]
CASES += [("gpt", "shm", name) for name in programs.mixtures("gpt") if LONG]


@pytest.mark.parametrize(("name", "transport", "mixture"), CASES)
def test_a_mixture_is_one_device(name, transport, mixture):
    world = programs.ranks_of(name, mixture)
    ranks = run_ranks(programs.against_one_device, world, transport, (name, mixture), timeout=300)
    local = mixture in ("sharded and replicated", "split, state sharded", "three axes")  # a rank's loss is its own
    for rank, steps in enumerate(ranks):
        for loss, expected, difference in steps:
            assert local or loss == pytest.approx(expected, rel=1e-10), (rank, mixture)
            assert difference < 1e-10, (rank, mixture)
