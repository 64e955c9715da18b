"""Checkpoints: what comes back, on which ranks, and what is left when a save is interrupted."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._pytree import tree_leaves

import tests.support.checkpoint_programs as programs
import wholestep as ws
from wholestep.checkpoint import directory
from wholestep.checkpoint.save import share_out
from wholestep.errors import CheckpointError
from wholestep.tensor_parts import Part
from wholestep.testing import run_ranks
from wholestep.testing.run_ranks import RankError

SAVE = sys.modules["wholestep.checkpoint.save"]
DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class Odd(nn.Module):
    """Tied weights, types, shapes and extra state of many kinds."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("forgotten", torch.ones(2), persistent=False)
        self.bf16 = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16).t())
        self.steps = {"seen": 0, 1: (2.5, None)}

    def get_extra_state(self):
        return {"steps": self.steps, "mean": torch.full((2,), 4.0)}

    def set_extra_state(self, state):
        self.steps, self.mean = state["steps"], state["mean"]

    def forward(self, x):
        return self.head(self.embed(x)).sum() + self.bf16.float().square().sum()


def trained(make, model=None, steps=2):
    model = model or programs.net()
    opt = make(model.parameters())
    for number in range(steps):
        programs.train_step(model, opt, programs.batch(number))
    return model, opt


def equal(one, two):
    ones, twos = tree_leaves(one), tree_leaves(two)
    return len(ones) == len(twos) and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b and type(a) is type(b)
        for a, b in zip(ones, twos, strict=True)
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), fused=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "bare": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_never_interrupted(kind, tmp_path):
    model, opt = trained(OPTIMIZERS[kind])
    opt.param_groups[0]["lr"] *= 0.5
    ws.save(tmp_path / "c", model, opt)
    for other_state in ("none", "some"):
        again, other = trained(OPTIMIZERS[kind], programs.net(1), 0 if other_state == "none" else 1)
        kept = [id(t) for held in other.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
        ws.load(tmp_path / "c", again, other)
        assert equal(again.state_dict(), model.state_dict()) and equal(other.state_dict(), opt.state_dict())
        now = [id(t) for held in other.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
        assert other_state == "none" or now == kept, "state stays the same tensors"
        reference, reference_opt = copy.deepcopy((model, opt))
        for both in ((again, other), (reference, reference_opt)):
            programs.train_step(*both, programs.batch(9))
        assert equal(again.state_dict(), reference.state_dict())
    assert equal(ws.checkpoint.optimizer_state_dict(tmp_path / "c"), opt.state_dict())


def test_odd_models_come_back_whole(tmp_path):
    model, other = Odd(), Odd()
    model.steps["seen"] = 5
    ws.save(tmp_path, model)
    ws.load(tmp_path, other)
    assert equal(other.state_dict(), model.state_dict()) and other.steps == {"seen": 5, 1: (2.5, None)}
    assert other.head.weight is other.embed.weight and torch.equal(other.mean, torch.full((2,), 4.0))
    ordinary = ws.checkpoint.state_dict(tmp_path)
    Odd().load_state_dict(ordinary)
    assert set(ordinary) == set(model.state_dict())
    untied = Odd()
    untied.head.weight = nn.Parameter(torch.zeros(7, 4))
    ws.load(tmp_path, untied)
    assert torch.equal(untied.head.weight, model.head.weight)
    ws.save(tmp_path, untied)
    with pytest.raises(CheckpointError, match="embed.weight and head.weight are one tensor in the model, two in"):
        ws.load(tmp_path, other)


def test_weights_that_were_tied_by_their_data(tmp_path):
    model, other = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight.data = model[0].weight.data
    model.register_buffer("flat", model[0].weight.data.view(-1))
    other.register_buffer("flat", torch.zeros(9))
    ws.save(tmp_path, model)
    ws.load(tmp_path, other)
    assert equal(other.state_dict(), model.state_dict())


def test_names_are_those_of_the_bare_model(tmp_path):
    bare = programs.net()
    wrapped = copy.deepcopy(bare)
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    for index, model in enumerate((ws.compile(wrapped, fullgraph=True), nn.DataParallel(wrapped))):
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(programs.batch(0)).sum().backward()
        opt.step()
        ws.save(tmp_path / str(index), model, opt)
        found = ws.checkpoint.state_dict(tmp_path / str(index))
        assert list(found) == list(bare.state_dict())
        ws.load(tmp_path / str(index), bare, torch.optim.SGD(bare.parameters(), lr=0.3))
        assert equal(list(bare.state_dict().values()), list(wrapped.state_dict().values()))


def test_nobody_needs_this_library_to_read_one(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf8"), re.S | re.M)
    (source,) = [block for block in blocks if "def " in block]
    names: dict = {}
    exec(source, names)
    model = programs.net()
    ws.save(tmp_path / "one", model)
    assert equal(names["state_dict"](tmp_path / "one"), dict(model.state_dict()))
    (file,) = (tmp_path / "one" / "shards-1").iterdir()
    assert equal(dict(sorted(load_file(file).items())), dict(sorted(model.state_dict().items())))
    run_ranks(programs.blocks, 4, "thread", (str(tmp_path / "four"),))
    assert equal(names["state_dict"](tmp_path / "four")["weight"], torch.arange(24.0).view(6, 4))


# Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "ranks", "made"), [("shm", 2, "sharded"), ("thread", 3, "sharded"), ("thread", 4, "fully")]
)
def test_a_checkpoint_of_some_ranks_serves_any_others(transport, ranks, made, tmp_path):
    path = str(tmp_path / "c")
    (one, *rest) = run_ranks(programs.train, ranks, transport, (made, path, 2))
    index = json.loads((tmp_path / "c" / "index.json").read_text())
    writers = {re.search(r"rank(\d)", name)[1] for name in index["files"]}
    assert len(writers) == ranks
    tree = [ws.checkpoint.state_dict(path), dict(ws.checkpoint.optimizer_state_dict(path)["state"])]
    whole = sum(t.numel() * t.itemsize for t in tree_leaves(tree) if isinstance(t, torch.Tensor))
    assert sum(index["files"].values()) < whole + 4096 * len(index["files"]), "every byte once"
    for count, plan in ((2, "sharded"), (4, "sharded"), (2, "whole"), (2, "fully")):
        for found in run_ranks(programs.resume, count, "thread", (plan, path, 2)):
            assert all(torch.allclose(found["weights"][k], one[k], atol=1e-5) for k in one)
            assert (found["parts"] > 0) is (plan != "whole")
            assert any(found["refused"]) is (plan == "fully")
    alone = programs.resume("alone", path, 2)
    assert all(torch.allclose(alone["weights"][k], one[k], atol=1e-5) for k in one)


def test_blocks_along_two_dimensions(tmp_path):
    for said in run_ranks(programs.blocks, 4, "thread", (str(tmp_path),)):
        assert "model: the parts of weight do not make up the whole of it, each element once: rank 0 rows 0 " in said
    layer = nn.Linear(4, 6)
    ws.load(tmp_path, layer)  # the second save left the first checkpoint
    assert torch.equal(layer.weight, torch.arange(24.0).view(6, 4)) and torch.equal(layer.bias, torch.arange(6.0))
    for count in (2, 4):
        found = run_ranks(programs.columns, count, "thread", (str(tmp_path),))
        assert torch.equal(torch.cat([columns for columns, _ in found], 1), layer.weight)
        assert [nbytes for _, nbytes in found] == [24 * 4 // count] * count, "a rank reads its columns alone"


def test_a_mistake_of_one_rank_is_an_error_on_every_rank(tmp_path):
    for found in run_ranks(programs.mistakes, 2, "thread", (str(tmp_path / "c"),)):
        assert "rank 1: " in found["load"] and "not in the model: bias" in found["load"]
        assert "weight is float32 [2, 3] on rank 0, float32 [3, 3] on rank 1" in found["save"]
        assert found["unchanged"]


def test_what_ranks_hold_alike_is_shared_out_evenly():
    whole = Part.of((1000,), [(0, 1000)])
    said = [(f"w{i}", "float32", whole, False) for i in range(12)] + [("b", "float32", whole, True)]
    blocks = share_out("model", [said] * 4)
    assert [block.name for block in blocks] == [name for name, *_ in said]
    assert sorted(sum(b.nbytes for b in blocks if b.writer == rank) for rank in range(4)) in ([12000] * 3 + [16000],)
    assert blocks[-1].writer == 0
    with pytest.raises(CheckpointError, match="optimizer: w is float32 .1000. on rank 0, float16 .1000. on rank 1"):
        share_out("optimizer", [[("w", "float32", whole, False)], [("w", "float16", whole, False)]])


# Interruptions ----------------------------------------------------------------------------------------------------


def numbered(value: float) -> nn.Module:
    model = nn.Linear(300, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(path) -> float:
    model = numbered(-1.0)
    ws.load(path, model)
    values = {float(v) for parameter in model.parameters() for v in parameter.detach().flatten()[[0, -1]]}
    assert len(values) == 1, "one checkpoint, not a mixture"
    return values.pop()


class Interrupted(BaseException):
    pass


def test_interrupted_before_any_operation_on_files_the_last_one_is_intact(tmp_path, monkeypatch):
    count, limit = 0, None
    seen = []

    def counted(name, real):
        def operation(*args, **kwargs):
            nonlocal count
            if count == limit:
                raise Interrupted(name)
            count += 1
            seen.append(name)
            return real(*args, **kwargs)

        return operation

    for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    monkeypatch.setattr(SAVE, "save_file", counted("write", SAVE.save_file))
    path = tmp_path / "c"
    ws.save(path, numbered(0.0))
    seen.clear()
    ws.save(path, numbered(1.0))
    operations = len(seen)
    assert {"write", "fsync", "rename", "replace", "rmdir"} <= set(seen)
    monkeypatch.setattr(directory, "discard", lambda *_: None)  # a killed process discards nothing
    last = 1.0
    for at in range(operations):
        count, limit = 0, at
        with pytest.raises(Interrupted):
            ws.save(path, numbered(last + 1))
        limit = None
        now = value_of(path)
        assert now in (last, last + 1)
        last = now
    assert last > 1.0
    ws.save(path, numbered(7.0))
    assert value_of(path) == 7.0 and len(list(path.iterdir())) == 2


def test_killed_at_any_moment_the_last_complete_one_is_intact(tmp_path):
    path, moments = tmp_path / "c", random.Random(1)
    ws.save(path, numbered(0.0))
    value = 0.0
    for _ in range(int(os.environ.get("WHOLESTEP_TEST_LONG") and 300 or 8)):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for number in range(int(value) + 1, 1_000_000):
                    ws.save(path, numbered(float(number)))
                    os.write(writer, b"%d\n" % number)
            finally:
                os._exit(1)
        time.sleep(0.02 + 0.1 * moments.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)
        with open(reader) as pipe:
            told = [float(line) for line in pipe.read().split()]
        now = value_of(path)
        assert now >= max(told, default=value) and now <= max(told, default=value) + 1
        value = now
    ws.save(path, numbered(value))
    assert len(list(path.iterdir())) == 2, "rubbish is removed"
    assert value > 0


def test_when_a_rank_dies_the_last_one_that_all_have_written_is_intact(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2 did not finish"):
        run_ranks(programs.saves_until_one_dies, 2, "shm", (str(tmp_path),))
    found = ws.checkpoint.state_dict(tmp_path)
    assert len({float(v) for tensor in found.values() for v in (tensor.min(), tensor.max())}) == 1


# Mistakes ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    model, opt = trained(OPTIMIZERS["adamw"])
    ws.save(tmp_path, model, opt)
    other = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.BatchNorm1d(12))
    other.add_module("3x", nn.Linear(12, 5, bias=False))
    other_opt = torch.optim.AdamW(other.parameters(), lr=3.0)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError) as caught:
        ws.load(tmp_path, other, other_opt)
    text = str(caught.value)
    assert "not in the checkpoint: 3x.weight (nearest: 3.weight)" in text
    assert "not in the model: 3.weight (nearest: 3x.weight)" in text
    assert "of another shape: 0.weight is [12, 6] there, [9, 6] in the model; 0.bias is [12] there" in text
    assert "updated by the optimizer that was saved, not by this one: 3.weight" in text
    assert equal(other.state_dict(), before) and not other_opt.state and other_opt.param_groups[0]["lr"] == 3.0


def test_checkpoints_that_are_none(tmp_path):
    model, opt = trained(OPTIMIZERS["adamw"])
    with pytest.raises(CheckpointError, match="is no checkpoint: it has no index.json"):
        ws.load(tmp_path / "nowhere", model)
    ws.save(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="it was saved without an optimizer"):
        ws.load(tmp_path / "c", model, opt)
    (shard,) = (tmp_path / "c" / "shards-1").iterdir()
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"expected \d+ bytes, found \d+"):
        ws.load(tmp_path / "c", model)
    shard.unlink()
    with pytest.raises(CheckpointError, match="found no file"):
        ws.checkpoint.state_dict(tmp_path / "c")
    (tmp_path / "c" / "index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ws.load(tmp_path / "c", model)


def test_what_cannot_be_saved_leaves_what_was_there(tmp_path):
    model, opt = trained(OPTIMIZERS["adamw"])
    ws.save(tmp_path / "c", model, opt)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="holds 'notes.txt', which is no part of a checkpoint"):
        ws.save(tmp_path / "mine", model)
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['params'\]\[0\], \[2, 3\], is no parameter of the"):
        ws.save(tmp_path / "c", model, torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))
    opt.state[model[0].weight]["odd"] = object()
    with pytest.raises(CheckpointError, match=r"0.weight.odd is a object, which cannot be saved: tensors, numbers"):
        ws.save(tmp_path / "c", model, opt)
    with pytest.raises(CheckpointError, match="weight is a lazy tensor"):
        ws.save(tmp_path / "c", nn.LazyLinear(3))
    assert directory.read_index(tmp_path / "c")["shards"] == "shards-1"
    assert sorted(e.name for e in (tmp_path / "c").iterdir()) == ["index.json", "shards-1"]


def test_a_run_goes_on_with_its_scheduler_and_its_random_numbers(tmp_path):
    def start():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return model, opt, torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4, 5], 0.5)

    def go_on(model, opt, scheduler, steps):
        for _ in range(steps):
            model(torch.randn(3, 4)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            scheduler.step()
        return [p.detach().clone() for p in model.parameters()], scheduler.get_last_lr()

    torch.manual_seed(0)
    model, opt, scheduler = start()
    go_on(model, opt, scheduler, 3)
    given = {"step": 3, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state(), "pair": (1.5, None)}
    ws.save(tmp_path / "run", model, opt, extra=given)
    wanted = go_on(model, opt, scheduler, 3)
    model, opt, scheduler = start()
    extra = ws.load(tmp_path / "run", model, opt)
    assert extra["step"] == 3 and extra["pair"] == (1.5, None)
    scheduler.load_state_dict(extra["scheduler"])
    torch.set_rng_state(extra["random"])
    found = go_on(model, opt, scheduler, 3)
    assert found[1] == wanted[1] and all(map(torch.equal, found[0], wanted[0]))
    ws.save(tmp_path / "bare", model)
    assert ws.load(tmp_path / "bare", model) is None
    with pytest.raises(CheckpointError, match="extra.model is a Linear"):
        ws.save(tmp_path / "run", model, opt, extra={"model": model[0]})
    assert ws.load(tmp_path / "run", model, opt)["step"] == 3


def test_every_rank_is_given_what_the_first_saved_besides(tmp_path):
    found = run_ranks(programs.with_extra, 2, "shm", args=(str(tmp_path / "run"),))
    assert found == [{"rank": 0, "mean": [2.0, 2.0]}] * 2
