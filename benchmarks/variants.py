"""The ways to run a training step that are measured against each other, one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import wholestep as ws
from benchmarks.models import train_step
from wholestep import comm, parallel
from wholestep.spmd import Plan

Step = Callable[..., torch.Tensor]


def _model_as_is(model: nn.Module) -> nn.Module:
    return model


def _step_as_is() -> Step:
    return train_step


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


def _fused_adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4, fused=True)


def _ddp(model: nn.Module) -> nn.Module:
    dist.init_process_group("gloo")
    return DistributedDataParallel(model)


def _compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model))


def _compiled_ddp(model: nn.Module) -> nn.Module:
    return _compiled(_ddp(model))


def _sharded(model: nn.Module, fully_shard: Callable[..., object]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    return cast(nn.Module, fully_shard(model))


def _fsdp2(model: nn.Module) -> nn.Module:
    dist.init_process_group("gloo")
    return _sharded(model, fully_shard)


def _ours_fsdp(model: nn.Module) -> nn.Module:
    comm.init_process_group()
    return _sharded(model, parallel.fully_shard)


def _ours_ddp(model: nn.Module) -> nn.Module:
    comm.init_process_group()
    return parallel.DistributedDataParallel(model)


def _ours_ddp_compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, ws.compile(_ours_ddp(model)))


def _ours() -> Step:
    return ws.compile(train_step, fullgraph=True)


def _ours_in_regions() -> Step:
    return ws.compile(train_step, fullgraph=True, passes=[ws.passes.fuse_pointwise])


def _spread(plan: Plan) -> Callable[[], Step]:
    """Our step on two ranks, by a plan along their one axis."""

    def make() -> Step:
        mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return ws.compile(train_step, mesh=mesh, plan=plan)  # type: ignore[no-any-return]

    return make


def _gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(batch["x"], batch["y"])
    loss.backward()
    return cast(torch.Tensor, loss.detach())


def _spread_gradients() -> Step:
    """Forward and backward by a plan, the update in eager: what is compiled of `ws.compile(ddp)`."""
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradients = ws.compile(_gradients, mesh=mesh, plan=ws.DataParallel("dp"))

    def step(model: nn.Module, opt: Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = gradients(model, batch)
        opt.step()
        opt.zero_grad()
        return cast(torch.Tensor, loss)

    return step


@dataclass(frozen=True)
class Variant:
    """One way to run a step.

    Attributes:
        title: its name in the table.
        ranks: processes it needs, each with a batch of its own.
        baseline: the variant that its ratio is taken against.
        model: wraps the model, before the optimizer sees its parameters.
        step: gives the callable that is timed.
        optimizer: makes the optimizer.
        slow_start: True where the first step takes so long that it only runs when asked for.
    """

    title: str
    ranks: int = 1
    baseline: str = "eager"
    model: Callable[[nn.Module], nn.Module] = _model_as_is
    step: Callable[[], Step] = _step_as_is
    optimizer: Callable[[nn.Module], Optimizer] = _adamw
    slow_start: bool = False


def _of_fused(name: str, plan: Plan) -> Variant:
    """Our step by a plan with the fused optimizer, beside DDP with the same."""
    title = f"wholestep, {name}, AdamW(fused=True)"
    return Variant(title, 2, "ddp-of-fused", step=_spread(plan), optimizer=_fused_adamw)


VARIANTS = {
    "eager": Variant("eager"),
    "eager-fused": Variant("eager, AdamW(fused=True)", optimizer=_fused_adamw),
    "torch-compile": Variant("torch.compile(model)", model=_compiled, slow_start=True),
    "ours": Variant("wholestep", step=_ours),
    "ours-regions": Variant("wholestep, fuse_pointwise", step=_ours_in_regions),
    "ours-regions-of-fused": Variant(
        "wholestep, fuse_pointwise, AdamW(fused=True)", 1, "eager-fused", step=_ours_in_regions, optimizer=_fused_adamw
    ),
    "ours-of-fused": Variant("wholestep, AdamW(fused=True)", 1, "eager-fused", step=_ours, optimizer=_fused_adamw),
    "ddp": Variant("DDP, Gloo", 2, "ddp", model=_ddp),
    "compiled-ddp": Variant("torch.compile(DDP), Gloo", 2, "ddp", model=_compiled_ddp, slow_start=True),
    "fsdp2": Variant("FSDP2, Gloo", 2, "ddp", model=_fsdp2),
    "ours-ddp": Variant("parallel.DistributedDataParallel", 2, "ddp", model=_ours_ddp),
    "ours-fsdp": Variant("parallel.fully_shard", 2, "fsdp2", model=_ours_fsdp),
    "ours-ddp-compiled": Variant("wholestep, our DDP in the step", 2, "ours-dp", model=_ours_ddp, step=_ours),
    "ours-fsdp-compiled": Variant(
        "wholestep, our fully_shard in the step", 2, "ours-fs-always", model=_ours_fsdp, step=_ours
    ),
    "ours-dp": Variant("wholestep, DataParallel", 2, "ddp", step=_spread(ws.DataParallel("dp"))),
    "ours-so": Variant("wholestep, ShardedOptimizer", 2, "ddp", step=_spread(ws.ShardedOptimizer("dp"))),
    "ours-fs": Variant("wholestep, FullyShard", 2, "ddp", step=_spread(ws.FullyShard("dp"))),
    "ddp-of-fused": Variant("DDP, Gloo, AdamW(fused=True)", 2, "ddp-of-fused", model=_ddp, optimizer=_fused_adamw),
    "ours-ddp-of-fused": Variant(
        "parallel.DistributedDataParallel, AdamW(fused=True)", 2, "ddp-of-fused", model=_ours_ddp,
        optimizer=_fused_adamw,
    ),
    "fsdp2-of-fused": Variant(
        "FSDP2, Gloo, AdamW(fused=True)", 2, "ddp-of-fused", model=_fsdp2, optimizer=_fused_adamw
    ),
    "ours-fsdp-of-fused": Variant(
        "parallel.fully_shard, AdamW(fused=True)", 2, "fsdp2-of-fused", model=_ours_fsdp, optimizer=_fused_adamw
    ),
    "ours-ddp-module-compiled": Variant(
        "ws.compile(our DDP), AdamW(fused=True)", 2, "ours-dp-gradients", model=_ours_ddp_compiled,
        optimizer=_fused_adamw,
    ),
    "ours-module-unreduced": Variant(
        "ws.compile(model) that reduces nothing, AdamW(fused=True)", 2, "ours-dp-gradients",
        model=lambda model: cast(nn.Module, ws.compile(model)), optimizer=_fused_adamw,
    ),
    "ours-dp-gradients": Variant(
        "wholestep, DataParallel of forward and backward, AdamW(fused=True)", 2, "ddp-of-fused",
        step=_spread_gradients, optimizer=_fused_adamw,
    ),
    "ours-dp-of-fused": _of_fused("DataParallel", ws.DataParallel("dp")),
    "ours-so-of-fused": _of_fused("ShardedOptimizer", ws.ShardedOptimizer("dp")),
    "ours-fs-of-fused": _of_fused("FullyShard", ws.FullyShard("dp")),
    "ours-fs-always": Variant(
        "wholestep, FullyShard(gather='always')", 2, "ddp", step=_spread(ws.FullyShard("dp", gather="always"))
    ),
}
