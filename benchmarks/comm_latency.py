"""What a small collective over shm takes in a loop of nothing else, called from Python.

    python benchmarks/comm_latency.py --ranks 2

Microseconds a call, 4 bytes, median over batches of 1,000 calls of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.comm_collectives import batch, ours
from wholestep import comm
from wholestep.testing import run_ranks


def started_and_waited_for(x: torch.Tensor) -> None:
    """`all_reduce` with a `Work` between."""
    work = comm.all_reduce(x, "max", async_op=True)
    assert work is not None
    work.wait()


def latencies(batches: int) -> dict[str, float]:
    """Medians by collective."""
    x = torch.zeros(1)
    calls = {name: ours(name, x, None) for name in ("all_reduce", "broadcast", "all_gather")}
    calls |= {"all_reduce, async": lambda: started_and_waited_for(x), "barrier": comm.barrier}
    found = {}
    for name, call in calls.items():
        took = []
        for _ in range(batches):
            comm.barrier()
            slowest = torch.tensor([batch(call, 1000)])
            comm.all_reduce(slowest, "max")
            took.append(slowest.item())
        found[name] = statistics.median(took)
    return found


def main() -> None:
    """Measures and prints a line for each collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    for name, took in run_ranks(latencies, options.ranks, "shm", (options.batches,))[0].items():
        print(f"{name:20s} {took:6.2f} us")


if __name__ == "__main__":
    main()
