"""Wrapped modules in a step are answered with what to do; averages of weights are served under a sharded optimizer."""

from __future__ import annotations

import pytest

import tests.support.spmd_wrappers as programs
from wholestep.testing import run_ranks


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of two ranks found."""
    return run_ranks(programs.everything, 2, "gloo", (str(tmp_path_factory.mktemp("stock") / "store"),), timeout=300)


@pytest.mark.parametrize("name", programs.WRAPPED)
def test_wrappers_are_known_by_their_type_and_answered_with_a_plan(name, both):
    for rank in both:
        for text in (rank["wrapped"][name], rank["wrapped"][f"{name}, alone"]):
            assert text.startswith("UnsupportedError: ")
            assert ("ws.FullyShard" if "F" in name else "plan=ws.DataParallel(axis)") in text


@pytest.mark.parametrize("name", programs.COMPILED)
def test_torch_compile_inside_of_a_step_changes_nothing(name, both):
    assert [rank["compiled"][name] for rank in both] == [True, True]


@pytest.mark.parametrize("average", [one.__name__ for one in programs.AVERAGES])
def test_averages_under_a_sharded_optimizer_are_those_of_data_parallel(average, both):
    assert [rank["averages"][average] for rank in both] == [True, True]


@pytest.mark.parametrize("plan", ["DataParallel", "ShardedOptimizer", "FullyShard"])
def test_what_no_plan_reduces_is_refused_by_name(plan, both):
    for found in (rank["refused"] for rank in both):
        assert "compiled under a plan" in found[f"{plan}, backward"] and "backward()" in found[f"{plan}, backward"]
        if plan != "FullyShard":
            assert "reduces its gradients already" in found[f"{plan}, replayed wrapper"]
            assert "give the step the module as it was before" in found[f"{plan}, co-run wrapper"]
        text = found[f"{plan}, sparse"]
        assert text.startswith(f"PlanError: {plan}: the gradient of L['model'].weight is sparse")
        assert "spmd_wrappers.py:" in text and "sparse=False" in text
