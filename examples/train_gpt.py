"""Trains a byte-level GPT on the source of the standard library. The same step, six ways to run it:

    python examples/train_gpt.py --job eager
    python examples/train_gpt.py --job compiled
    wholestep run -n 2 examples/train_gpt.py --job ddp
    wholestep run -n 2 examples/train_gpt.py --job compiled-dp
    wholestep run -n 2 examples/train_gpt.py --job sharded-optimizer
    wholestep run -n 2 examples/train_gpt.py --job fully-sharded
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig
from text import batch, standard_library
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import wholestep as ws

ROWS = 8  # of the global batch, shared out to the ranks
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

Step = Callable[[nn.Module, Optimizer, Tensor, Tensor], Tensor]


def train_step(model: nn.Module, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """An ordinary training step: nothing in it knows of compilers or ranks."""
    loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def eager(model: nn.Module) -> tuple[nn.Module, Step]:
    """One process, as PyTorch runs it."""
    return model, train_step


def compiled(model: nn.Module) -> tuple[nn.Module, Step]:
    """One process, the whole step as one program."""
    return model, ws.compile(train_step)


def ddp(model: nn.Module) -> tuple[nn.Module, Step]:
    """PyTorch's own data parallelism over Gloo."""
    init_process_group("gloo")
    return DistributedDataParallel(model), train_step


def compiled_dp(model: nn.Module) -> tuple[nn.Module, Step]:
    """The whole step as one program on each rank, gradients averaged inside it."""
    return model, spread(ws.DataParallel("dp"))


def sharded_optimizer(model: nn.Module) -> tuple[nn.Module, Step]:
    """The same; each rank updates a part of every large parameter, and keeps the optimizer's state of that part."""
    return model, spread(ws.ShardedOptimizer("dp"))


def fully_sharded(model: nn.Module) -> tuple[nn.Module, Step]:
    """Each rank keeps a part of the large parameters; the step means what it means on one device."""
    return model, spread(ws.FullyShard("dp"))


def spread(plan: Any) -> Step:
    """The step on all ranks, by a plan."""
    mesh = ws.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    return ws.compile(train_step, mesh=mesh, plan=plan)  # type: ignore[no-any-return]


JOBS = {
    "eager": eager,
    "compiled": compiled,
    "ddp": ddp,
    "compiled-dp": compiled_dp,
    "sharded-optimizer": sharded_optimizer,
    "fully-sharded": fully_sharded,
}


def warm_up_then_cosine(steps: int, warm: int = 20) -> Callable[[int], float]:
    """The learning rate's factor at each step: a line up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))

    return factor


def peak_memory() -> int:
    """Bytes of main memory that this process held at its highest point."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def way_of(step: Any) -> str:
    """Which way a step ran, in words."""
    if not isinstance(step, ws.Compiled):
        return "in eager"
    return "its Python at each call" if step.breaks else f"replayed ({step.captures} captured)"


def train(job: str, steps: int, config: GPTConfig) -> tuple[dict[str, object], Step]:
    """Runs one rank of one job; gives what was measured and the step that ran."""
    text = standard_library()
    torch.manual_seed(0)
    model, step = JOBS[job](GPT(config))
    opt = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = LambdaLR(opt, warm_up_then_cosine(steps))
    torch.manual_seed(1 + RANK)  # each rank drops out its own activations; fully sharded, rank 0's seed is that of all
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(steps):
        x, y = batch(text, number, ROWS, config.context, RANK, RANKS)
        start = time.perf_counter()
        loss = step(model, opt, x, y)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        schedule.step()
        if RANK == 0:
            print(f"step {number + 1}/{steps}  loss {losses[-1]:.4f}", flush=True)
    measured = {"job": job, "rank": RANK, "losses": losses, "seconds": seconds, "peak_memory": peak_memory()}
    return measured | {"parameters": sum(p.numel() for p in model.parameters()), "way": way_of(step)}, step


def main() -> None:
    """Reads the command line, trains, and leaves what was measured in a file per rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, default="compiled")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    measured, step = train(options.job, options.steps, GPTConfig(layers=options.layers))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.job}.{RANK}.json").write_text(json.dumps(measured))
    if RANK == 0 and step is not train_step:
        (options.out / f"{options.job}.program.py").write_text(step.code)  # type: ignore[attr-defined]
    if options.job == "ddp":
        destroy_process_group()


if __name__ == "__main__":
    main()
