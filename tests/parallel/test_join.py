"""Uneven inputs: what is trained is what torch trains."""

import pytest

import tests.support.parallel_ranks as programs
from wholestep.testing import run_ranks


@pytest.mark.parametrize(("size", "near"), [(2, 0), (4, 1e-12)])
def test_uneven_inputs_train_as_torchs(size, near, tmp_path):
    for each in run_ranks(programs.uneven_as_stock, size, args=(str(tmp_path / "store"),)):
        assert [*each] == [*programs.UNEVEN, "beside torch's optimizer"]
        assert max(max(differences) for differences in each.values()) <= near, each


def test_join_and_its_errors():
    one, two = run_ranks(programs.joins, 2)
    assert one["counted"] == two["counted"] == [2, 2, 1, 2] and (one["last"], two["last"]) == (False, True)
    assert one["options"] == {"divide_by_initial_world_size": False, "more": 3}
    assert "Rank 0 exhausted all inputs." in one["early"]
    assert "Detected at least one rank that exhausted inputs." in two["early"]
    for each in (one, two):
        assert "multiple process groups" in each["groups"] and "at least one joinable" in each["none"]
        assert "rank 0 calls" in each["without"] and "barrier" in each["without"] and "all_reduce" in each["without"]
    assert "put the loop into `with model.join():`" in two["without"]
