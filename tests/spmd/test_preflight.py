"""Ranks of the global view agree before each call, or all of them say why not."""

from __future__ import annotations

import pytest

import tests.support.spmd_agreement as programs
from wholestep.testing import run_ranks


@pytest.fixture(scope="module")
def both():
    """What each of two ranks found."""
    return run_ranks(programs.everything, 2, "shm")


def test_batches_of_two_shapes_are_an_error_on_both_ranks_at_each_call(both):
    for found in (rank["other_batches"] for rank in both):
        for name in ("first", "later", "again"):
            text = found[name]
            assert text.startswith("PlanError: the ranks' batches do not fit each other: rank 0 has batch L['x']: ")
            assert "float64 [6, 6]; rank 1 has batch L['x']: float64 [5, 6]" in text and "drop_last=True" in text, name
        assert [found[name] for name in ("good", "both short", "goes on")] == ["", "", ""]
        assert found["untouched"] is True and found["captures"] == 2


def test_a_rank_may_capture_alone_and_the_others_wait_for_it(both):
    for number, found in enumerate(rank["alone"] for rank in both):
        assert found["captures alone"] == "" and found["captures"] == 1 + number
        assert "nobody trains this" in found["cannot"] and found["untouched"] and found["goes on"] == ""
    assert "PlanError: rank 1 could not capture the step: ValueError" in both[0]["alone"]["cannot"]


def test_other_code_and_other_models_are_named(both):
    for found in (rank["other_models"] for rank in both):
        assert "rank 0 has aten.relu.default" in found["code"] and "rank 1 has aten.gelu.default" in found["code"]
        assert "spmd_agreement.py:" in found["code"] and "in m.1" in found["code"]
        assert "has parameter L['m'].0.weight: float32 [4, 6]; rank 1 has" in found["shape"]


def test_other_plans_optimizers_and_meshes_are_named(both):
    for found in (rank["other_plans"] for rank in both):
        assert "rank 0 has plans FullyShard(axis='dp'" in found["plan"] and "has plans DataParallel(" in found["plan"]
        assert "['step']; rank 1 has" in found["optimizer"] and "param_groups[0]['lr']" in found["optimizer"]
        assert "a mesh of ranks [0, 1]" in found["mesh"] and "rank 1 one of [1, 0]" in found["mesh"]


def test_all_ranks_draw_the_random_numbers_of_the_first(both):
    assert all(rank["randomness"] for rank in both)


def test_random_generators_that_part_are_noticed(both):
    for found in (rank["other_randomness"] for rank in both):
        assert (found["good"], found["seeded"]) == ("", "")
        for name in ("drawn", "captured anew"):
            assert "the ranks' random generators do not fit" in found[name] and "torch.Generator" in found[name]


def test_other_numbers_and_other_copies_of_one_batch_are_named(both):
    for found in (rank["other_values"] for rank in both):
        assert (found["rows"], found["numbers"]) == ("", ""), "each rank its own rows, all ranks the same numbers"
        assert "values of L['x'] with checksum" in found["whole"] and "batch=ws.Shard(0)" in found["whole"]
        assert "mul.Tensor(·, 1.0)" in found["number"] and "mul.Tensor(·, 2.0)" in found["number"]
        assert "3.0; rank 1 has values of L['scale']: 4.0" in found["other later"]
        words = "rank 0 has setting L['opt'].param_groups[0]['lr']: 0.3; rank 1 has setting "
        assert words in found["rates"] and words in found["rates of DDP"] and "values of number" in found["rates read"]
        assert "BUT" not in found["rates"] + found["rates of DDP"] + found["rates read"]


def test_what_one_rank_alone_replaces_is_named(both):
    for found in (rank["replaced"] for rank in both):
        alone = found.pop("free at first")
        assert "values of L['model'].free with checksum" in alone
        for way, (other, equal, on_both) in found.items():
            name = way.split()[1]
            assert f"rank 1 has values of L['model'].{name} with checksum" in other, way
            assert "the same new buffers" in other
            assert (equal, on_both) == ("", ""), way
    assert both[0]["replaced"].keys() == {"replayed scale", "replayed free", "read scale", "read free"}


def test_what_needs_a_whole_tensor_is_refused_and_changes_nothing(both):
    for found in (rank["refusals"] for rank in both):
        assert "decides on the values of L['x']" in found["decides"] and "batch=ws.Replicate()" in found["decides"]
        assert "asks for the memory of L['model'].fc1.weight" in found["resizes"]
        assert "writes to memory that L['x']" in found["writes"] and "L['x'] and L['y'] share" in found["counts"]
        assert "BUT" not in "".join(found.values())


def test_layouts_gradients_of_batches_and_other_steps_on_one_model(both):
    for found in (rank["layouts"] for rank in both):
        assert found["wrong"] == [] and found["model"] and found["another step"] and found["parts"] == 9
        assert "conv1.weight holds rows" in found["no plan"] and "needs the whole tensor" in found["no plan"]
        assert "of dimension 1 of [6, 3, 3, 3]" in found["another plan"]


def test_two_axes_cut_one_dimension_one_after_the_other():
    assert run_ranks(programs.nested, 4, "shm") == [True] * 4
