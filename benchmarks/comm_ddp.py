"""Stock DistributedDataParallel on a wide MLP with AdamW, over shm and over Gloo, step by step in turns.

python benchmarks/comm_ddp.py --ranks 2 --steps 8
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholestep.comm.torch_backend  # noqa: F401 - the import registers the backend
from wholestep import comm
from wholestep.testing import run_ranks

WIDTH = 5000


def toy_model() -> torch.nn.Module:
    """10 -> 5000 -> 5000 -> 5000 -> 5, as in the distributed tests of torch."""
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(
        linear(10, WIDTH), relu(), linear(WIDTH, WIDTH), relu(), linear(WIDTH, WIDTH), relu(), linear(WIDTH, 5)
    )


def step_times(path: str, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of the slowest rank, by backend; and the loss, which must agree."""
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    models = {name: DistributedDataParallel(toy_model(), process_group=group) for name, group in groups.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in groups}
    for step in range(steps):
        torch.manual_seed(step * size + rank)
        x, losses = torch.randn(20, 10), []
        for name, model in models.items():
            comm.barrier()
            began = time.perf_counter()
            optimizers[name].zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizers[name].step()
            slowest = torch.tensor([time.perf_counter() - began])
            comm.all_reduce(slowest, "max")
            times[name].append(slowest.item())
            losses.append(loss.item())
        assert max(losses) - min(losses) <= 1e-3 * max(losses), losses
    dist.destroy_process_group()
    return times


def main() -> None:
    """Times the steps of both sides in turns and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        times = run_ranks(step_times, options.ranks, "shm", (path, options.steps), timeout=3600)[0]
    median = {name: statistics.median(found[2:]) for name, found in times.items()}
    print(
        f"{options.ranks} ranks: shm {median['shm'] * 1e3:.0f} ms, Gloo {median['gloo'] * 1e3:.0f} ms a step, ", end=""
    )
    print(f"shm / Gloo {median['shm'] / median['gloo']:.2f}")


if __name__ == "__main__":
    main()
