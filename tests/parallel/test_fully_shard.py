"""`fully_shard` trains as whole models with all-reduced gradients do, to 1e-10, and as torch's FSDP2."""

import pytest
import torch

import tests.support.fully_shard_ranks as programs
from tests.support.fully_shard_transformers import transformers_models
from wholestep.testing import run_ranks


@pytest.mark.parametrize(
    ("transport", "size", "overlaps"), [("thread", 2, True), ("shm", 2, False), ("shm", 2, True), ("thread", 4, False)]
)
def test_trains_as_the_naive_form(transport, size, overlaps):
    for each in run_ranks(programs.cases, size, transport, (overlaps,)):
        assert {name: worst for name, worst in each.items() if not worst < 1e-10} == {}


def test_four_processes():
    for each in run_ranks(programs.cases, 4, "shm", (None, ("resharded", "frozen", "checkpoint within"))):
        assert max(each.values()) < 1e-10


def test_models_of_transformers_train_as_the_naive_form():
    for each in run_ranks(transformers_models, 2, "thread"):
        assert len(each) == 3 and max(each.values()) < 1e-10


def test_trains_as_torchs(tmp_path):
    for each in run_ranks(programs.beside_stock, 2, args=(str(tmp_path / "store"),)):
        assert max(each[name] for name in ("float32", "divided", "copies")) < 1e-5 and each["bfloat16"] < 0.02


def test_whole_parameters_saved_and_loaded(tmp_path):
    found = run_ranks(programs.access, 2, args=(str(tmp_path / "saved"),))
    final = found[0].pop("final")
    assert found[1].pop("final") == final
    assert found == [dict.fromkeys(found[0], True)] * 2
    for each in run_ranks(programs.resumed, 4, "thread", (str(tmp_path / "saved"),)):  # as many rows, in four parts
        assert each.keys() == final.keys()
        assert all(torch.allclose(torch.tensor(each[n]), torch.tensor(final[n]), atol=1e-10) for n in final)


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call")
def test_compiled_steps_have_the_losses_of_eager():
    for eager, compiled in run_ranks(programs.compiled, 2):
        assert eager == compiled


def test_details():
    for each in run_ranks(programs.details, 2):
        assert each == dict.fromkeys(each, True)


def test_mistakes_are_errors_with_names_on_all_ranks():
    both = run_ranks(programs.mistakes, 2)
    assert "this rank reduces gradients of a.weight, a.bias, b.weight, b.bias; others do not" in both[0]["fewer"]
    assert "this rank reduces gradients of a.weight, a.bias; others do not" in both[1]["fewer"]
    for each, rows in zip(both, ("0 to 2", "2 to 4"), strict=True):
        for name in ("a.weight", "a.state.0.exp_avg"):
            kind = "model" if name == "a.weight" else "optimizer"
            assert f"CheckpointError: {name} is rows {rows} of [4, 4]: torch.dist" in each[f"{kind} by torch"]
            assert f"parts of extra.{name} do not make up the whole" in each[f"{kind} as extra"]
        for name in ("whole by torch", "whole states by torch"):
            assert "to do: ws.full_state_dict(model)" in each[name]
        assert "fully_shard with LBFGS, which computes across the elements" in each["mixes"]
        assert "with Lars, which computes across the elements of a parameter (aten.linalg_v" in each["norms of p"]
        assert "with Broken, whose step was tried on small tensors and failed (ZeroDivisionError" in each["untried"]
        assert "of [4, 4], this rank has rows" in each["of another"]
        assert "exp_avg in the optimizer's state is rows" in each["states of another"]
        assert "size mismatch for weight: [3, 4] in the state, [4, 4] in the model, of which this rank" in each["size"]
        assert "parameter 0 is weight float32 [2, 2] on rank 0 (2 in all), weight float32 [2, 2] fr" in each["frozen"]
        assert "running_mean, running_var, num_batches_tracked is on the meta device" in each["buffer"]
        assert "expects an nn.Module, found list" in each["module"]
        assert "containers that do not implement forward: ModuleList" in each["container"]
        assert "this FSDPLinear is sharded already" in each["again"]
        assert "True, False, None or a number of ranks, found '2'" in each["number"]
        assert "weight is a TwoTensor, which holds other tensors: a plain one is required" in each["subclass"]
        assert "is on the meta device, without values" in each["meta"]
        assert "the ranks' models differ: parameter 0 is weight float32 [2, 2] on rank 0" in each["differ"]
        assert "1.weight is tied to a parameter of a module that is sharded already" in each["tied"]
        assert (
            "did not use the same parameters: rank 0 gathered a.weight, a.bias, rank 1 gathered b.w" in each["modules"]
        )
        words = "did not use the same parameters: rank 0 reduced a.weight, a.bias, rank 1 reduced b.weight, b.bias"
        assert words in each["parameters"]
        assert "weight changed in place while gathered" in each["written"]
        assert "1.weight changed in place while gathered" in each["whole with other memory"]
        for name in ("stepped", "other memory"):
            assert "parameters of Sequential changed between forward and backward" in each[name]
        assert "weight has been exchanged for another tensor" in each["exchanged"]
        assert 'Missing key(s) in state_dict: "bias"' in each["missing"]
        assert "cannot be copied" in each["copied"]
        assert (
            "linear was given rows" in each["forward"] and "of a parameter, outside of its module's" in each["forward"]
        )
        assert "norms of sharded gradients are of all elements, found ['dim']" in each["norms"]
