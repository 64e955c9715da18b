"""Peak bytes of tensors in the first steps of a training job, eager and compiled, as torch's profiler counts them.

    python -m benchmarks.tensor_memory --models toy mlp gpt bert-small

Above the model and its batch: optimizer state, gradients, activations, and our arena. A process's peak
(`benchmarks.train_step`) has the interpreter and its libraries in it as well.
"""

from __future__ import annotations

import argparse
from multiprocessing import get_context

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import markdown
from benchmarks.models import MODELS
from benchmarks.train_step import prepare

STEPS = 3  # captured, run, and run again
HEADINGS = ("model", "eager MiB", "wholestep MiB", "ratio")


def peak(model: str, variant: str) -> int:
    """The most bytes of tensors at once in some steps, above those that were there before."""
    torch.set_num_threads(1)
    step = prepare(model, variant)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(STEPS):
            step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    alive = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events):
        alive += nbytes
        most = max(most, alive)
    return most


def main() -> None:
    """Reads the command line and prints a row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["toy", "mlp", "gpt", "bert-small"])
    options = parser.parse_args()
    rows = []
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a process for each: none finds another's caches
        for model in options.models:
            eager, ours = (pool.apply(peak, (model, variant)) for variant in ("eager", "ours"))
            rows.append([model, f"{eager / 2**20:.2f}", f"{ours / 2**20:.2f}", f"{ours / eager:.2f}"])
    print(markdown(HEADINGS, rows))


if __name__ == "__main__":
    main()
