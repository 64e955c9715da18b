"""Checkpoints in every rank."""

from __future__ import annotations

import copy
import os
import signal
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from wholestep import comm
from wholestep.checkpoint.load import Reader
from wholestep.errors import CheckpointError
from wholestep.tensor_parts import Part, mark_part, narrow_to, part_of


def net(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)  # ranks that are threads share the default one
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.BatchNorm1d(12), nn.Linear(12, 5, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return model


def train_step(model, opt, x):
    loss = F.layer_norm(model(x), (5,)).square().mean() + model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()


def step_of(plan: str) -> Any:
    if plan == "alone":
        return train_step
    mesh = ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))
    kinds = {
        "whole": lambda: ws.DataParallel("dp"),
        "sharded": lambda: ws.ShardedOptimizer("dp", min_bytes=1),
        "fully": lambda: ws.FullyShard("dp", min_bytes=1),
    }
    return ws.compile(train_step, mesh=mesh, plan=kinds[plan](), fullgraph=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(number: int, plan: str = "whole") -> torch.Tensor:
    """The same on every rank: then any number of ranks trains alike, batch statistics included.

    In the global view each rank has its rows.
    """
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return whole.chunk(comm.get_world_size())[comm.get_rank()] if plan == "fully" else whole


def train(plan: str, path: str, steps: int) -> dict[str, torch.Tensor]:
    """Trains and saves; gives what a run that goes on has after as many steps again."""
    model = net()
    opt, step = adamw(model), step_of(plan)
    for number in range(steps):
        step(model, opt, batch(number, plan))
    ws.save(path, ws.compile(model, fullgraph=True), opt)
    for number in range(steps, 2 * steps):
        step(model, opt, batch(number, plan))
    return whole(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's state, also where the ranks hold parts of it."""
    return ws.full_state_dict(model) if comm.is_initialized() else copy.deepcopy(model.state_dict())


def resume(plan: str, path: str, steps: int) -> dict[str, Any]:
    """Goes on from a checkpoint in a model that began otherwise."""
    model = net(1)
    opt, step = adamw(model), step_of(plan)
    opt.param_groups[0]["lr"] = 7.0
    ws.load(path, model, opt)
    parts = 0
    for number in range(steps, 2 * steps):
        step(model, opt, batch(number, plan))
        parts = sum(part_of(v) is not None for held in opt.state.values() for v in held.values())
    if plan == "fully":  # into parts that are there already
        ws.load(path, model, opt)
        for number in range(steps, 2 * steps):
            step(model, opt, batch(number, plan))
    return {"weights": whole(model), "parts": parts, "refused": [*map(refused, model.state_dict().values())]}


def refused(value: torch.Tensor) -> bool:
    """Whether a tensor of a state dict refuses what torch.distributed.checkpoint asks of it."""
    try:
        return value.__create_write_items__("w", value) is None  # type: ignore[attr-defined]
    except AttributeError:  # as of a whole tensor
        return False
    except CheckpointError:
        return True


# Blocks of a matrix over a mesh ------------------------------------------------------------------------------------


def blocks(path: str) -> str:
    """Each of four ranks saves a quarter of a matrix, and half of a bias that another holds too."""
    row, column = divmod(comm.get_rank(), 2)
    layer = nn.Linear(4, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(24.0).view(6, 4))
        layer.bias.copy_(torch.arange(6.0))
    narrow_to(layer.weight, Part.of((6, 4), [(3 * row, 3 * row + 3), (2 * column, 2 * column + 2)]))
    narrow_to(layer.bias, Part.rows((6,), 3 * row, 3 * row + 3))
    ws.save(path, layer)
    layer.weight.data += 1
    mark_part(layer.weight, Part.of((6, 4), [(0, 3), (0, 2)]))
    try:
        ws.save(path, layer)
    except CheckpointError as error:
        return str(error)
    return ""


def columns(path: str) -> tuple[torch.Tensor, int]:
    """Each rank loads some columns of the matrix; gives them, and how many bytes were read for them."""
    rank, size = comm.get_rank(), comm.get_world_size()
    width = 4 // size
    weight = torch.zeros(6, width)
    part = Part.of((6, 4), [(0, 6), (rank * width, rank * width + width)])
    reader = Reader(path)
    reader.read("model", "weight", part, weight)
    layer = nn.Linear(4, 6)
    narrow_to(layer.weight, part)
    ws.load(path, layer)
    assert torch.equal(layer.weight, weight) and torch.equal(layer.bias, torch.arange(6.0))
    return weight, reader.nbytes


def mistakes(path: str) -> dict[str, str]:
    """What every rank says when one alone has another model, on saving and on loading."""
    rank, found = comm.get_rank(), {}
    ws.save(path, nn.Linear(3, 2))
    other = nn.Linear(3, 2, bias=rank != 1) if rank else nn.Linear(3, 2)
    before = copy.deepcopy(other.state_dict())
    for name, call in (("load", ws.load), ("save", lambda p, m: ws.save(p, nn.Linear(3, 2 + rank)))):
        try:
            call(path, other)
        except CheckpointError as error:
            found[name] = str(error)
    found["unchanged"] = all(torch.equal(before[key], value) for key, value in other.state_dict().items())
    return found


def saves_until_one_dies(path: str) -> None:
    """Saves a model of ones, of twos, and so on; rank 1 is killed in the middle of that."""
    layer = nn.Linear(200, 200)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    ws.save(path, layer)  # one that is there whenever the rank dies
    if comm.get_rank() == 1:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(1, 1_000_000):
        with torch.no_grad():
            layer.weight.fill_(number)
            layer.bias.fill_(number)
        ws.save(path, layer)


def with_extra(path: str) -> dict[str, Any]:
    """What each rank loads besides a model, when each rank saves its own."""
    model = net()
    ws.save(path, model, extra={"rank": comm.get_rank(), "mean": torch.full((2,), 2.0 + comm.get_rank())})
    found = ws.load(path, model)
    return {"rank": found["rank"], "mean": found["mean"].tolist()}
