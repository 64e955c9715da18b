"""What ranks run for the tests of Lightning: the same module under its own strategy and under ours."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy as StockStrategy
from torch import nn

from wholestep import comm, parallel
from wholestep.parallel.integrations.lightning import DDPStrategy

QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Module(pl.LightningModule):
    """Two layers and a BatchNorm; steps are Lightning's or the module's own."""

    def __init__(self, manual: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(comm.get_rank() if comm.is_initialized() else 0)  # rank 0's values count
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.spare = nn.Linear(2, 2) if unused else None
        self.kinds: set[str] = set()
        self.reductions = 0

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        self.kinds |= {type(self.net[1]).__module__.split(".")[0], str(self.net[0](x).dtype)}
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=index % 2 == 1):
                self.manual_backward(loss)
            if index % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def on_train_end(self) -> None:
        wrapper = self.trainer.strategy.model
        self.reductions = (
            wrapper.reducer.times.iterations if isinstance(wrapper, parallel.DistributedDataParallel) else 0
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(module: Module, strategy: Any, epochs: int = 1, ckpt: str | None = None, **settings: Any) -> pl.Trainer:
    """Six batches of four rows on each of two ranks, in each epoch."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(48, 6, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :2] ** 2)
    settings = {"logger": False, "accelerator": "cpu", "devices": 2, **QUIET} | settings
    trainer = pl.Trainer(strategy=strategy, max_epochs=epochs, **settings)
    trainer.fit(module, torch.utils.data.DataLoader(data, 4), ckpt_path=ckpt)
    return trainer


def state(module: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in module.state_dict().values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def checks(port: int, folder: str) -> dict[str, Any]:
    """Everything, in one process a rank: the import takes longer than all of it."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank = comm.get_rank()
    comm.destroy_process_group()  # Lightning begins, and ours joins the group that it has made
    found: dict[str, Any] = {}
    for name, manual, settings in (
        ("automatic", False, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("manual", True, {}),
    ):
        modules = [Module(manual), Module(manual)]
        trainers = [fit(m, s, 2, **settings) for m, s in zip(modules, (StockStrategy(), DDPStrategy()), strict=True)]
        found[name] = equal(*map(state, modules)), modules[1].reductions
        losses = [float(trainer.logged_metrics["loss"]) for trainer in trainers]
        found[f"{name} logs"] = losses[0] == losses[1]
    whole = Module()
    fit(whole, DDPStrategy(bucket_cap_mb=0.0001), 2)
    half, rest, path = Module(), Module(), str(Path(folder, "half.ckpt"))
    fit(half, DDPStrategy(), 1, logger=CSVLogger(folder, name="log"), log_every_n_steps=1).save_checkpoint(path)
    fit(rest, DDPStrategy(), 2, ckpt=path)
    found["resumed"] = equal(state(whole), state(rest))
    found["logged"] = sorted(p.name for p in Path(folder, "log").rglob("*.csv"))
    synced = Module()
    fit(synced, DDPStrategy(), sync_batchnorm=True, precision="bf16-mixed")
    found["synced"] = sorted(synced.kinds), type(synced.net[1]).__module__.split(".")[0]
    averaged = Module()
    local = parallel.PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
    hook = {"ddp_comm_state": local, "ddp_comm_hook": parallel.post_localSGD_hook}
    fit(averaged, DDPStrategy(model_averaging_period=5, **hook))
    found["averaged"] = [round(float(one.double().sum()), 9) for one in averaged.parameters()]
    for name, strategy, module, settings in (
        ("unused", DDPStrategy(), Module(unused=True), {}),
        ("no period", DDPStrategy(**hook), Module(), {}),
        ("precision", DDPStrategy(precision_plugin=FSDPPrecision("bf16-mixed")), Module(), {}),
        ("devices", DDPStrategy(), Module(), {"devices": 1}),
    ):
        try:
            fit(module, strategy, **settings)
            found[name] = "no error"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found | {"rank": rank}
