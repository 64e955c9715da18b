"""All-reduce with more ranks than cores, beside the plain copy of each rank's tensor.

    python benchmarks/comm_crowded.py --ranks 2 4

Milliseconds for 64 MB, median of the slowest rank. An all-reduce reads every rank's tensor and writes it, as a copy
does: with tensors larger than the caches it cannot take less than the copies, and twice the ranks have twice the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from wholestep import comm
from wholestep.comm.shared_tensors import native
from wholestep.testing import run_ranks

BYTES = 64 << 20
IN_A_ROW = 4


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Of the slowest rank, over batches that begin together."""
    took = []
    for _ in range(rounds):
        comm.barrier()
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        slowest = torch.tensor([(time.perf_counter() - began) / IN_A_ROW * 1e3])
        comm.all_reduce(slowest, "max")
        took.append(slowest.item())
    return statistics.median(took)


def measure(rounds: int) -> dict[str, float]:
    """Medians by what is done."""
    private, other = torch.ones(BYTES // 4), torch.zeros(BYTES // 4)
    shared = comm.empty(BYTES // 4, shared=True).zero_()
    handle = comm.get_group()._handle  # type: ignore[attr-defined]

    def reduced(x: torch.Tensor) -> Callable[[], object]:
        return lambda: native.repeat(handle, x.data_ptr(), x.numel(), 1)

    calls = {"copy": lambda: other.copy_(private), "private": reduced(private), "shared": reduced(shared)}
    return {name: median_ms(call, rounds) for name, call in calls.items()}


def main() -> None:
    """Measures each number of ranks and prints what the first has of the bandwidth of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    first: dict[str, float] = {}
    for ranks in options.ranks:
        found = run_ranks(measure, ranks, "shm", (options.rounds,))[0]
        first = first or found
        few = options.ranks[0]
        for name, took in found.items():
            size = first[name] / took
            bus = size * (ranks - 1) / ranks / ((few - 1) / few)
            print(f"{ranks} ranks, {name:8s} {took:6.1f} ms; of {few} ranks: {size:.2f} by message, {bus:.2f} by bus")


if __name__ == "__main__":
    main()
