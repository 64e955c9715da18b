"""Stock DistributedDataParallel on a wide MLP, over shm and over Gloo, step by step in turns.

python benchmarks/comm_ddp.py --ranks 2 --steps 8 --optimizer sgd

Beside them two bounds, in the same turns: `free`, DDP with a hook that communicates nothing, which keeps what DDP
itself does (copies into buckets and back), and `bare`, the model without DDP. No transport can be below `free`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholestep.comm.torch_backend  # noqa: F401 - the import registers the backend
from wholestep import comm
from wholestep.testing import run_ranks

WIDTH = 5000
# "none" ends the step with the gradients, as torch's own distributed tests of this model do
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "none": lambda parameters: None,
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adamw": torch.optim.AdamW,
}


def toy_model() -> torch.nn.Module:
    """10 -> 5000 -> 5000 -> 5000 -> 5, as in the distributed tests of torch."""
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(
        linear(10, WIDTH), relu(), linear(WIDTH, WIDTH), relu(), linear(WIDTH, WIDTH), relu(), linear(WIDTH, 5)
    )


def nothing(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What a comm hook gives that leaves the gradients as they are."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def step_times(path: str, steps: int, optimizer: str) -> dict[str, list[float]]:
    """Seconds of each step of the slowest rank, by backend; and the loss, which must agree."""
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    models: dict[str, torch.nn.Module] = {
        name: DistributedDataParallel(toy_model(), process_group=group) for name, group in groups.items()
    }
    free = DistributedDataParallel(toy_model(), process_group=groups["shm"])
    free.register_comm_hook(None, lambda _state, bucket: nothing(bucket))
    models |= {"free": free, "bare": toy_model()}
    optimizers = {name: OPTIMIZERS[optimizer](model.parameters()) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps):
        torch.manual_seed(step * size + rank)
        x, losses = torch.randn(20, 10), {}
        for name, model in models.items():
            comm.barrier()
            began = time.perf_counter()
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if optimizers[name] is not None:
                optimizers[name].step()
            slowest = torch.tensor([time.perf_counter() - began])
            comm.all_reduce(slowest, "max")
            times[name].append(slowest.item())
            losses[name] = loss.item()
        assert abs(losses["gloo"] - losses["shm"]) <= 1e-3 * losses["gloo"], losses
    dist.destroy_process_group()
    return times


def main() -> None:
    """Times the steps of both sides in turns and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        times = run_ranks(step_times, options.ranks, "shm", (path, options.steps, options.optimizer), timeout=3600)[0]
    median = {name: statistics.median(found[2:]) for name, found in times.items()}
    print(f"{options.ranks} ranks, ms a step:", ", ".join(f"{name} {took * 1e3:.0f}" for name, took in median.items()))
    print("of Gloo:", ", ".join(f"{name} {took / median['gloo']:.2f}" for name, took in median.items()))


if __name__ == "__main__":
    main()
