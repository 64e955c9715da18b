"""Steps whose Python runs at each call, under plans and on several ranks."""

import re

import pytest
import torch

import tests.support.co_run_ranks as programs
import wholestep as ws
from wholestep import comm
from wholestep.errors import CaptureError
from wholestep.testing import run_ranks


@pytest.mark.parametrize("plan", programs.PLANS)
def test_steps_that_read_are_as_in_one_process(plan):
    for each in run_ranks(programs.steps_as_in_one_process, 2, args=(plan,), timeout=400):
        replayed = {"evaluates"} if plan in programs.LOCAL else {"evaluates", *programs.DECIDING}
        assert each == {name: ("", name not in replayed) for name in programs.STEPS[plan]}


def test_steps_that_read_are_ddps_bit_for_bit(tmp_path):
    for each in run_ranks(programs.as_stock_ddp, 2, "gloo", (str(tmp_path / "store"),)):
        assert len(each) == 5 and all(each.values()), each


def test_steps_that_read_are_naive_replicas():
    for each in run_ranks(programs.as_naive_replicas, 2):
        assert len(each) == 3 and max(each.values()) < 1e-9, each


def test_what_one_rank_cannot_replay_runs_on_all():
    one, two = run_ranks(programs.breaks_on_one_rank, 2)
    assert (one[0], two[0]) == ("a step\n" * 3, "")
    assert one[1] == two[1] and len(one[1]) == 3
    assert "on rank 0" in two[2] and re.search(r"co_run_ranks\.py:\d+", two[2])
    assert torch.equal(one[3], two[3])


def test_a_number_of_one_rank_alone_is_its_own():
    one, two = run_ranks(programs.scaled_on_one_rank, 2)
    assert one[0] == one[1] and two[0] == two[1]
    assert one[0][4:] == two[0][4:] and one[0][:2] == two[0][:2] and one[0][2] != two[0][2]


def test_ranks_that_decide_otherwise_are_named_on_all():
    one, two = run_ranks(programs.decides_otherwise, 2)
    assert one == two
    assert "rank 0" in one and "rank 1" in one and "to do:" in one


def test_inside_of_a_step_all_is_whole_and_parts_remain_after_it():
    for seen, *shapes in run_ranks(programs.stays_in_parts, 2):
        assert seen[::2] == [([4, 8], [6, 8], (4, 6))] * 2
        assert seen[1] == seen[3] == 4 * 8 * 6
        assert shapes == [[4, 6], [3, 8], [3, 8], [3, 8]]


def test_plans_along_two_axes():
    for each in run_ranks(programs.on_two_axes, 4, timeout=300):
        assert len(each) == 8 and max(each.values()) < 1e-12, each


def test_breaks_by_name():
    one, two = run_ranks(programs.breaks_by_name, 2)
    assert one == two and len(one) == 2 and one[0] == pytest.approx(one[1], abs=1e-5)


def test_ranks_of_one_process_run_backward_at_the_same_time():
    losses = run_ranks(programs.reads_in_step, 2, "thread")
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_whole_graphs_are_asked_for_by_name():
    mesh = ws.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    compiled = ws.compile(programs.logging_step, mesh=mesh, plan=ws.DataParallel("dp"), fullgraph=True)
    model = programs.Net()
    with pytest.raises(CaptureError, match="co_run_ranks"):
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6), [])
    comm.destroy_process_group()


@pytest.mark.parametrize("where", ["forward hook", "after the forward", "optimizer's hook"])
def test_all_ranks_hear_of_an_error_and_go_on(where):
    (one, first), (two, second) = run_ranks(programs.goes_on_after_an_error, 2, args=(where,))
    assert one == ["float", "float", "PlanError", "float", "float", "float"]
    assert two == ["float", "float", "KeyError", "float", "float", "float"]
    assert first == second
