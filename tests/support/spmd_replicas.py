"""Random training steps in the local view beside naive replicas, whose gradients are averaged after each backward.

Layers, optimizer, plan and what else a step does are drawn; each rank has batches of its own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.support.spmd_programs import tensors
from wholestep import comm

DOUBLE, WIDTH = torch.float64, 4


class Square(torch.autograd.Function):
    """Times a weight, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad * x * weight, (grad * x * x).sum(0)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, eps=0.1),
    "bilinear": lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
    "embedding": lambda: nn.Embedding(8, WIDTH),
}


class Layer(nn.Module):
    """What one name of `LAYERS` does, with parameters of a few shapes, of which it reads some."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.module = name, MODULES.get(name, nn.Identity)()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).t() if name == "transposed" else torch.randn(WIDTH, WIDTH))
        self.row, self.number = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return LAYERS[self.name](self, x)


def averaged(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - layer.mean


LAYERS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "attention": lambda m, x: x + m.module(x[None], x[None], x[None])[0][0],
    "averaged": averaged,
    "batch norm": lambda m, x: m.module(x),
    "bilinear": lambda m, x: torch.tanh(m.module(x, x)),
    "checkpoint": lambda m, x: checkpoint(lambda a: F.dropout(a @ m.matrix, 0.2), x, use_reentrant=False),
    "custom": lambda m, x: torch.tanh(Square.apply(x, m.row)),
    "detached": lambda m, x: x + x.detach() * 0.5,
    "dropout": lambda m, x: F.dropout(x, 0.25) * m.row,
    "embedding": lambda m, x: x + m.module((x.detach()[:, 0] > 0).long()),
    "linear": lambda m, x: torch.tanh(F.linear(x, m.matrix, m.row)),
    "noise": lambda m, x: x + 0.1 * torch.rand_like(x),
    "number": lambda m, x: x * m.number.exp(),
    "reentrant": lambda m, x: checkpoint(lambda a: torch.tanh(a @ m.matrix), x * 1, use_reentrant=True),
    "sorted": lambda m, x: x.sort(0)[0] @ m.matrix,
    "transposed": lambda m, x: torch.tanh(x @ m.matrix),
}

# With epsilons that do not make much of gradients that vanish but for rounding, which differs with the order of sums.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, foreach=False, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3, lr_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-6, 1e-3)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-3, momentum=0.5, centered=True),
}
READS = [None, None, None, "loss", "gradient", "norm"]


@dataclass
class Program:
    """A step.

    Attributes:
        sizes: rows of the batches of each call; of rank r, ``uneven`` * r more.
        micro: how many batches gradients are summed over.
        clip: how gradients are clipped, if they are.
        reads: what Python reads, so that it runs at each call.
        thaws: from which call on the first layer is trained.
        average: weights are averaged in the step, and how.
        second: another forward or backward besides.
    """

    layers: list[str]
    sizes: list[int]
    uneven: int
    micro: int
    optimizer: str
    groups: int
    zero: str
    clip: str | None
    reads: str | None
    thaws: int
    average: str | None
    second: str | None
    schedule: bool
    plan: ws.DataParallel


def drawn(seed: int) -> Program:
    draw = random.Random(seed)
    rows = draw.choice([3, 4, 6])
    reduce, bucket = draw.choice(["mean", "mean", "sum"]), draw.choice([8, 400, 1 << 20])
    plan: dict[str, Any] = {"reduce": reduce, "bucket_bytes": bucket}
    layers = draw.choices(list(LAYERS), k=draw.randint(1, 4))
    others = ["forward", "backward", "evaluation", *([] if "reentrant" in layers else ["penalty"])]
    kinds = ws.DataParallel("dp", **plan), ws.ShardedOptimizer("dp", min_bytes=draw.choice([1, 100]), **plan)
    return Program(
        layers=layers,
        sizes=draw.choice([[rows] * 3, draw.choices([3, 4, 6], k=3)]),
        uneven=draw.choice([0, 0, 1]),
        micro=draw.choice([1, 1, 2]),
        optimizer=draw.choice(list(OPTIMIZERS)),
        groups=draw.choice([1, 1, 2]),
        zero=draw.choice(["before", "after", "to zeros", "never"]),
        clip=draw.choice([None, None, "norm", "value", "largest"]),
        reads=draw.choice(READS),
        thaws=draw.choice([0, 0, 0, 1]),
        average=draw.choice([None, None, "lerp", "mul"]),
        second=draw.choice([None, None, *others]),
        schedule=draw.random() < 0.3,
        plan=draw.choice(kinds),
    )


class Run:
    """One model, and what trains it.

    Args:
        naive: averages gradients and sends buffers itself.
    """

    def __init__(self, program: Program, seed: int, naive: bool) -> None:
        self.program, self.naive, self.sends = program, naive, True
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.model = nn.Sequential(*map(Layer, program.layers), nn.Linear(WIDTH, 3)).double()
        torch.set_rng_state(state)
        self.model[0].requires_grad_(program.thaws == 0)
        self.weights = [*self.model.parameters()]
        groups = [self.weights[n :: program.groups] for n in range(program.groups)]
        settings = [{"params": group, "weight_decay": 0.02 * n} for n, group in enumerate(groups)]
        self.optimizer = OPTIMIZERS[program.optimizer](settings)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.8)
        self.averages = copy.deepcopy(self.model)

    def forward(self, x: Tensor, adds: bool) -> Tensor:
        """A forward; naive replicas take rank 0's buffers where DistributedDataParallel does."""
        if self.naive and self.sends:
            for buffer in self.model.buffers():
                comm.broadcast(buffer, 0)
        self.sends = torch.is_grad_enabled() and not adds
        return self.model(x)

    def backward(self, loss: Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in self.weights]
        loss.backward()
        for weight, old in zip(self.weights, before, strict=True) if self.naive else ():
            if weight.grad is not None:
                new = (weight.grad if old is None else weight.grad - old).clone(memory_format=torch.contiguous_format)
                comm.all_reduce(new)
                new /= comm.get_world_size() if self.program.plan.reduce == "mean" else 1
                weight.grad.copy_(new if old is None else old + new)

    def clipped(self) -> Tensor | None:
        clip = self.program.clip
        if clip == "value":
            nn.utils.clip_grad_value_(self.weights, 0.02)
        elif clip:
            return nn.utils.clip_grad_norm_(self.weights, 0.1, norm_type=2.0 if clip == "norm" else float("inf"))
        return None

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        program, seen = self.program, list[Any]()
        if program.zero == "before":
            self.optimizer.zero_grad()
        for number, (x, y) in enumerate(batches):
            adds = number < len(batches) - 1
            x = x.clone().requires_grad_(program.second == "penalty")
            loss = F.mse_loss(self.forward(x, adds), y)
            if program.second == "penalty":
                loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            if program.second == "backward":
                self.backward(0.3 * self.model[-1].weight.square().sum())
            if program.reads == "loss":
                seen.append(loss.item())
            self.backward(loss / len(batches))
            seen.append(loss.detach())
        if program.reads == "gradient":
            seen.append(float(self.weights[-1].grad.sum()))
        norm = self.clipped()
        if norm is None or program.reads != "norm" or torch.isfinite(norm):
            self.optimizer.step()
        with torch.no_grad():
            if program.second == "evaluation":
                seen.append(self.forward(batches[0][0], False))
            for mean, weight in zip(self.averages.parameters(), self.weights, strict=True) if program.average else ():
                mean.lerp_(weight, 0.1) if program.average == "lerp" else mean.mul_(0.9).add_(weight, alpha=0.1)
        if program.zero in ("after", "to zeros"):
            self.optimizer.zero_grad(set_to_none=program.zero == "after")
        return [*seen, norm]

    def state(self) -> dict[str, Any]:
        gradients = [p.grad for p in self.weights]
        return {
            "model": self.model.state_dict(),
            "gradients": (torch.tensor([grad is None for grad in gradients]), gradients),
            "state": ws.full_state_dict(self.optimizer)["state"],
            "averages": self.averages.state_dict(),
            "random": torch.get_rng_state(),
        }


def differences(seeds: Sequence[int]) -> dict[int, list[str]]:
    """By seed, what differs from the naive replicas' after each of three calls."""
    return {seed: list(_differences(seed)) for seed in seeds}


def _differences(seed: int) -> Iterator[str]:
    program, rank, ranks = drawn(seed), comm.get_rank(), comm.get_world_size()
    mesh = ws.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    naive, run = Run(program, seed, True), Run(program, seed + rank, False)
    run.averages.load_state_dict(naive.averages.state_dict())
    step = ws.compile(run.step, mesh=mesh, plan=program.plan, fullgraph=program.reads is None)
    draws = torch.Generator().manual_seed(seed * ranks + rank)
    for number, rows in enumerate(program.sizes):
        both = torch.randn(program.micro, rows + program.uneven * rank, WIDTH + 3, generator=draws, dtype=DOUBLE)
        batches = [(each[:, :WIDTH].clone(), each[:, WIDTH:].clone()) for each in both]
        found = []
        for one, function in ((naive, naive.step), (run, step)):
            if number == program.thaws:
                one.model[0].requires_grad_(True)
            torch.manual_seed(seed + 10 * number + rank)
            result = function(batches)
            found.append({"result": result} | one.state())
            if program.schedule:
                one.schedule.step()
        for name, expected in found[0].items():
            pairs = [*zip(tensors(found[1][name]), tensors(expected), strict=True)]
            if not all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-8, atol=1e-9) for a, b in pairs):
                yield f"call {number}: {name}"
