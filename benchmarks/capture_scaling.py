"""How the cost of capture grows with the model: a 12-layer against a 48-layer GPT, first step each.

    python -m benchmarks.capture_scaling [--width 256]

Linear growth is a ratio of about 4; the project's bound is 5.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch.optim import AdamW

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import train_step
from examples.gpt import GPT, GPTConfig


def first_step(layers: int, width: int) -> float:
    """Seconds of the first call of a compiled step: capture, passes, lowering and one run of the model."""
    config = GPTConfig(layers=layers, width=width, context=16)
    model = GPT(config)
    opt = AdamW(model.parameters())
    tokens = torch.randint(config.vocabulary, (2, config.context))
    step = ws.compile(train_step, fullgraph=True)
    start = time.perf_counter()
    step(model, opt, {"x": tokens, "y": tokens})
    return time.perf_counter() - start


def main() -> None:
    """Prints the two times and their ratio, medians of turns taken in one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=(12, 48))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    first_step(2, 32)  # what is imported or built once in a process is no part of growth
    few, many = options.layers
    turns = [(first_step(few, options.width), first_step(many, options.width)) for _ in range(options.rounds)]
    small, large = (median(column) for column in zip(*turns, strict=True))
    ratio = median(b / a for a, b in turns)
    rows = [[str(few), f"{small:.2f}", "1.00"], [str(many), f"{large:.2f}", f"{ratio:.2f}"]]
    print(markdown(("layers", "first step s", "ratio"), rows))


if __name__ == "__main__":
    main()
