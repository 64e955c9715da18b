"""SyncBatchNorm is BatchNorm on the batch of all ranks together."""

import pytest
import torch
from torch import nn

import tests.support.sync_batchnorm_ranks as programs
from wholestep.parallel import SyncBatchNorm
from wholestep.testing import run_ranks


@pytest.mark.parametrize(("transport", "size"), [("thread", 2), ("shm", 2), ("thread", 4), ("shm", 4)])
def test_is_batch_norm_on_the_whole_batch(transport, size):
    for each in run_ranks(programs.cases, size, transport):
        assert {name: worst for name, worst in each.items() if not worst < 1e-10} == {}


def test_empty_inputs_of_the_seed():
    for each in run_ranks(programs.seed_cases, 2, "shm"):
        assert len(each) == 8 and not torch.tensor(each).isnan().any()


def test_in_torchs_wrapper(tmp_path):
    for each in run_ranks(programs.in_torchs_wrapper, 2, "shm", (str(tmp_path / "store"),)):
        assert len(each) == 7 and max(each) < 1e-6


def test_mistakes_are_errors_on_all_ranks():
    for each in run_ranks(programs.mistakes, 2, "shm"):
        assert "ValueError: Expected more than 1 value per channel when training" in each["one value"]
        assert "expected at least 2D input (got 1D input)" in each["1d"]
        assert "number of input channels should be non-zero" in each["no channels"]
        assert "2 channels (num_features) are required, found 3" in each["channels"]
        assert each["differ"].startswith("DistMismatchError")
        assert "0 is a Activated, whose forward is not torch's BatchNorm's" in each["forward"]
        assert "create_graph=True cannot be served" in each["twice"]


def test_conversion_keeps_what_the_layer_has():
    norm = nn.BatchNorm2d(4, eps=0.1, momentum=0.2, dtype=torch.float64).eval()
    norm.weight.requires_grad_(False)
    seen = []
    norm.register_forward_hook(lambda *_: seen.append(1))
    model = nn.ModuleDict({"first": norm, "second": nn.Sequential(norm), "plain": nn.BatchNorm1d(2)})
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    made = converted["first"]
    assert converted is model and type(made) is SyncBatchNorm and converted["second"][0] is made
    assert made.weight is norm.weight and made.running_var is norm.running_var and not made.training
    assert (made.eps, made.momentum, made.num_features) == (0.1, 0.2, 4)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    assert torch.equal(made(x), norm(x)) and len(seen) == 2  # no process group: an ordinary BatchNorm
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3))) is SyncBatchNorm
