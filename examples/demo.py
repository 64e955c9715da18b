"""The main job: one GPT trained six ways, side by side, with a table, a picture and the program that ran.

Each way is a process of its own (or two), started one after the other so that none disturbs another. Everything
lands in a folder: `losses.png`, `program.py` and `program_on_two_ranks.py`, and one JSON file per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from plot import draw_losses
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
PROGRESS = re.compile(r"step (\d+)/\d+ +loss ([0-9.]+|nan|inf)")
WARM = 3  # first steps that a median leaves out
APART = 0.02  # nats: curves farther apart than this do not lie on each other


@dataclass(frozen=True)
class Job:
    """One way to train.

    Attributes:
        name: in train_gpt.py.
        title: here.
        ranks: its processes.
        baseline: the job that its speed is compared with.
        like: the job whose losses it shall have.
    """

    name: str
    title: str
    ranks: int
    baseline: str
    like: str


JOBS = [
    Job("eager", "eager, 1 rank", 1, "eager", "eager"),
    Job("compiled", "compiled, 1 rank", 1, "eager", "eager"),
    Job("ddp", "DDP, 2 ranks", 2, "ddp", "ddp"),
    Job("compiled-dp", "compiled, 2 ranks", 2, "ddp", "ddp"),
    Job("sharded-optimizer", "opt. sharded, 2 ranks", 2, "ddp", "ddp"),
    Job("fully-sharded", "fully sharded, 2 ranks", 2, "ddp", "eager"),  # one device's step, whatever the ranks
]


@dataclass(frozen=True)
class Outcome:
    """What one job left: mean losses of the ranks, seconds of each step, bytes of the largest rank, the way it ran."""

    losses: list[float]
    seconds: list[float]
    peak_memory: int
    parameters: int
    way: str = ""

    @property
    def rate(self) -> float:
        return 1 / median(self.seconds[WARM:])


def command(job: Job, steps: int, out: Path) -> list[str]:
    """The command line that a person would type for this job."""
    script = [str(HERE / "train_gpt.py"), "--job", job.name, "--steps", str(steps), "--out", str(out)]
    if job.ranks == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "wholestep", "run", "-n", str(job.ranks), *script]


def run(job: Job, steps: int, out: Path, progress: Progress, bar: TaskID) -> Outcome:
    """Runs a job to its end, moving its bar.

    Raises:
        SystemExit: the job failed; its error output has been printed.
    """
    # passive: where other work shares the cores, threads that spin at every barrier cost a job up to ten times its time
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    if job.ranks == 1:
        environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    progress.start_task(bar)
    with subprocess.Popen(
        command(job, steps, out), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=errors.extend, args=(process.stderr,))
        reader.start()
        for line in process.stdout:
            if found := PROGRESS.search(line):
                progress.update(bar, completed=int(found[1]), loss=found[2])
        reader.join()
    if process.returncode:
        progress.stop()
        sys.exit(f"{''.join(errors[-40:])}the job '{job.name}' failed with exit code {process.returncode}")
    return outcome([json.loads((out / f"{job.name}.{rank}.json").read_text()) for rank in range(job.ranks)])


def outcome(ranks: list[dict]) -> Outcome:
    """Joins what the ranks of one job measured."""
    losses = [fmean(at_step) for at_step in zip(*(r["losses"] for r in ranks), strict=True)]
    peak = max(r["peak_memory"] for r in ranks)
    return Outcome(losses, ranks[0]["seconds"], peak, ranks[0]["parameters"], ranks[0]["way"])


def farthest(a: Outcome, b: Outcome) -> float:
    """The largest difference of two loss curves."""
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def table(outcomes: dict[str, Outcome]) -> Table:
    """The ways as rows; each × compares with the stock way on as many processes."""
    one = outcomes["eager"]
    title = f"Byte-level GPT, {one.parameters / 1e6:.1f} M parameters, {len(one.losses)} steps"
    note = "×: against the stock way on as many ranks; speed-up above 1: faster"
    shown = Table(title=title, caption=note, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("way", no_wrap=True)
    for heading in ("steps/s", "speed-up", "first two", "peak memory", "loss"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for job in JOBS:
        mine, base = outcomes[job.name], outcomes[job.baseline]
        shown.add_row(
            job.title,
            f"{mine.rate:.2f}",
            f"{mine.rate / base.rate:.2f}×",
            f"{sum(mine.seconds[:2]):.2f} s",  # a fresh optimizer makes its state in the first: two captures
            f"{mine.peak_memory / 2**20:.0f} MiB {mine.peak_memory / base.peak_memory:.2f}×",
            f"{last(mine):.3f}",
        )
    return shown


def last(outcome: Outcome) -> float:
    """The loss at the end: the mean of ten steps."""
    return fmean(outcome.losses[-10:])


def agreement(difference: float) -> str:
    """A difference of two curves in words."""
    return "bit for bit" if difference == 0 else f"to within {difference:.1e}"


def summary(outcomes: dict[str, Outcome]) -> str:
    """The whole outcome in one sentence."""
    eager, compiled, ddp, both, _, sharded = (outcomes[job.name] for job in JOBS)
    return (
        f"In {len(eager.losses)} steps the loss fell from {eager.losses[0]:.2f} to {last(eager):.2f} all six ways: "
        f"compiled, one process ran at {compiled.rate / eager.rate:.2f}× eager's speed with losses equal "
        f"{agreement(farthest(eager, compiled))}, and two processes at {both.rate / ddp.rate:.2f}× DDP's speed "
        f"with losses equal {agreement(farthest(ddp, both))}; fully sharded, two processes have one's losses "
        f"{agreement(farthest(eager, sharded))}."
    )


def main() -> None:
    """Runs the jobs and shows what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    if options.steps <= 10:
        parser.error("--steps: at least 11, so that there are medians to take")
    console = Console()
    bars = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*bars, console=console) as progress:
        waiting = [progress.add_task(job.title, total=options.steps, start=False, loss="-") for job in JOBS]
        jobs = zip(JOBS, waiting, strict=True)
        outcomes = {job.name: run(job, options.steps, options.out, progress, bar) for job, bar in jobs}
    console.print(table(outcomes))
    picture = options.out / "losses.png"
    titles = {job.name: job.title for job in JOBS}
    pairs = [(titles[job.like], titles[job.name]) for job in JOBS if job.like != job.name]
    draw_losses({job.title: outcomes[job.name].losses for job in JOBS}, pairs, picture)
    programs = {"compiled": "program.py", "compiled-dp": "program_on_two_ranks.py"}
    for name, kept_as in programs.items():
        (options.out / f"{name}.program.py").replace(options.out / kept_as)
    program = options.out / programs["compiled"]
    ways = ", ".join(f"{job.title}: {outcomes[job.name].way}" for job in JOBS)
    console.print(f"Which way the steps ran: {ways}", soft_wrap=True, highlight=False)
    console.print(f"Loss curves: {picture}\nThe program of one step: {program}", soft_wrap=True)
    for job in JOBS:
        if farthest(outcomes[job.name], outcomes[job.like]) > APART:
            sys.exit(f"the losses of '{job.title}' leave those of '{job.like}' by more than {APART}")
    console.print(summary(outcomes), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
