"""What ranks run for the long test of wrappers: models under each, beside the naive form, in float64."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import wholestep as ws
from tests.support.fully_shard_transformers import shard_layers
from tests.support.parallel_ranks import naive_gradients
from tests.support.spmd_models import FIRST, HELD_OUT, Batch, make, train
from wholestep import comm, parallel
from wholestep.parallel import DistributedDataParallel as DDP

MODELS = [*FIRST, *HELD_OUT]
ITERATIONS = 3
SMALL = {"bucket_cap_mb": 0.001}
DRAWING = threading.Lock()  # ranks that are threads have one generator


def hooked(hook: Any, state: Callable[[], Any] = lambda: None) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DDP(model, **SMALL)
        wrapped.register_comm_hook(state(), hook)
        return wrapped

    return wrap


# the wrapped model, and how its step runs: eager, "compiled", with a backward in `no_sync` before, or under `join`
WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DDP": (DDP, ""),
    "small buckets as views": (lambda m: DDP(m, **SMALL, gradient_as_bucket_view=True), ""),
    "find_unused_parameters": (lambda m: DDP(m, **SMALL, find_unused_parameters=True), ""),
    "static_graph": (lambda m: DDP(m, static_graph=True), ""),
    "allreduce_hook": (hooked(parallel.allreduce_hook), ""),
    "post_localSGD_hook": (
        hooked(parallel.post_localSGD_hook, lambda: parallel.PostLocalSGDState(None, None, 1)), "",
    ),
    "PowerSGD before it starts": (
        hooked(parallel.powerSGD_hook, lambda: parallel.PowerSGDState(None, start_powerSGD_iter=1000)), "",
    ),
    "no_sync": (DDP, "no_sync"),
    "join": (DDP, "join"),
    "DDP, compiled step": (DDP, "compiled"),
    "a hook, compiled step": (hooked(parallel.allreduce_hook), "compiled"),
    "ws.compile(ddp)": (lambda m: ws.compile(DDP(m)), ""),
    "DDP(ws.compile(model))": (lambda m: DDP(ws.compile(m)), ""),
    "fully_shard": (shard_layers, ""),
}  # fmt: skip


def batch_of(name: str, iteration: int) -> Batch:
    """This rank's rows in an iteration."""
    with DRAWING:
        torch.manual_seed(1000 * iteration + comm.get_rank())
        batch = {**FIRST, **HELD_OUT}[name][1]()
    return {key: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for key, v in batch.items()}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def beside_naive(name: str, way: str) -> float:
    """The largest difference of losses, weights and buffers from the naive form's."""
    wrap, manner = WAYS[way]
    with DRAWING:
        model, _, _ = make(name)
    naive, rank, size = copy.deepcopy(model), comm.get_rank(), comm.get_world_size()
    wrapped = wrap(model)
    opts = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (wrapped, naive)]
    step = ws.compile(train) if manner == "compiled" else train
    mine, joins = ITERATIONS, manner == "join"
    rounds = size if joins else ITERATIONS
    losses: list[list[float]] = [[], []]
    if joins:
        mine = rank + 1
    with wrapped.join() if joins else nullcontext():
        for iteration in range(mine):
            if manner == "no_sync":
                with wrapped.no_sync():
                    loss_of(wrapped, batch_of(name, iteration + 50)).backward()
            losses[0].append(float(step(wrapped, opts[0], batch_of(name, iteration)).detach()))
    for iteration in range(rounds):
        if way != "fully_shard":
            for one in naive.buffers():
                comm.broadcast(one, size - 1 if joins else 0)
        if manner == "no_sync":
            loss_of(naive, batch_of(name, iteration + 50)).backward()
        if iteration < mine:
            loss = loss_of(naive, batch_of(name, iteration))
            loss.backward()
            losses[1].append(float(loss.detach()))
        naive_gradients(naive)
        if iteration < mine:
            nn.utils.clip_grad_norm_(naive.parameters(), 1.0)
            opts[1].step()
        opts[1].zero_grad()
    if joins:
        for one in [*naive.parameters(), *naive.buffers()]:
            comm.broadcast(one.detach(), size - 1)
    whole = ws.full_state_dict(wrapped) if way == "fully_shard" else model.state_dict()
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    for key, one in naive.state_dict().items():
        apart = float((one.double() - whole[key].double()).abs().max()) if one.numel() else 0.0
        worst = max(worst, math.inf if math.isnan(apart) else apart)
    return worst


def beside_naive_all(models: list[str], ways: list[str]) -> dict[str, Any]:
    """Model and way -> the difference, or the error."""
    found: dict[str, Any] = {}
    for name in models:
        for way in ways:
            try:
                found[f"{name}: {way}"] = beside_naive(name, way)
            except (RuntimeError, ValueError, TypeError) as error:
                found[f"{name}: {way}"] = f"{type(error).__name__}: {error}"
    return found
