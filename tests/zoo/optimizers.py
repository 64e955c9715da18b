"""Every optimizer of torch.optim with its settings, and every learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from tests.support.equal import Make, World
from tests.zoo.models import labelled
from tests.zoo.nets import MLP

Factory = Callable[[Any], optim.Optimizer]

# Arguments of each optimizer, beside the learning rate, that choose another formula.
SETTINGS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    ],
    optim.Adam: [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1, "maximize": True},
        {"betas": (0.5, 0.9), "eps": 1e-6, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    optim.AdamW: [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}],
    optim.NAdam: [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    optim.RAdam: [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    optim.Adamax: [{}, {"weight_decay": 0.1, "maximize": True}],
    optim.Adagrad: [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}, {"maximize": True}],
    optim.Adadelta: [{}, {"weight_decay": 0.1, "maximize": True}],
    optim.RMSprop: [{}, {"momentum": 0.9}, {"centered": True, "weight_decay": 0.1}, {"maximize": True}],
    optim.Rprop: [{}, {"maximize": True}],
    optim.ASGD: [{}, {"weight_decay": 0.1, "maximize": True, "t0": 3}],
    optim.Adafactor: [{}, {"weight_decay": 0.1, "maximize": True}],
    optim.Muon: [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}],
}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
NO_FOREACH = (optim.Muon,)
TENSOR_LR = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adamax, optim.NAdam, optim.RAdam)


class Target(nn.Module):
    """Parameters of several ranks, one without gradient: x [N, 6], y [N] -> loss."""

    def __init__(self, matrices_only: bool) -> None:
        super().__init__()
        self.inner = MLP()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.twins = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])  # of one kind, updated one after the other
        for p in self.parameters():
            p.requires_grad_(p.requires_grad and (p.ndim == 2 or not matrices_only))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(self.twins[1](self.twins[0](x)), y) * self.scale


def optimized(factory: Factory, after: Callable[[int, Any, Any, Any], None] | None = None, **settings: Any) -> Make:
    """A world that trains `Target` with ``factory(parameter groups)``; ``after(i, result, model, opt)`` outside."""

    def make(seed: int) -> World:
        model = Target(matrices_only=factory.__name__ == "Muon")
        named = [p for p in model.parameters() if p.requires_grad]
        opt = factory([{"params": named[:2]}, {"params": named[2:], "lr": 0.02}])

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        outside = None if after is None else lambda i, result: after(i, result, model, opt)
        return World(step, labelled(), {"model": model, "opt": opt}, outside, **settings)

    return make


def _with(cls: type[optim.Optimizer], **arguments: Any) -> Factory:
    def factory(groups: Any) -> optim.Optimizer:
        fresh = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        return cls(groups, **fresh)

    factory.__name__ = cls.__name__
    return factory


def optimizers() -> dict[str, Make]:
    """name -> world, over all optimizers, settings and implementations."""
    worlds: dict[str, Make] = {}
    for cls, variants in SETTINGS.items():
        kinds: list[dict[str, Any]] = [{}]
        kinds += [] if cls in NO_FOREACH else [{"foreach": True}, {"foreach": False}]
        kinds += [{"fused": True}] if cls in FUSED else []
        kinds += [{"lr": torch.tensor(0.03)}] if cls in TENSOR_LR else []
        kinds += [{"lr": torch.tensor(0.03), "fused": True}] if cls in FUSED else []
        for kind in kinds:
            for variant in variants[:1] if kind.get("foreach") is False or "lr" in kind else variants:
                arguments = {"lr": 0.05} | kind | variant
                label = ",".join(
                    f"{key}={'tensor' if isinstance(value, Tensor) else value}"
                    for key, value in (kind | variant).items()
                )
                # RAdam takes another formula from its sixth step on.
                worlds[f"{cls.__name__}({label})"] = optimized(_with(cls, **arguments), changing=cls is optim.RAdam)
    return worlds


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: 0.9**i),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda i: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3], 0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 2),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, 1.0, 4),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 5, 2.0),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=0.5),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(opt, 4)], [2]
    ),
    "SWALR": lambda opt: optim.swa_utils.SWALR(opt, 0.01, 3),
}
SCHEDULED: dict[str, Factory] = {
    "SGD": _with(optim.SGD, lr=0.1, momentum=0.9),
    "Adam": _with(optim.Adam, lr=0.1),
    "AdamW-fused": _with(optim.AdamW, lr=0.1, fused=True),
    "AdamW-foreach": _with(optim.AdamW, lr=0.1, foreach=True),
    "SGD-tensor": _with(optim.SGD, lr=torch.tensor(0.1), momentum=0.9),
}


def scheduled(schedule: str | None, optimizer: str) -> Make:
    """A world whose scheduler (or none) steps outside after each call."""

    def make(seed: int) -> World:
        world = optimized(SCHEDULED[optimizer])(seed)
        if schedule is None:
            return world
        scheduler = SCHEDULES[schedule](world.watch["opt"])

        def after(i: int, result: Tensor) -> None:
            if schedule == "ReduceLROnPlateau":
                scheduler.step(result.detach())
            else:
                scheduler.step()

        world.after = after
        world.watch["scheduler"] = scheduler
        return world

    return make
