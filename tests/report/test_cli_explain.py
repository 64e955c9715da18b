"""`wholestep explain`: one rank of many, played alone up to the first compiled call."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from wholestep import comm
from wholestep.cli import main

SCRIPT = """
import os, sys, torch
import wholestep as ws
from wholestep import comm

comm.init_process_group("shm")
axes = ws.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
print("args", sys.argv[1:], "rank", comm.get_rank(), "of", comm.get_world_size(), "mesh", axes.get_coordinate())
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
opt = torch.optim.AdamW(model.parameters())
plan = [ws.TensorParallel("tp", {"0": "column", "2": "row"}), ws.DataParallel("dp")]

@ws.compile(mesh=axes, plan=plan, fullgraph=True)
def train_step(model, opt, x):
    loss = model(x).square().mean()
    loss.backward()
    opt.step(); opt.zero_grad()
    return loss

try:
    train_step(model, opt, torch.randn(8, 64))
except Exception:
    print("caught")
print("not reached")
"""


@pytest.fixture
def explain(tmp_path: Path):
    """Writes a script and has it explained with the given options and arguments."""

    def run(script: str, *options: str, arguments: tuple[str, ...] = ()):
        path = tmp_path / "script.py"
        path.write_text(script)
        return CliRunner().invoke(main, ["explain", *options, str(path), *arguments])

    yield run
    if comm.is_initialized():
        comm.destroy_process_group()


def test_the_first_compiled_call_is_explained_in_place_of_running(explain):
    before = dict(os.environ)
    found = explain(SCRIPT, "-n", "8", "--rank", "5", arguments=("--lr", "0.1"))
    assert found.exit_code == 0, found.output
    assert "args ['--lr', '0.1'] rank 5 of 8 mesh [1, 1]" in found.output
    assert "train_step on rank 5 of" in found.output and "axis tp, 4 ranks" in found.output
    assert "axis dp, 2 ranks" in found.output and "all_reduce" in found.output and "script.py:" in found.output
    assert "memory: " in found.output and "caught" not in found.output and "not reached" not in found.output
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("print('hello')", (), "ended before it called a compiled step"),
        ("import sys; sys.exit(3)", (), r"ended \(3\) before"),
        (SCRIPT, ("-n", "2", "--rank", "2"), "rank 2 is not one of 2: 0 to 1"),
    ],
)
def test_what_cannot_be_explained_says_why(explain, script, options, words):
    found = explain(script, *options)
    assert found.exit_code == 2 and re.search(words, found.output)


def test_an_error_of_the_script_is_its_own(explain):
    found = explain("raise ValueError('my own')")
    assert isinstance(found.exception, ValueError) and str(found.exception) == "my own"
