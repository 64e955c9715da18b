"""In the local view, too, all ranks make a call together or hear why not, and begin with one state."""

from __future__ import annotations

import pytest
import torch

import tests.support.spmd_calls as programs
from wholestep import comm
from wholestep.testing import run_ranks


@pytest.fixture(scope="module")
def both():
    """What each of two ranks found."""
    return run_ranks(programs.everything, 2, "shm", timeout=300)


@pytest.mark.parametrize(("name", "at"), [("error", 2), ("error by default", 2), ("first error", 0)])
def test_what_one_rank_raises_and_catches_is_heard_by_all(name, at, both):
    (one, steps, weights), (two, other_steps, other_weights) = (rank[name] for rank in both)
    assert one[at].startswith("PlanError: rank 1 could not capture the step: ValueError: nobody trains this")
    assert f"call {at + 1} of train" in one[at] and two[at] == "ValueError: nobody trains this"
    assert one[:at] + one[at + 1 :] == two[:at] + two[at + 1 :] == [""] * 4
    assert steps == other_steps == 4 and all(map(torch.equal, weights, other_weights))


def test_a_rank_that_was_interrupted_is_a_call_behind_and_all_say_so(both):
    (one, steps, weights), (two, other_steps, other_weights) = (rank["interrupt"] for rank in both)
    assert two[2] == "KeyboardInterrupt" and one[2] == two[3] and two[4:] == one[3:] == ["", ""]
    assert "the ranks' calls do not fit each other: " in one[2]
    assert "rank 0 has call 3 of train; rank 1 has call 4 of train" in one[2]
    assert steps == other_steps == 4 and all(map(torch.equal, weights, other_weights))


def test_a_rank_that_calls_wrongly_is_heard_of_and_the_next_call_goes_on(both):
    one, two = (rank["wrong call"] for rank in both)
    assert "missing" in two[1] and two[1] in one[1].replace("PlanError: rank 1 could not capture the step: ", "")
    assert one[0] == one[2] == two[0] == two[2] == ""


def test_other_steps_at_one_time_are_named(both):
    for said in (rank["another step"] for rank in both):
        assert said[0] == said[1] == said[4] == ""
        assert "rank 0 has call 2 of train; rank 1 has call 2 of another_step.<locals>.<lambda>" in said[2]
        assert "rank 0 has call 3 of train; rank 1 has call 2 of train" in said[3]


def test_what_needs_no_other_rank_is_done_alone(both):
    (one, weights), (two, other_weights) = (rank["alone"] for rank in both)
    assert set(one) == set(two) == {""} and len(two) > len(one)
    assert all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("plan", ["DataParallel", "ShardedOptimizer", "FullyShard"])
def test_all_ranks_begin_with_the_weights_and_the_optimizer_state_of_the_first(plan, both):
    assert all(all(rank[plan]) for rank in both)


def test_what_an_optimizer_trains_is_a_parameter_of_whatever_class(both):
    one, two = (rank["bare tensors"] for rank in both)
    assert one == two and all([1.0, 1.0] not in (scale, shift) for scale, _, shift, _ in one)


@pytest.mark.parametrize("view", ["local settings", "global settings"])
def test_optimizers_that_are_set_otherwise_are_named_and_nothing_has_changed(view, both):
    for found in (rank[view] for rank in both):
        assert "param_groups[0]['lr']: 0.1; rank 1 has" in found["lr"] and "1.1" in found["lr"]
        assert "L['opt'].param_groups[0]['betas'][1]: 0.99; rank 1 has" in found["beta"]
        assert "param_groups[0]['lr'] with checksum" in found.get("tensor", "param_groups[0]['lr'] with checksum")
        for text in found.values():
            assert text.startswith("PlanError: the ranks' ") and "do not fit each other" in text and "BUT" not in text


def last_words(folder, program):
    """What each rank said; the end of its process finds the group of no use."""
    with pytest.raises(comm.DistError):
        run_ranks(programs.last_words, 2, "shm", (str(folder), program))
    return [(folder / f"{program} {rank}").read_text() for rank in (0, 1)]


def test_a_program_that_fails_on_one_rank_fails_on_all(tmp_path):
    one, two = last_words(tmp_path, "in_the_kernel")
    assert two.startswith("IndexError") and "rank 1" in one and "call 2 of look_up failed with IndexError" in one


def test_a_rank_that_leaves_is_named(tmp_path):
    one, two = last_words(tmp_path, "leaves")
    assert two == "" and "rank 1" in one
