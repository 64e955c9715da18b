"""Compiled steps with our wrappers in them: the bits of the same loop in eager, and the communication in the graph."""

from __future__ import annotations

import pytest

import tests.support.compiled_wrappers as programs
from wholestep.testing import run_ranks


@pytest.fixture(scope="module")
def both():
    """What each of two ranks found different from eager."""
    found = run_ranks(programs.everything, 2, "shm", timeout=400)
    return dict(zip(programs.ALL, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("case", programs.ALL, ids=" of ".join)
def test_what_is_left_is_what_the_wrapper_leaves_in_eager(case, both):
    assert both[case] == ("", "")
