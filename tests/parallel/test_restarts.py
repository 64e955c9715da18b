"""Jobs that fail go on from their last complete checkpoint, with the losses of an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

import tests.support.restarted as program
from wholestep.cli import main
from wholestep.parallel import Checkpointer
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
KILLS = int(os.environ.get("WHOLESTEP_KILLS", 100 if LONG else 1))


def command(folder: Path, steps: int, fault: str, *options: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    run = [sys.executable, "-m", "wholestep", "run", "-n", "2", *options]
    return [*run, str(program.__file__), str(folder), str(steps), fault]


def losses(folder: Path) -> dict[int, float]:
    """Of each step, when it ran for the last time."""
    lines = (folder / "losses").read_text("utf8").splitlines()
    return {int(line.split()[0]): float.fromhex(line.split()[1]) for line in lines}


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """What ranks that nothing happens to have written; they go on from what is in the folder."""
    folder.mkdir(exist_ok=True)
    run_ranks(program.main, 2, args=(str(folder), steps, ""))
    return losses(folder)


@pytest.mark.parametrize(
    ("fault", "options", "again"),
    [
        ("terminate", ("--min-ranks", "1"), 1),
        *([("raise", ("--standalone",), 2), ("kill", (), 2), ("terminate", (), 2)] if LONG else []),
    ],
)
def test_a_rank_that_fails_changes_no_loss(fault, options, again, tmp_path):
    """Nor does one that is told to stop, which stops all."""
    todo = command(tmp_path / "job", 16, fault, *options, "--max-restarts", "2")
    done = subprocess.run(todo, capture_output=True, text=True, timeout=120)
    assert f"starting {again} ranks again, restart 1 of 2" in done.stderr and "restart 2" not in done.stderr
    assert done.returncode == (143 if fault == "terminate" else 0)
    saved = tmp_path / "job" / "saved"
    if fault == "terminate":
        assert sorted(entry.name for entry in saved.iterdir()) == ["step-11", "step-9"], "the step under way"
    found = undisturbed(tmp_path / "job", 16) if fault == "terminate" else losses(tmp_path / "job")
    assert found == pytest.approx(undisturbed(tmp_path / "whole", 16), rel=0 if again == 2 else 1e-10, abs=0)
    steps = [int(line.split()[0]) for line in (tmp_path / "job" / "losses").read_text().splitlines()]
    assert steps.count(5) == 1 and steps.count(6) == 2, "from the last checkpoint on"
    assert sorted(entry.name for entry in saved.iterdir()) == ["step-12", "step-15"]


def test_kills_at_any_moment_and_then_sigterm(tmp_path):
    """Of one rank or the other: in a step, while saving, while starting. SIGTERM has the job save before it ends."""
    steps, chosen, begun = 80 + 15 * KILLS, random.Random(1), tmp_path / "losses"
    job = subprocess.Popen(command(tmp_path, steps, "sleep", "--max-restarts", str(KILLS), "--grace", "60"))
    for kill in range(KILLS + 1):
        while not begun.exists():
            assert job.poll() is None
            time.sleep(0.05)
        time.sleep(chosen.uniform(0, 0.5 if kill == KILLS else 1.5))
        if kill == KILLS:
            break
        ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(chosen.choice(ranks)), signal.SIGKILL)
        while any(Path(f"/proc/{one}").exists() for one in ranks):
            time.sleep(0.02)
        begun.rename(begun.with_suffix(f".{kill}"))
    job.terminate()
    assert job.wait(120) == 143
    assert (tmp_path / "saved" / f"step-{max(losses(tmp_path)) + 1}").exists(), "the step under way"
    undisturbed(tmp_path, steps)
    every: dict[int, set[float]] = {}
    for file in tmp_path.glob("losses*"):
        for step, loss, *end in map(str.split, file.read_text("utf8").splitlines()):
            if end:  # not cut off by a kill
                every.setdefault(int(step), set()).add(float.fromhex(loss))
    assert every == {step: {loss} for step, loss in undisturbed(tmp_path / "whole", steps).items()}


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="every >= 0 and keep >= 1 are required, found 5 and 0"):
        Checkpointer(tmp_path, nn.Linear(1, 1), every=5, keep=0)
    with pytest.raises(TypeError, match="scheduler has no state_dict and load_state_dict: int"):
        Checkpointer(tmp_path, nn.Linear(1, 1), scheduler=3)
    for options, words in (
        (["-n", "2", "--min-ranks", "3"], "--min-ranks is from 1 to 2, on one host: found 3 on 1"),
        (["--max-restarts", "-1"], "-1 is not in the range x>=0"),
        (["--standalone", "--nodes", "2"], "--standalone is one host and a free port"),
    ):
        assert words in CliRunner().invoke(main, ["run", *options, "train.py"]).output
