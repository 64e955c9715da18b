"""A script that trains with a `Checkpointer`, on any number of ranks, and writes down its losses.

Arguments: the directory of the run, the number of steps, and what becomes of the run: "" or, of the last rank in the
middle of its first start, "raise" or "kill"; "terminate" for "raise" and, after a restart, SIGTERM; "sleep" for slow
steps.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn

from wholestep import comm
from wholestep.parallel import Checkpointer, fully_shard


def main(folder: str, steps: int, fault: str) -> None:
    """Trains; each loss is a line of ``losses``: the step, and the number as bytes in hexadecimal."""
    launched = not comm.is_initialized()
    if launched:
        comm.init_process_group()
    rank, size = comm.get_rank(), comm.get_world_size()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    checkpoints = Checkpointer(Path(folder) / "saved", model, optimizer, every=3, keep=2, scheduler=scheduler)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    for step in range(checkpoints.resume(), steps):
        noise = random.random() + float(numpy.random.rand()) + float(torch.rand(()))  # the same on all ranks
        rows = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = (model(rows.chunk(size)[rank]) - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == size - 1 and (step, start) == (steps // 2, "0"):
            if fault in ("raise", "terminate"):
                raise RuntimeError("a fault")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == size - 1 and (step, start, fault) == (steps - 6, "1", "terminate"):
            os.kill(os.getpid(), signal.SIGTERM)
        mean = loss.detach()
        comm.all_reduce(mean, "avg")
        if rank == 0:
            with open(Path(folder) / "losses", "a", encoding="utf8") as file:
                file.write(f"{step} {float(mean).hex()} {os.getpid()}\n")
        if fault == "sleep":
            time.sleep(0.05)
        checkpoints.step(step + 1)
    if launched:
        comm.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
