"""Measures variants against each other in one run.

Each variant lives in processes of its own, started once and kept, so that memory is its own and state stays warm. They
take turns: a few steps of each, round after round, so that whatever else the machine does falls on all of them alike.
A ratio is the median over the rounds of (time of the variant in the round / time of its baseline in the same round).
"""

from __future__ import annotations

import gc
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import torch

from wholestep.launcher import World, free_port

PATIENCE = 1800.0  # seconds for one answer: a first step of torch.compile on a large model may take minutes
TURN = 0.3  # seconds that one turn of a variant should take
FIRST = 2  # steps of the start: a fresh optimizer makes its state in the first, so that the second is a new capture
WARM = 3

Step = Callable[[], torch.Tensor]
Prepare = Callable[[str, str], Step]


@dataclass
class Measured:
    """What a variant showed: seconds per step of each round, of the first steps, of the fastest step; bytes above the
    imports, a loss."""

    name: str
    first: float = 0.0
    fastest: float = float("inf")
    rounds: list[float] = field(default_factory=list)
    memory: int = 0
    loss: float = 0.0

    @property
    def step(self) -> float:
        return median(self.rounds)

    def ratio(self, baseline: Measured) -> float:
        """Time against the baseline's; below 1 is faster."""
        return median(mine / base for mine, base in zip(self.rounds, baseline.rounds, strict=True))


def _memory(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def _serve(
    prepare: Prepare, model: str, variant: str, environment: dict[str, str], threads: int, pipe: Connection
) -> None:
    """One rank of one variant: answers requests for a number of steps with their seconds, until told to stop."""
    os.environ |= environment
    torch.set_num_threads(threads)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew, above the imports
    before = _memory("VmRSS")
    step = prepare(model, variant)
    gc.collect()
    pipe.send("ready")
    while steps := pipe.recv():
        seconds, loss = [], torch.tensor(0.0)
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
        pipe.send((seconds, loss.item()))
    pipe.send(_memory("VmHWM") - before)
    pipe.recv()  # nobody leaves before all have answered


class Crew:
    """The ranks of one variant, with `threads` each, or else the cores shared out among them."""

    def __init__(self, prepare: Prepare, model: str, variant: str, ranks: int, threads: int | None = None) -> None:
        spawn, port, secret = get_context("spawn"), free_port(), secrets.token_hex(32)
        each = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
        self.name = variant
        self.pipes: list[Connection] = []
        self.ranks: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            environment = World(ranks).environment(rank, port, secret)
            arguments = (prepare, model, variant, environment, each, theirs)
            process = spawn.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)
        self._answers()

    def _answers(self) -> list:
        """One answer of each rank, in order.

        Raises:
            RuntimeError: a rank died (its own traceback stands in the output above) or was silent too long.
        """
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(PATIENCE):
                    raise RuntimeError(f"{self.name}: rank {rank} gave no answer in {PATIENCE:.0f} s")
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"{self.name}: rank {rank} died") from None
        return answers

    def run(self, steps: int) -> tuple[list[float], float]:
        """Seconds of each step, and mean loss of the last one; a step takes as long as its slowest rank."""
        for pipe in self.pipes:
            pipe.send(steps)
        answers = self._answers()
        slowest = [max(at_step) for at_step in zip(*(seconds for seconds, _ in answers), strict=True)]
        return slowest, sum(loss for _, loss in answers) / len(answers)

    def finish(self) -> int:
        """Ends the ranks; gives the bytes of the one that needed most."""
        for pipe in self.pipes:
            pipe.send(0)
        most = max(self._answers())
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.ranks:
            process.join(10)
        return most

    def kill(self) -> None:
        """Ends whatever rank still runs."""
        for process in self.ranks:
            if process.is_alive():
                process.kill()
                process.join()


def compare(
    prepare: Prepare,
    model: str,
    variants: dict[str, int],
    rounds: int,
    say: Callable[[str], None],
    threads: int | None = None,
) -> dict[str, Measured]:
    """Measures variants of one model in turns.

    Args:
        prepare: (model, variant) -> a step to time; importable, called in each rank's process.
        model: its name.
        variants: name -> ranks; baselines first.
        rounds: turns of each variant.
        say: told what is going on.
        threads: of each rank; by default the cores are shared out among a variant's ranks.

    Returns:
        name -> what it showed.
    """
    crews: list[Crew] = []
    found: dict[str, Measured] = {}
    try:
        for name, ranks in variants.items():
            say(f"{model}: first steps of {name}")
            crew = Crew(prepare, model, name, ranks, threads)
            crews.append(crew)
            found[name] = Measured(name, first=sum(crew.run(FIRST)[0]))
        turns = {}
        for crew in crews:
            seconds, found[crew.name].loss = crew.run(WARM)
            turns[crew.name] = max(1, min(100, round(TURN / median(seconds))))
        for number in range(rounds):
            say(f"{model}: round {number + 1} of {rounds}")
            for crew in crews:
                seconds, _ = crew.run(turns[crew.name])
                found[crew.name].rounds.append(median(seconds))
                found[crew.name].fastest = min(found[crew.name].fastest, *seconds)
        for crew in crews:
            found[crew.name].memory = crew.finish()
    finally:
        for crew in crews:
            crew.kill()
    return found


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left and all others to the right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    lines = []
    for first, *others in (headings, rule, *rows):
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
