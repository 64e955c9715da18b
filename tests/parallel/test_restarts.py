"""Jobs that fail go on from their last complete checkpoint, with the losses of an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from wholestep.launcher import Restarts
from wholestep.parallel import Checkpointer

PROGRAM = Path(__file__).parents[1] / "support" / "restarted.py"
KILLS = 100 if os.environ.get("WHOLESTEP_TEST_LONG") else 2


def command(folder: Path, steps: int, fault: str, *options: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    run = [sys.executable, "-m", "wholestep", "run", "-n", "2", *options]
    return [*run, str(PROGRAM), str(folder), str(steps), fault]


def losses(folder: Path) -> dict[int, float]:
    """Of each step, when it ran for the last time."""
    lines = (folder / "losses").read_text("utf8").splitlines()
    return {int(line.split()[0]): float.fromhex(line.split()[1]) for line in lines}


def finished(*args: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=300)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert finished(folder, 16, "").returncode == 0
    assert sorted(entry.name for entry in (folder / "saved").iterdir()) == ["step-12", "step-15"]
    return losses(folder)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_fails_changes_no_loss(fault, undisturbed, tmp_path):
    done = finished(tmp_path, 16, fault, "--standalone", "--max-restarts", "1")
    assert done.returncode == 0 and "starting 2 ranks again, restart 1 of 1" in done.stderr
    assert losses(tmp_path) == undisturbed
    steps = [int(line.split()[0]) for line in (tmp_path / "losses").read_text().splitlines()]
    assert steps.count(5) == 1 and steps.count(6) == 2, "from the last checkpoint on"


def test_a_job_goes_on_with_fewer_ranks(undisturbed, tmp_path):
    done = finished(tmp_path, 16, "kill", "--max-restarts", "1", "--min-ranks", "1")
    assert done.returncode == 0 and "starting 1 ranks again" in done.stderr
    assert losses(tmp_path) == pytest.approx(undisturbed, rel=1e-10)


def test_sigterm_saves_first_and_is_no_failure(undisturbed, tmp_path):
    done = finished(tmp_path, 16, "terminate", "--max-restarts", "1")
    assert done.returncode == 143 and "again" not in done.stderr
    assert (tmp_path / "saved" / "step-9").exists(), "the step under way, not one of every three"
    assert finished(tmp_path, 16, "").returncode == 0
    assert losses(tmp_path) == undisturbed


def test_random_kills(tmp_path):
    """Of one rank or the other, at any moment: in a step, while saving, while starting."""
    steps, chosen = 10 + 15 * KILLS, random.Random(1)
    assert finished(tmp_path / "whole", steps, "").returncode == 0
    job = subprocess.Popen(command(tmp_path / "killed", steps, "sleep", "--max-restarts", str(KILLS)))
    kills, begun = 0, tmp_path / "killed" / "losses"
    while job.poll() is None and kills < KILLS:
        lines = begun.read_text("utf8").splitlines() if begun.exists() else []
        if not lines:
            time.sleep(0.05)
            continue
        time.sleep(chosen.uniform(0, 1.5))
        children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
        if children and job.poll() is None:
            os.kill(int(chosen.choice(children)), signal.SIGKILL)
            kills += 1
            while job.poll() is None and _alive(children):
                time.sleep(0.02)
            begun.rename(begun.with_suffix(f".{kills}"))
    assert job.wait(300) == 0 and kills > KILLS // 2
    every: dict[int, set[float]] = {}
    for file in sorted((tmp_path / "killed").glob("losses*")):
        for line in file.read_text("utf8").splitlines():
            if line.count(" ") == 2:  # not cut off by a kill
                every.setdefault(int(line.split()[0]), set()).add(float.fromhex(line.split()[1]))
    assert every == {step: {loss} for step, loss in losses(tmp_path / "whole").items()}


def _alive(processes: list[str]) -> bool:
    return any(Path(f"/proc/{one}").exists() for one in processes)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="every >= 0 and keep >= 1 are required, found 5 and 0"):
        Checkpointer(tmp_path, nn.Linear(1, 1), every=5, keep=0)
    with pytest.raises(TypeError, match="scheduler has no state_dict and load_state_dict: int"):
        Checkpointer(tmp_path, nn.Linear(1, 1), scheduler=3)
    with pytest.raises(ValueError, match="restarts >= 0 of at least one rank are required, found -1"):
        Restarts(-1)
    for options, words in (
        (("--min-ranks", "3"), "--min-ranks is from 1 to 2, on one host: found 3 on 1"),
        (("--standalone", "--nodes", "2"), "--standalone is one host and a free port"),
    ):
        assert words in finished(tmp_path / "x", 1, "", *options).stderr
