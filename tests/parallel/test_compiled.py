"""Compiled steps with our wrappers in them: the bits of the same loop in eager, and the communication in the graph."""

from __future__ import annotations

import pytest

import tests.support.compiled_sharded as shards
import tests.support.compiled_wrappers as programs
import tests.support.stock_wrappers as stock
from wholestep.testing import run_ranks


@pytest.fixture(scope="module")
def both():
    """What each of two ranks found different from eager."""
    found = run_ranks(programs.everything, 2, "shm", timeout=400)
    return dict(zip(programs.ALL, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("case", programs.ALL, ids=" of ".join)
def test_what_is_left_is_what_the_wrapper_leaves_in_eager(case, both):
    assert both[case] == ("", "")


def test_an_evaluation_is_one_more_capture():
    assert run_ranks(programs.captures_with_evaluations, 2, "thread") == [(2, True)] * 2


@pytest.fixture(scope="module")
def sharded():
    """What each of two ranks found with modules under `fully_shard`."""
    return run_ranks(shards.everything, 2, "shm", timeout=400)


@pytest.mark.parametrize("name", shards.CASES)
def test_fully_shard_in_a_step_is_as_in_eager(name, sharded):
    why = shards.CASES[name].why
    for found in (rank[name] for rank in sharded):
        assert found["equal"] and found["recompiles"] == []
        if why:
            assert why in found["breaks"] and "to do: " in found["breaks"]
        else:
            assert found["breaks"] == "" and found["gathers"] > 0


def test_a_backward_gathers_again_what_was_let_go_of(sharded):
    for rank in sharded:
        assert rank["kept after the forward"]["gathers"] < rank["AdamW"]["gathers"]


def test_settings_of_fully_shard_are_guarded(sharded):
    for rank in sharded:
        assert rank["changed"] == [(1, 0), (2, 0), (2, 0), True]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """What each of two ranks found with torch's wrappers and ours."""
    return run_ranks(stock.everything, 2, "gloo", (str(tmp_path_factory.mktemp("stock") / "store"),), timeout=400)


@pytest.mark.parametrize(("name", "way"), stock.WAYS)
def test_our_compilers_and_any_wrapper_are_as_in_eager(name, way, mixtures):
    """torch's wrappers reduce in C++ and in hooks: their Python runs at each call. What ours do is in the graph."""
    runs_python = name.startswith("torch's") and way in ("module", "step")
    for found in mixtures:
        assert ("communicates where no graph can show it" in found[name, way]) is runs_python
        assert runs_python or found[name, way] == ""
