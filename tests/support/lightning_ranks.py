"""What ranks run for the tests of Lightning: the same module under its own strategy and under ours."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy as StockStrategy
from torch import nn

import wholestep as ws
from wholestep import comm, parallel
from wholestep.parallel.integrations.lightning import DDPStrategy, FullyShardStrategy

QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Module(pl.LightningModule):
    """Two layers and a BatchNorm; steps are Lightning's or the module's own."""

    def __init__(self, manual: bool = False, unused: bool = False, seed: int | None = None,
                 sometimes: bool = False) -> None:  # fmt: skip
        super().__init__()
        mine = comm.get_rank() if comm.is_initialized() else 0  # rank 0's values count
        torch.manual_seed(mine if seed is None else seed)
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.spare, self.sometimes = nn.Linear(2, 2) if unused or sometimes else None, sometimes
        self.kinds: set[str] = set()
        self.reductions = 0

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        found = self.net(x)
        if self.sometimes and index % 2 == 0:
            found = found + self.spare(found)
        self.kinds |= {type(self.net[1]).__module__.split(".")[0], str(found.dtype)}
        loss = nn.functional.mse_loss(found, y)
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

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.net(batch)

    def on_train_end(self) -> None:
        wrapper = self.trainer.strategy.model
        self.reductions = (
            wrapper.reducer.times.iterations if isinstance(wrapper, parallel.DistributedDataParallel) else 0
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Loose(Module):
    """A parameter that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


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


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """But for noise (a norm cancels the bias before it), and buffers, which are rank 0's under one wrapper alone."""
    names = [
        name for name in other if "running" not in name and name not in ("net.0.bias", "net.1.num_batches_tracked")
    ]
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in names)


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
        parts = Module(manual, seed=0)
        fit(parts, FullyShardStrategy(), 2, **settings)
        found[f"{name} sharded"] = close(ws.full_state_dict(parts), modules[1].state_dict())
    some = [Module(seed=0, sometimes=True), Module(seed=0, sometimes=True)]
    for one, strategy in zip(some, (StockStrategy(find_unused_parameters=True), FullyShardStrategy()), strict=True):
        fit(one, strategy, accumulate_grad_batches=2)  # the batch that reduces does not use the spare layer
    found["sometimes sharded"] = close(ws.full_state_dict(some[1]), some[0].state_dict())
    whole = Module()
    fit(whole, DDPStrategy(bucket_cap_mb=0.0001), 2)
    half, rest, path = Module(), Module(), str(Path(folder, "half.ckpt"))
    fit(half, DDPStrategy(), 1, logger=CSVLogger(folder, name="log"), log_every_n_steps=1).save_checkpoint(path)
    fit(rest, DDPStrategy(), 2, ckpt=path)
    found["resumed"] = equal(state(whole), state(rest))
    half, rest, path = Module(seed=0), Module(seed=1), str(Path(folder, "parts.ckpt"))
    fit(half, FullyShardStrategy(), 1).save_checkpoint(path)
    trainer = fit(rest, FullyShardStrategy(), 2, ckpt=path)
    found["sharded resumed"] = close(ws.full_state_dict(rest), whole.state_dict())
    saved = torch.load(path, weights_only=True)
    found["sharded saved"] = [saved["state_dict"]["net.0.weight"].shape, rest.net[0].weight.shape]
    found["sharded saved"].append(saved["optimizer_states"][0]["state"][0]["exp_avg"].shape)
    trainer.validate(rest, torch.utils.data.DataLoader(torch.ones(4, 6)), verbose=False)
    found["sharded resumed"] &= close(ws.full_state_dict(rest), whole.state_dict())
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
        ("loose", FullyShardStrategy(), Loose(), {}),
        ("averaging", FullyShardStrategy(), Module(), {"callbacks": [EMAWeightAveraging()]}),
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
