"""What a new size costs: the demo's GPT on sequences of other lengths, each called twice.

    OMP_NUM_THREADS=1 python -m benchmarks.new_sizes

The cost of a length is what its first call takes beyond its second one. A length that no program serves yet has one
made for it, which is counted apart.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any

import torch
from torch.optim import AdamW

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import train_step
from examples.gpt import GPT, GPTConfig


def timed(step: Any, model: GPT, opt: AdamW, length: int) -> float:
    """Seconds of one call."""
    batch = {name: torch.randint(256, (4, length)) for name in "xy"}
    start = time.perf_counter()
    step(model, opt, batch)
    return time.perf_counter() - start


def main() -> None:
    """Prints the median costs of lengths that a program served, and of those that needed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=60)
    options = parser.parse_args()
    model = GPT(GPTConfig())
    opt, step = AdamW(model.parameters()), ws.compile(train_step, fullgraph=True)
    for length in (64, 64, 48, 48):  # the second length is captured with a symbol
        timed(step, model, opt, length)
    served, made = list[float](), list[float]()
    for length in random.Random(0).sample(sorted({*range(8, 129)} - {48, 64}), options.lengths):
        programs = step.captures
        first = timed(step, model, opt, length)
        (served if step.captures == programs else made).append(first - timed(step, model, opt, length))
    rows = [[name, str(len(costs)), f"{1e3 * median(costs or [0.0]):.1f}"]
            for name, costs in (("served", served), ("with a program made", made))]  # fmt: skip
    print(markdown(("lengths", "number", "cost ms"), rows))


if __name__ == "__main__":
    main()
