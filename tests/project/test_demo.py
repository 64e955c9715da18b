"""The main job, small: six ways to train give the losses that they must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_gpt
from demo import JOBS, Outcome, farthest, outcome, summary
from gpt import GPT, GPTConfig
from plot import draw_losses
from text import batch, standard_library

from tests.support.demo_ways import train_ways

EXAMPLES = Path(train_gpt.__file__).parent


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each way left that a one-layer model was trained for four steps."""
    folder = tmp_path_factory.mktemp("demo")
    train_ways(folder, "eager", "compiled")
    ways = ["-m", "tests.support.demo_ways", str(folder), "compiled-dp", "fully-sharded", "ddp"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{EXAMPLES.parent}:{EXAMPLES}"}
    start = [sys.executable, "-m", "wholestep", "run", "-n", "2", *ways]
    run = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def trained(out: Path, job: str, ranks: int) -> Outcome:
    return outcome([json.loads((out / f"{job}.{rank}.json").read_text()) for rank in range(ranks)])


def test_compiled_losses_are_eagers_bit_for_bit(out: Path):
    assert trained(out, "compiled", 1).losses == trained(out, "eager", 1).losses
    program = (out / "compiled.program.py").read_text()
    compile(program, "program.py", "exec")
    assert "gpt.py" in program, "the program names the user's lines"


def test_compiled_losses_on_two_ranks_are_ddps(out: Path):
    assert farthest(trained(out, "compiled-dp", 2), trained(out, "ddp", 2)) < 1e-5


def test_fully_sharded_losses_are_those_of_one_process(out: Path):
    assert farthest(trained(out, "fully-sharded", 2), trained(out, "eager", 1)) < 1e-5


def test_two_ranks_share_what_one_would_see():
    text = standard_library(10_000)
    whole, _ = batch(text, 3, 8, 16)
    parts = [batch(text, 3, 8, 16, rank, 2)[0] for rank in range(2)]
    assert torch.equal(whole, torch.cat(parts))


def test_targets_are_the_next_bytes():
    x, y = batch(standard_library(10_000), 0, 4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1]) and not torch.equal(x, y)


def test_the_model_is_causal_and_of_the_size_it_says():
    model = GPT(GPTConfig()).eval()
    assert 3.2e6 < sum(p.numel() for p in model.parameters()) < 3.3e6
    x = torch.randint(256, (1, 8))
    later = x.clone()
    later[0, 7] += 1
    hidden = [model.blocks[0](model.token(tokens % 256)) for tokens in (x, later)]
    assert torch.equal(hidden[0][:, :7], hidden[1][:, :7]) and not torch.equal(hidden[0][:, 7], hidden[1][:, 7])


def test_the_schedule_climbs_then_falls_to_a_tenth():
    factor = train_gpt.warm_up_then_cosine(100)
    assert factor(0) < factor(19) == 1.0
    assert factor(100) == pytest.approx(0.1) and factor(60) < factor(30)


def made_up(rate: float, shift: float) -> Outcome:
    return Outcome([5.0 - i / 10 + shift for i in range(20)], [1 / rate] * 20, 2**20, 1000)


def test_the_last_line_says_speeds_and_distances():
    outcomes = map(made_up, (2, 3, 4, 8, 6, 5), (0, 0, 0, 0.5, 0, 0.25))
    said = summary(dict(zip((j.name for j in JOBS), outcomes, strict=True)))
    for words in ("5.00 to 3.55", "1.50× eager's", "2.00× DDP's", "bit for bit", "to within 5.0e-01", "within 2.5e-01"):
        assert words in said
    assert "\n" not in said and said.endswith(".")


def test_the_picture_is_drawn(tmp_path: Path):
    path = tmp_path / "losses.png"
    titles = {job.name: job.title for job in JOBS}
    pairs = [(titles[job.like], job.title) for job in JOBS if job.like != job.name]
    draw_losses({job.title: made_up(1, 0.0).losses for job in JOBS}, pairs, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
