"""Lightning, Accelerate and the Trainer with our wrapper: the results that they have with torch's, on two ranks."""

import importlib
import socket
import sys

import pytest

import tests.support.accelerate_ranks as accelerate_ranks
import tests.support.example_ranks as example_ranks
import tests.support.lightning_ranks as lightning_ranks
from wholestep.testing import run_ranks


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_lightning(tmp_path):
    for rank, each in enumerate(run_ranks(lightning_ranks.checks, 2, args=(free_port(), str(tmp_path)))):
        assert each["rank"] == rank
        assert each["automatic"] == each["manual"] == (True, 6), "the bits of Lightning's own, a reduction a step"
        assert each["automatic logs"] and each["manual logs"]
        assert each["resumed"]
        assert each["automatic sharded"] and each["manual sharded"] and each["sharded resumed"], "under fully_shard"
        assert each["sometimes sharded"], "a layer that the batch that reduces does not use"
        assert each["sharded saved"] == [(8, 6), (4, 6), (8, 6)], "whole tensors, of parts"
        assert "FullyShardStrategy: scale is in no module under fully_shard" in each["loose"]
        assert "EMAWeightAveraging copies the module before it is divided" in each["averaging"]
        assert each["logged"] == ["metrics.csv"], "by rank 0 alone"
        assert each["synced"] == (["torch.bfloat16", "wholestep"], "torch")
        assert "did not receive grad for rank" in each["unused"] and "spare.weight, spare.bias" in each["unused"]
        assert "model_averaging_period is required" in each["no period"]
        assert "FSDPPrecision is for another strategy" in each["precision"]
        words = ["the framework knows 1 ranks, wholestep.comm 2", "process 1 of its host, and Trainer has devices=1"]
        assert words[rank] in each["devices"]


def test_accelerate(tmp_path):
    one, two = run_ranks(accelerate_ranks.accelerate_checks, 2, args=(free_port(), str(tmp_path)))
    assert one["uneven"][0] == 3 and two["uneven"][0] == 2 and one["uneven"][1] == two["uneven"][1]
    for each in (one, two):
        assert each["losses"] and each["weights"], "the bits of Accelerate's own"
        assert each["reductions"] == 3 and each["unwrapped"]
        assert each["resumed"] and each["late"] and each["hook"] and each["bf16"]
        assert each["sharded"] and each["sharded resumed"], "under fully_shard"
        assert "did not receive grad for rank" in each["unused"] and "spare.weight, spare.bias" in each["unused"]
        assert "serves data parallelism on CPUs and CUDA, found DistributedType.MEGATRON_LM" in each["kind"]


def test_the_trainer(tmp_path):
    for each in run_ranks(accelerate_ranks.trainer_checks, 2, args=(free_port(), str(tmp_path))):
        flags = {"weights": True, "losses": True, "unused allowed": True, "resumed": True}
        flags |= {"sharded": True, "sharded resumed": True, "sharded saved": True}
        assert each == flags | {"wrapper": "wholestep", "reductions": 4}


def test_the_examples_learn(tmp_path):
    one, two = run_ranks(example_ranks.examples, 2, args=([free_port() for _ in range(3)], str(tmp_path)))
    assert one["lightning"] == two["lightning"] and one["lightning"][0] < 0.9
    assert sum(one["ddp"][-8:]) < sum(one["ddp"][:8]) / 4
    assert len(one["trainer"]) == 4 and one["trainer"][-1] < one["trainer"][0]


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_a_missing_framework_names_the_extra(framework, monkeypatch):
    name = f"wholestep.parallel.integrations.{framework}"
    for missing in (framework, f"{framework}.pytorch"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=rf"{framework} needs .*pip install 'wholestep\[{framework}\]'"):
        importlib.import_module(name)
