"""Memory and time of forward and backward of the demo's GPT: partitions against eager and torch.compile.

    python -m benchmarks.autograd_memory
    python -m benchmarks.autograd_memory --rows 32 --variants eager "min cut" inductor

Each variant has a process of its own; they take turns. "step MiB" is the highest resident memory during a step above
what is resident between steps without what the variant keeps there for the next one (arenas, recycled results):
activations, gradients and temporaries. "process MiB" is the highest of all above the imports, the compiler's own
objects included. Times are medians, ratios those of turns in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.harness import _memory, markdown
from examples.gpt import GPT, GPTConfig
from wholestep.autograd import aot_function, default_partition, min_cut_partition

HEADINGS = ("variant", "step MiB", "of eager's", "process MiB", "step ms", "of eager's", "loss")
WARM = 3
Loss = Callable[..., torch.Tensor]


def _partitioned(partition: Any) -> Callable[[nn.Module], Loss]:
    return lambda model: aot_function(model, "aten", partition_fn=partition)


def _stock(backend: str) -> Callable[[nn.Module], Loss]:
    return lambda model: torch.compile(model, backend=backend)


VARIANTS: dict[str, Callable[[nn.Module], Loss]] = {
    "eager": lambda model: model,
    "default": _partitioned(default_partition),
    "min cut": _partitioned(min_cut_partition),
    "half budget": _partitioned(partial(min_cut_partition, memory_budget=0.5)),
    "aot_eager": _stock("aot_eager"),
    "inductor": _stock("inductor"),
}
QUICK = ["eager", "default", "min cut", "half budget", "aot_eager"]


def _held(loss: Any) -> int:
    """Bytes that our programs keep between steps; torch's keep none."""
    program = getattr(loss, "_latest", None)
    if program is None or isinstance(loss, nn.Module):
        return 0
    halves = [program().run, *(served.run for served in program().backward.served.values())]
    recyclers = [half._source.namespace["fresh"] for half in halves if "fresh" in half._source.namespace]
    kept = (storage.nbytes() for one in recyclers for blocks in one._kept.values() for storage, _ in blocks)
    return sum(sum(half._sizes.values()) for half in halves) + sum(kept)


def _serve(variant: str, rows: int, pipe: Connection) -> None:
    """One variant: answers requests for a number of steps with their seconds, then tells its memory."""
    torch.set_num_threads(1)
    imports = _memory("VmRSS")
    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config)
    x, y = (torch.randint(config.vocabulary, (rows, config.context)) for _ in range(2))
    loss = VARIANTS[variant](model)

    def step() -> float:
        value = loss(x, y)
        value.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return value.item()

    torch.manual_seed(1)
    for _ in range(WARM):
        last = step()
    whole = _memory("VmHWM") - imports
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    rest = _memory("VmRSS") - _held(loss)
    pipe.send(last)
    while steps := pipe.recv():
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        pipe.send(median(seconds))
    pipe.send((_memory("VmHWM") - rest, max(whole, _memory("VmHWM") - imports)))


def measure(names: list[str], rows: int, rounds: int, steps: int) -> list[list[str]]:
    """Runs the variants in turns; one row of the table for each."""
    spawn = get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    pipes: dict[str, Connection] = {}
    losses: dict[str, float] = {}
    for name in names:
        print(f"first steps of {name}", file=sys.stderr, flush=True)
        pipes[name], theirs = spawn.Pipe()
        spawn.Process(target=_serve, args=(name, rows, theirs), daemon=name != "inductor").start()
        losses[name] = pipes[name].recv()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(steps)
            times[name].append(pipe.recv())
    table = []
    first: tuple[float, list[float]] | None = None
    for name, pipe in pipes.items():
        pipe.send(0)
        peak, whole = pipe.recv()
        first = first or (peak, times[name])
        ratio = median(mine / base for mine, base in zip(times[name], first[1], strict=True))
        memory = [f"{peak / 2**20:.1f}", f"{peak / first[0]:.2f}", f"{whole / 2**20:.0f}"]
        table.append([name, *memory, f"{median(times[name]) * 1e3:.1f}", f"{ratio:.2f}", f"{losses[name]:.5f}"])
    return table


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=QUICK, help="eager comes first")
    parser.add_argument("--rows", type=int, default=8, help="of the batch, 128 bytes each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    options = parser.parse_args()
    names = list(dict.fromkeys(["eager", *options.variants]))
    table = measure(names, options.rows, options.rounds, options.steps)
    print(f"\n### GPT, {options.rows} rows, one thread\n\n{markdown(HEADINGS, table)}")


if __name__ == "__main__":
    main()
