"""Whole training steps: the stock stack against ours, in turns in the same run.

    python -m benchmarks.train_step --quick
    python -m benchmarks.train_step --models toy mlp --variants eager ours
    python -m benchmarks.train_step --slow-start          # torch.compile too: minutes per model
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch

from benchmarks.harness import Measured, Step, compare, markdown
from benchmarks.models import MODELS
from benchmarks.variants import VARIANTS

QUICK = ["toy", "mlp", "gpt", "bert-small"]
FULL = ["toy", "mlp", "gpt", "bert-base"]
HEADINGS = ("variant", "ranks", "step ms", "fastest ms", "ratio", "of", "first 2 steps s", "peak MiB", "loss at step 5")


def prepare(model: str, variant: str) -> Step:
    """Builds one rank of a variant: equal parameters and equal data on every rank."""
    way = VARIANTS[variant]
    torch.manual_seed(0)
    module, batch = MODELS[model]()
    module = way.model(module)
    step = way.step()
    torch.manual_seed(1)
    return partial(step, module, way.optimizer(module), batch)


def rows(found: dict[str, Measured]) -> list[list[str]]:
    """One row per variant; a ratio below 1 is faster than the baseline."""
    out = []
    for name, measured in found.items():
        way = VARIANTS[name]
        out.append(
            [
                way.title,
                str(way.ranks),
                f"{measured.step * 1e3:.2f}",
                f"{measured.fastest * 1e3:.2f}",
                f"{measured.ratio(found[way.baseline]):.2f}",
                way.baseline,
                f"{measured.first:.2f}",
                f"{measured.memory / 2**20:.0f}",
                f"{measured.loss:.5f}",
            ]
        )
    return out


def say(what: str) -> None:
    """Tells the person who waits; the tables alone go to standard output."""
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Reads the command line and prints a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small BERT and few rounds")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--slow-start", action="store_true", help="also the variants whose first step takes minutes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, help="of each rank; by default all cores, shared out among the ranks")
    options = parser.parse_args()
    chosen = options.variants or [n for n, way in VARIANTS.items() if options.slow_start or not way.slow_start]
    needed = dict.fromkeys([*(VARIANTS[name].baseline for name in chosen), *chosen])
    ranks = {name: VARIANTS[name].ranks for name in VARIANTS if name in needed}
    rounds = options.rounds or (5 if options.quick else 15)
    for model in options.models or (QUICK if options.quick else FULL):
        found = compare(prepare, model, ranks, rounds, say, options.threads)
        print(f"\n### {model}: {MODELS[model].__doc__}\n\n{markdown(HEADINGS, rows(found))}", flush=True)


if __name__ == "__main__":
    main()
