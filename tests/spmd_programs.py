"""Steps run in every rank: once as stock DistributedDataParallel, once compiled with a plan."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from zoo.nets import GPT, MLP, ConvNet

import wholestep as ws
from wholestep import comm


@dataclass
class Case:
    """A model, its optimizer, a step and its batches."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    step: Callable[..., Any]
    batch: Callable[[], tuple[Tensor, ...]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(model, opt, x, y):
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def zeroed_first(model, opt, x, y):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def filled_with_zeros(model, opt, x, y):
    opt.zero_grad(set_to_none=False)
    model(x, y).backward()
    opt.step()


def clipped(model, opt, x, y):
    opt.zero_grad()
    _, loss = model(x, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    return loss.detach(), norm


def accumulated(model, opt, x, y):
    for i in range(3):
        quiet = i < 2 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if quiet else contextlib.nullcontext():
            model(x[i::3], y[i::3]).backward()
    opt.step()
    opt.zero_grad()


def kept(model, opt, x, y):
    """Never zeroed: gradients add up over the calls."""
    model(x, y).backward()
    opt.step()


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6), torch.randint(4, (6,))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(4, (4,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(19, (2, 8)), torch.randint(19, (2, 8))


CASES = {
    "mlp": Case(MLP, sgd, plain, rows),
    "mlp filled with zeros": Case(MLP, sgd, filled_with_zeros, rows),
    "convnet": Case(ConvNet, sgd, zeroed_first, images),
    "gpt": Case(lambda: GPT(dropout=0.1), adamw, clipped, tokens),
    "accumulated": Case(MLP, adamw, accumulated, rows),
    "kept": Case(MLP, sgd, kept, rows),
}


def mesh() -> ws.DeviceMesh:
    return ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))


def seen(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that must be equal: parameters, buffers, gradients and optimizer state."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: value.detach().clone() for name, value in inner.state_dict().items()}
    for (name, parameter), number in zip(inner.named_parameters(), range(1000), strict=False):
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad.clone()
        for key, value in opt.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"state {number} {key}"] = value.clone()
    return found


def against_ddp(name: str, steps: int = 4) -> list[tuple[Any, Any]]:
    """Runs a case both ways; gives for each step what both saw."""
    case, rank = CASES[name], comm.get_rank()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=comm.get_world_size(), store=dist.HashStore())
    raise AssertionError


def snapshots(name: str, how: str, steps: int, plan: Any = None) -> list[dict[str, Tensor]]:
    """One way to run a case, from the same seeds on each call; rank r draws its own batches and dropout."""
    case = CASES[name]
    torch.manual_seed(comm.get_rank() if how == "plan" else 0)  # the plan starts all ranks with rank 0's parameters
    model = case.model()
    opt = case.optimizer(model)
    if how == "ddp":
        model, step = DistributedDataParallel(model), case.step
    else:
        step = ws.compile(case.step, mesh=mesh(), plan=plan or ws.DataParallel("dp"))
    torch.manual_seed(1 + comm.get_rank())
    found = []
    for _ in range(steps):
        result = step(model, opt, *case.batch())
        found.append(seen(model, opt) | {"result": copy.deepcopy(result)})
    if how == "plan":
        assert len(step.recompiles) <= 1, step.recompiles  # a momentum begins as a copy, a gradient as none
    return found
