"""Modules that a step is the first to import: executed once, with real tensors, as in eager."""

import importlib
import subprocess
import sys

import pytest
import torch

import wholestep as ws
from wholestep import capture_call, comm
from wholestep.errors import LazyError

MODULE = """
import os, random, time
import torch
kept = torch.ones(3)
weight = torch.nn.Parameter(torch.randn(3))
doubled = weight * 2
drawn, now, text = random.random(), time.time(), open(__file__).read()
print("executed")
os.makedirs(os.path.dirname(__file__) + "/made", exist_ok=True)
def scale(x):
    return x * 3
"""


def plain(x):
    import imported_by_a_step as module  # noqa: PLC0415 - what is tested

    return module.scale(x) + 1


def reads_its_tensor(x):
    from imported_by_a_step import doubled  # noqa: PLC0415 - what is tested

    return x * doubled


def first_call(step, x):
    sys.modules.pop("imported_by_a_step", None)
    torch.manual_seed(0)
    return step(x)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("step", [plain, reads_its_tensor])
def test_a_first_import_is_executed_once_with_real_tensors(step, fullgraph, tmp_path, monkeypatch, capsys):
    (tmp_path / "imported_by_a_step.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    x, compiled = torch.arange(3.0), ws.compile(step, fullgraph=fullgraph)
    expected = first_call(step, x)
    capsys.readouterr()
    assert torch.equal(first_call(compiled, x), expected)
    assert torch.equal(compiled(x), expected)
    walked = [entry.binder.slow_calls for entry in compiled._entries]
    assert torch.equal(compiled(x), expected)
    assert walked == [entry.binder.slow_calls for entry in compiled._entries]  # what imports keep there is no matter
    assert capsys.readouterr().out == "executed\n"
    module = sys.modules["imported_by_a_step"]
    assert type(module.kept) is torch.Tensor and module.kept.tolist() == [1, 1, 1]
    assert module.doubled.requires_grad and torch.equal(module.doubled, module.weight * 2)


def test_with_a_plan_a_first_import_is_as_ever_and_what_has_to_run_once_before_an_error(tmp_path, monkeypatch):
    (tmp_path / "imported_by_a_step.py").write_text("K = 3.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("imported_by_a_step", None)
    comm.init_process_group("null", rank=0, world_size=2)
    try:
        mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        importing = ws.compile(by_its_name, mesh=mesh, plan=ws.DataParallel("dp"))
        assert torch.equal(importing(torch.ones(2)), torch.full((2,), 3.0)) and importing.captures == 1
        model = torch.nn.LazyLinear(2)
        step = ws.compile(lambda x: model(x).sum().backward(), mesh=mesh, plan=ws.DataParallel("dp"))
        with pytest.raises(LazyError, match="has no shape yet"):
            step(torch.ones(3, 4))
    finally:
        comm.destroy_process_group()


def by_its_name(x):
    import imported_by_a_step as module  # noqa: PLC0415 - what is tested

    return x * module.K


def what_it_holds(x):
    from imported_by_a_step import K  # noqa: PLC0415 - what is tested

    return x * K


def by_its_function(x):
    from imported_by_a_step import scale  # noqa: PLC0415 - what is tested

    return scale(x)


def looked_up(x):
    return x * sys.modules["imported_by_a_step"].K


@pytest.mark.parametrize("step", [by_its_name, what_it_holds, by_its_function, looked_up])
def test_what_a_step_reads_of_a_module_that_it_imports_is_a_guard(step, tmp_path, monkeypatch):
    (tmp_path / "imported_by_a_step.py").write_text("K = 2.0\ndef scale(x):\n    return x * K\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("imported_by_a_step", None)
    module = importlib.import_module("imported_by_a_step")
    compiled = ws.compile(step, fullgraph=True)
    assert compiled(torch.ones(1)) == 2
    module.K = 3.0
    assert compiled(torch.ones(1)) == 3
    assert len(compiled.recompiles) == 1 and "imported_by_a_step.K" in compiled.recompiles[0]


def test_a_module_that_each_call_imports_anew(tmp_path, monkeypatch):
    def step(x):
        del sys.modules["imported_anew"]
        import imported_anew  # noqa: PLC0415 - what is tested

        return x * imported_anew.SCALE

    (tmp_path / "imported_anew.py").write_text("SCALE = 2.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "imported_anew", importlib.import_module("imported_anew"))
    monkeypatch.setattr(capture_call, "_MOST_WALKS", 2)
    compiled = ws.compile(step)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [2.0] * 3
    assert "imports imported_anew" in compiled.breaks[0]


FRESH = """
import sys, torch, wholestep as ws
assert "torch._dynamo" not in sys.modules  # which torch imports when it makes the first fake tensor
step = ws.compile(lambda x: x * 2, fullgraph=False)
assert step(torch.ones(2)).tolist() == [2, 2] and step.breaks == [], step.breaks
import torch._dynamo
"""


def test_what_a_capture_itself_imports_is_imported_whole():
    subprocess.run([sys.executable, "-c", FRESH], check=True)
