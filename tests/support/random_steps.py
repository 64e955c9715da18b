"""Random training steps: the network, the optimizer and what a step does besides are names in tables of pieces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

SETTINGS = {"gain": 1.0}  # a global that steps read


class Stop(Exception):
    """What a step raises and its loop catches."""


FIRST: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 8), lambda rows: torch.randn(rows, 6)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 8, 4), nn.Flatten()), lambda rows: torch.randn(rows, 3, 4)),
    "embedding": (lambda: nn.EmbeddingBag(11, 8), lambda rows: torch.randint(11, (rows, 5))),
}


class Net(nn.Module):
    """A first layer, calls of `LAYERS`, a last layer."""

    def __init__(self, first: str, layers: Sequence[str]) -> None:
        super().__init__()
        self.first, self.middle, self.last = FIRST[first][0](), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.dropout, self.blocks = nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ModuleList([nn.Linear(8, 8)])
        self.unused = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(()))
        self.calls, self.scale = 0, 1.0
        self.layers = [LAYERS[name] for name in layers]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(self, x)
        return self.last(x)


def averaged(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
    return x - net.mean


def blocks(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = F.relu(block(x), inplace=True)
    return x


def counted(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x * (1 + net.calls % 3)


def replaced(net: Net, x: Tensor) -> Tensor:
    net.mean = net.mean + x.detach().mean()
    return x


LAYERS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "averaged": averaged,
    "batch norm": lambda net, x: net.norm(x),
    "blocks": blocks,
    "checkpoint": lambda net, x: checkpoint(lambda h: F.dropout(net.middle(h), 0.2), x, use_reentrant=False),
    "counted": counted,
    "dropout": lambda net, x: net.dropout(x),
    "global": lambda net, x: x * SETTINGS["gain"],
    "middle": lambda net, x: torch.tanh(net.middle(x)),
    "mode": lambda net, x: x * 1.5 if torch.is_grad_enabled() else x,
    "noise": lambda net, x: x + 0.1 * torch.randn_like(x) if net.training else x,
    "replaced": replaced,
    "scale": lambda net, x: x * net.scale,
    "skipped": lambda net, x: net.middle(x) if torch.rand([]) < 0.5 else x,
}

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fused sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "fused adamw": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw of a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "adadelta": lambda p: optim.Adadelta(p),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}
SCHEDULES: dict[str, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, 5),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "steps": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "warm up": lambda opt: lr_scheduler.LinearLR(opt),
}


@dataclass
class Program:
    """What a step does: names of pieces, in the tables of this file."""

    first: str
    layers: Sequence[str]
    optimizer: str
    schedule: str
    begin: Sequence[str]
    losses: Sequence[str]
    backward: str
    gradients: Sequence[str]
    update: str
    end: Sequence[str]
    returns: str


class State:
    """All that a step reads and writes, by way of its first argument; compared after each call."""

    def __init__(self, program: Program) -> None:
        self.model = Net(program.first, program.layers)
        unused = {*self.model.unused.parameters()}
        self.opt = OPTIMIZERS[program.optimizer]([p for p in self.model.parameters() if p not in unused])
        self.schedule = SCHEDULES[program.schedule](self.opt)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.norm, self.previous, self.best = torch.zeros(()), torch.zeros(()), 9e9
        self.count, self.factor, self.fails = 0, 1.0, False
        self.log, self.kept = list[Any](), list[Any]()
        self.begin = [BEGIN[name] for name in program.begin]
        self.losses = [LOSSES[name] for name in program.losses]
        self.backward = BACKWARDS[program.backward]
        self.gradients = [GRADIENTS[name] for name in program.gradients]
        self.update = UPDATES[program.update]
        self.end = [END[name] for name in program.end]
        self.returns = RETURNS[program.returns]
        self.transform = times(1.0)


def times(number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * number


def train(s: State, net: Callable[..., Tensor], opt_step: Callable[..., None], x: Tensor, y: Tensor) -> Any:
    """The step: ``net`` calls the model and ``opt_step`` the optimizer's step, of which one may be compiled alone."""
    if s.fails:
        raise Stop("at the beginning")
    for piece in s.begin:
        piece(s)
    loss = s.backward(s, net, x, y)
    for piece in s.gradients:
        piece(s, loss)
    s.update(s, opt_step, loss)
    for piece in s.end:
        piece(s, loss)
    return s.returns(s, loss)


def loss_of(s: State, net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    loss = F.cross_entropy(s.transform(out).float(), y)
    for piece in s.losses:
        loss = piece(s, loss)
    return loss


def rate(s: State) -> None:
    for group in s.opt.param_groups:
        group["lr"] = 0.01 * (1 + s.count % 3)


def caught(s: State) -> None:
    try:
        raise Stop("caught")
    except Stop as stop:
        s.log.append(str(stop))


BEGIN: dict[str, Callable[[State], Any]] = {
    "caught": caught,
    "count": lambda s: setattr(s, "count", s.count + 1),
    "rate": rate,
    "schedule": lambda s: s.schedule.step(),
    "seed": lambda s: torch.manual_seed(3),
    "train": lambda s: s.model.train(),
}


def penalty(s: State, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, s.model.last.bias, create_graph=True)
    return loss + gradient.square().sum()


def with_previous(s: State, loss: Tensor) -> Tensor:
    loss, s.previous = loss + 0.1 * s.previous, loss.detach()
    return loss


LOSSES: dict[str, Callable[[State, Tensor], Tensor]] = {
    "factor": lambda s, loss: loss * s.factor,
    "large": lambda s, loss: loss * 0.5 if loss > 1.4 else loss,
    "penalty": penalty,
    "previous": with_previous,
    "weights": lambda s, loss: loss + 1e-3 * sum(p.square().sum() for p in s.model.parameters()),
}


def plain(s: State, net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(s, net, x, y)
    loss.backward()
    return loss


def autocast(s: State, net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(s, net, x, y)
    loss.backward()
    return loss


def accumulated(s: State, net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    for part in 0.5, 1.0:
        loss = loss_of(s, net, x * part if x.is_floating_point() else x, y) / 2
        loss.backward()
    return loss


BACKWARDS: dict[str, Callable[..., Tensor]] = {"accumulated": accumulated, "autocast": autocast, "plain": plain}


def clip(s: State, loss: Tensor) -> None:
    s.norm = nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)


def noise(s: State, loss: Tensor) -> None:
    for p in s.model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def best(s: State, loss: Tensor) -> None:
    if loss.item() < s.best:
        s.best = loss.item()


GRADIENTS: dict[str, Callable[[State, Tensor], Any]] = {
    "best": best,
    "clip": clip,
    "clip values": lambda s, loss: nn.utils.clip_grad_value_(s.model.parameters(), 0.05),
    "keep": lambda s, loss: s.kept.append(s.model.last.weight.grad),
    "noise": noise,
    "print": lambda s, loss: print(f"loss {loss.item():.4f}"),
    "read": lambda s, loss: s.log.append(loss.item()),
}
UPDATES: dict[str, Callable[[State, Callable[..., None], Tensor], Any]] = {
    "always": lambda s, opt_step, loss: opt_step(s.opt),
    "where finite": lambda s, opt_step, loss: opt_step(s.opt) if torch.isfinite(s.norm) else None,
    "where small": lambda s, opt_step, loss: opt_step(s.opt) if loss < 1.5 else s.log.append("large"),
    "every other": lambda s, opt_step, loss: None if s.count % 2 else opt_step(s.opt),
}
END: dict[str, Callable[[State, Tensor], Any]] = {
    "average": lambda s, loss: s.average.update_parameters(s.model),
    "count": lambda s, loss: setattr(s, "count", s.count + 1),
    "decay": torch.no_grad()(lambda s, loss: [p.mul_(0.999) for p in s.model.parameters()]),
    "keep": lambda s, loss: s.kept.append(loss.detach()),
    "schedule": lambda s, loss: s.schedule.step(),
    "zero": lambda s, loss: s.opt.zero_grad(),
    "zero to zeros": lambda s, loss: s.opt.zero_grad(set_to_none=False),
}
RETURNS: dict[str, Callable[[State, Tensor], Any]] = {
    "dict": lambda s, loss: {"loss": loss.detach(), "count": s.count, "norm": s.norm},
    "loss": lambda s, loss: loss,
    "nothing": lambda s, loss: None,
    "number": lambda s, loss: loss.item(),
}


def drawn_step(draw: random.Random) -> Program:
    def some(table: dict[str, Any], most: int) -> list[str]:
        return draw.sample(list(table), draw.randint(0, most))

    return Program(
        first=draw.choice(list(FIRST)),
        layers=some(LAYERS, 3),
        optimizer=draw.choice(list(OPTIMIZERS)),
        schedule=draw.choice(list(SCHEDULES)),
        begin=some(BEGIN, 2),
        losses=some(LOSSES, 2),
        backward=draw.choice(["plain", *BACKWARDS]),
        gradients=some(GRADIENTS, 2),
        update=draw.choice(["always", "always", *UPDATES]),
        end=[*some(END, 2), *draw.choices(["zero", "zero", "zero to zeros"], k=draw.randint(0, 1))],
        returns=draw.choice(["loss", *RETURNS]),
    )
