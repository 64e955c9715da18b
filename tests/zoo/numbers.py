"""Worlds whose Python numbers change from call to call: they become inputs, and no call needs another capture."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.models import labelled
from tests.zoo.nets import MLP

NUMBERS: dict[str, Make] = {}


class Counting(torch.optim.Optimizer):
    """Adam as many third-party optimizers write it: step counts are Python ints, in the group and in the state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                scale = group["lr"] / (1 - 0.9 ** state["step"])
                root = math.sqrt(1 - 0.999 ** group["t"])
                p.addcdiv_(state["mean"], (state["square"].sqrt() / root).add_(1e-8), value=-scale)


def _mlp() -> tuple[MLP, torch.optim.Optimizer]:
    model = MLP()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@register(NUMBERS)
def counting_optimizer(seed: int) -> World:
    model = MLP(dropout=0.1)
    opt = Counting(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    return World(step, labelled(), {"model": model, "opt": opt})


@register(NUMBERS)
def mixup_ratio(seed: int) -> World:
    model, opt = _mlp()

    def step(x: Tensor, y: Tensor, ratio: float) -> Tensor:
        order = torch.randperm(x.shape[0])
        loss = ratio * model(x, y) + (1 - ratio) * model(x[order], y[order])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    batches = labelled(5)
    return World(step, [(*b, r) for b, r in zip(batches, (0.3, 0.7, 0.55, 0.1, 0.9), strict=True)],
                 {"model": model, "opt": opt})


@register(NUMBERS)
def numbers_everywhere(seed: int) -> World:
    """A keyword, a closure cell, a list, a dict and an attribute, all moving."""
    model, opt = _mlp()
    calls, history, settings = 0, [0, 0.5], {"temperature": 1.0}

    def step(x: Tensor, y: Tensor, *, epoch: int) -> Any:
        nonlocal calls
        calls += 1
        history[0] += 2
        history[1] = history[1] * 0.9 + 0.1
        settings["temperature"] *= 0.8
        loss = F.cross_entropy(model.logits(x) / settings["temperature"], y) * history[1]
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, calls, epoch + 1, settings["temperature"]

    def call(x: Tensor, y: Tensor, epoch: int) -> Any:
        return step(x, y, epoch=epoch)

    watch = {"model": model, "opt": opt, "history": history, "settings": settings, "calls": lambda: calls}
    return World(call, [(*b, i) for i, b in enumerate(labelled(5))], watch)


@register(NUMBERS)
def running_mean_of_losses(seed: int) -> World:
    model, opt = _mlp()
    seen = {"mean": 0.0, "count": 0}

    def step(x: Tensor, y: Tensor) -> float:
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        seen["mean"] = 0.9 * seen["mean"] + 0.1 * loss.item()
        seen["count"] += x.shape[0]
        return seen["mean"]

    return World(step, labelled(), {"model": model, "opt": opt, "seen": seen})


@register(NUMBERS)
def update_every_second_call(seed: int) -> World:
    """Python branches on a count: two programs serve in turns."""
    model, opt = _mlp()
    count = {"calls": 0}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        count["calls"] += 1
        if count["calls"] % 2 == 0:
            opt.step()
            opt.zero_grad()
        return loss

    return World(step, labelled(), {"model": model, "opt": opt, "count": count})


@register(NUMBERS)
def number_as_a_size(seed: int) -> World:
    """A size cannot be an input of the graph: one program for each."""
    model, _ = _mlp()
    return World(lambda x, n: model.logits(x)[:n].sum() * n, [(torch.randn(5, 6), n) for n in (2, 3, 1, 4, 2)],
                 {"model": model}, changing=True)


@register(NUMBERS)
def number_in_a_text(seed: int) -> World:
    model, _ = _mlp()
    notes: dict[str, str] = {}

    def step(x: Tensor, n: int) -> Tensor:
        notes["last"] = f"call {n}"
        return model.logits(x).sum() * 2

    return World(step, [(torch.randn(5, 6), n) for n in (2, 3, 1, 4, 2)], {"model": model, "notes": notes},
                 changing=True)


@register(NUMBERS)
def type_of_a_number(seed: int) -> World:
    """User code that asks for a number's type takes the way that it takes in eager."""
    model, opt = _mlp()

    def step(x: Tensor, y: Tensor, ratio: Any, shift: Any) -> Tensor:
        scale = ratio if isinstance(ratio, float) else sum(ratio)
        loss = model(x, y) * scale + (shift if isinstance(shift, int) else 100.0)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(*b, 0.1 * i, i) for i, b in enumerate(labelled(5))], {"model": model, "opt": opt})
