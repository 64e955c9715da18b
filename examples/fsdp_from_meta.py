"""A loop under `fully_shard` whose model no process ever holds, and which goes on after failures.

    wholestep run -n 2 --max-restarts 3 examples/fsdp_from_meta.py fsdp-out

Each rank makes its parts alone. Kill a rank, or send SIGTERM and start it again: the losses are those of an
undisturbed run.
"""

from __future__ import annotations

import sys

import torch
from gpt import GPT, GPTConfig

from wholestep import comm
from wholestep.parallel import Checkpointer, deferred, fully_shard

STEPS, BATCH, LENGTH, VOCABULARY = 30, 8, 32, 96


def batch(step: int) -> torch.Tensor:
    """[rows of this rank, LENGTH + 1]: lines that count up; the step alone says which."""
    first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    whole = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return whole.chunk(comm.get_world_size())[comm.get_rank()]


def main(folder: str) -> None:
    """Trains a small GPT to count."""
    comm.init_process_group()
    torch.manual_seed(0)
    with deferred():
        model = GPT(GPTConfig(layers=2, width=128, context=LENGTH, vocabulary=VOCABULARY))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = Checkpointer(folder, model, optimizer, every=10)
    for step in range(checkpoints.resume(), STEPS):
        rows = batch(step)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        comm.all_reduce(mean, "avg")
        if comm.get_rank() == 0:
            print(f"step {step}: loss {float(mean):.4f}")
        checkpoints.step(step + 1)
    comm.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
