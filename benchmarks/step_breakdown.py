"""Where the time of a small step goes: guards, calls between kernels, kernels, and what is done around the program.

    OMP_NUM_THREADS=1 python -m benchmarks.step_breakdown

The 20-layer MLP, in microseconds, each part the median of many calls in turns in one process. *Calls* is the program of
the same model at width 2 on two rows, whose kernels have nothing to do; *kernels* is what the model's own takes beyond.
After some 800 steps the averages of dead units' gradients are denormal numbers, which every kernel is slow with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import Regression, train_step

OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "AdamW(fused=True)": {"fused": True}}


class Parts:
    """One model's step, taken apart."""

    def __init__(self, width: int, rows: int, options: dict[str, Any]) -> None:
        layers = [layer for _ in range(20) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = Regression(*layers)
        self.args = self.model, torch.optim.AdamW(self.model.parameters(), **options), {
            name: torch.randn(rows, width) for name in "xy"
        }  # fmt: skip
        self.step = ws.compile(train_step, fullgraph=True)
        for _ in range(3):
            self.step(*self.args)
        self.entry = self.step._entries[0]
        self.values = self.entry.binder(self.args, {})[: self.entry.count]

    def whole(self) -> Any:
        """A call."""
        return self.step(*self.args)

    def eager(self) -> Any:
        """The step itself."""
        return train_step(*self.args)

    def guards(self) -> Any:
        """What is checked and fetched before the program runs."""
        return self.entry.binder(self.args, {})

    def program(self) -> Any:
        """The program alone."""
        with torch.no_grad():
            return self.entry.program.run(*self.values)


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds of each, the median of its rounds; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            found[name].append(1e6 * (time.perf_counter() - start))
    return {name: median(times) for name, times in found.items()}


def main() -> None:
    """Prints a row for each part, a column for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns: list[dict[str, float]] = []
    for how in OPTIMIZERS.values():
        parts, tiny = Parts(64, 32, how), Parts(2, 2, how)
        runs = {"eager": parts.eager, "whole": parts.whole, "guards": parts.guards, "program": parts.program,
                "calls": tiny.program}  # fmt: skip
        found = timed(runs, options.rounds)
        columns.append({
            "guards and binding": found["guards"],
            "calls: the program's Python, PyTorch's own work": found["calls"],
            "kernels": found["program"] - found["calls"],
            "effects, results, version counters": found["whole"] - found["guards"] - found["program"],
            "a call": found["whole"],
            "eager": found["eager"],
        })  # fmt: skip
    rows = [[part, *(f"{column[part]:.0f}" for column in columns)] for part in columns[0]]
    print(markdown(("µs", *OPTIMIZERS), rows))


if __name__ == "__main__":
    main()
