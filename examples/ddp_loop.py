"""An eager loop under `DistributedDataParallel`.

    wholestep run -n 2 examples/ddp_loop.py

BatchNorm sees the batches of all ranks; gradients are sent in 16 bits.
"""

from __future__ import annotations

import torch
from torch import nn

from wholestep import comm
from wholestep.parallel import DistributedDataParallel, SyncBatchNorm, fp16_compress_hook


def main() -> list[float]:
    """Trains, and gives this rank's losses."""
    comm.init_process_group()
    torch.manual_seed(0)
    rank, losses = comm.get_rank(), []
    layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(layers))
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for epoch in range(5):
        for _ in range(8):
            x = torch.randn(32, 16, generator=generator)
            loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    comm.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
