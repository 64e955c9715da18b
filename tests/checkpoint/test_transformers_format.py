"""Checkpoints of transformers are read into parts, and written from parts; transformers reads them."""

import copy
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tests.support.pretrained_ranks as programs
import wholestep as ws
from tests.support.deferred_ranks import experts, llama
from wholestep.errors import CheckpointError
from wholestep.testing import run_ranks

transformers = pytest.importorskip("transformers")


def equal(one, two):
    ones, twos = one.state_dict(), two.state_dict()
    return ones.keys() == twos.keys() and all(torch.equal(ones[name], twos[name]) for name in ones)


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_and_loads(tied, tmp_path):
    model = llama(tied)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for path in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many"):
        other = llama(tied)
        ws.load(path, other)
        assert equal(model, other)
    half = llama(tied).bfloat16()
    ws.load(tmp_path / "many", half)
    assert equal(half, model.bfloat16())
    for name, most in (("whole", 10**9), ("cut", 200_000)):
        ws.checkpoint.save_pretrained(tmp_path / name, half, most)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert equal(again, half) and again.dtype is torch.bfloat16
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2


def test_parts_are_read_and_written(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "given", max_shard_size="200KB")
    for found in run_ranks(programs.parts, 2, args=(str(tmp_path),)):
        assert found["read"] < 0.6 * found["bytes"], "rows of a rank's own, and small tensors"
        assert found["fully_shard"] and found["plan"] and found["later"]
        assert "not in the checkpoint: extra." in found["missing"] and found["unchanged"]
    assert equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back"), model)


def test_what_transformers_converts_while_it_loads(tmp_path):
    model = experts()
    model.save_pretrained(tmp_path / "given", max_shard_size="200KB")
    names = set(ws.checkpoint.state_dict(tmp_path / "given"))
    assert len([name for name in names if "experts.3" in name]) == 6
    other = experts().bfloat16()
    ws.load(tmp_path / "given", ws.compile(other))
    assert equal(other, copy.deepcopy(model).bfloat16())
    for found in run_ranks(programs.converted, 2, args=(str(tmp_path),)):
        assert found == {"deferred": True, "later": True}
    assert equal(transformers.MixtralForCausalLM.from_pretrained(tmp_path / "back"), model)
    before = copy.deepcopy(other)
    for lost, said in (
        ("experts.2.w1", "transformers cannot make .*gate_up_proj"),
        ("experts.2.", "is .3, 192, 64. there, .4"),
    ):
        places = {}
        for file in (tmp_path / "given").glob("*.safetensors"):
            kept = {name: value for name, value in load_file(file).items() if f"1.block_sparse_moe.{lost}" not in name}
            save_file(kept, file)
            places |= dict.fromkeys(kept, file.name)
        (tmp_path / "given" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=said):
            ws.load(tmp_path / "given", other)
        assert equal(before, other)


def test_names_that_transformers_changes_while_it_loads(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    make = functools.partial(transformers.BeitModel, transformers.BeitConfig(**sizes, image_size=32, patch_size=16))
    model, other = make(), make()
    model.save_pretrained(tmp_path)
    assert set(ws.checkpoint.state_dict(tmp_path)) != set(model.state_dict())
    ws.load(tmp_path, other)
    assert equal(other, model)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64, torch.float8_e8m0fnu])
def test_types_that_few_have(dtype, tmp_path):
    model, other = nn.Module(), nn.Module()
    model.register_buffer("a", torch.arange(8, dtype=torch.uint8).view(dtype))
    other.register_buffer("a", torch.zeros(8, dtype=torch.uint8).view(dtype))
    for save in (lambda: save_file({"a": model.a}, tmp_path / "model.safetensors"), lambda: ws.save(tmp_path, model)):
        save()
        ws.load(tmp_path, other)
        assert torch.equal(other.a.view(torch.uint8), model.a.view(torch.uint8))
        other.a.view(torch.uint8).zero_()
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    model.a = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match="a is torch.complex128, which safetensors files cannot give back"):
        ws.save(tmp_path, model)
    save_file({"a": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a is of type F4, which is not served"):
        ws.load(tmp_path, other)


def test_mistakes(tmp_path):
    model, other = llama(False), llama(False)
    ws.checkpoint.save_pretrained(tmp_path / "c", model, 200_000)
    other.extra, other.lm_head = nn.Linear(2, 2), nn.Linear(128, 7, bias=False)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        ws.load(tmp_path / "c", other)
    assert "not in the checkpoint: extra.bias" in str(caught.value)
    assert "lm_head.weight is [300, 128] there, [7, 128] in the model" in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(CheckpointError, match="is there already: give a new path"):
        ws.checkpoint.save_pretrained(tmp_path / "c", model)
    index = tmp_path / "c" / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["made.up"] = next(iter(places["weight_map"].values()))
    index.write_text(json.dumps(places))
    with pytest.raises(CheckpointError, match="names tensors that are in no file: made.up"):
        ws.load(tmp_path / "c", model)
    next((tmp_path / "c").glob("*.safetensors")).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ws.load(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="is no checkpoint: it has no index.json"):
        ws.load(tmp_path / "nothing", model)
