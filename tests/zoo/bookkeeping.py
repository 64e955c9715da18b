"""Worlds whose steps keep books beside tensors: in lists, groups, arrays and generators."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.models import labelled
from tests.zoo.nets import MLP

BOOKKEEPING: dict[str, Make] = {}


class Lookahead:
    """An optimizer around an optimizer, which counts in the other's parameter groups."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.slow = inner, every, defaultdict[Any, dict[str, Tensor]](dict)
        for group in inner.param_groups:
            group["counter"] = 0

    def step(self) -> None:
        self.inner.step()
        for group in self.inner.param_groups:
            if group["counter"] == 0:
                for p in group["params"]:
                    slow = self.slow[p].setdefault("slow", p.data.clone())
                    slow += (p.data - slow) * 0.5
                    p.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.every


@register(BOOKKEEPING)
def counter_in_parameter_groups(seed: int) -> World:
    model = MLP()
    opt = torch.optim.Adam(model.parameters())
    outer = Lookahead(opt)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        outer.step()
        opt.zero_grad()
        return loss.detach()

    return World(step, labelled(), {"model": model, "opt": opt, "slow": outer.slow}, changing=True)


@register(BOOKKEEPING)
def flag_and_name_in_parameter_groups(seed: int) -> World:
    model = MLP()
    heads = [{"params": model.fc1.parameters(), "frozen": True}, {"params": model.fc2.parameters(), "frozen": False}]
    opt = torch.optim.SGD(heads, lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        opt.zero_grad()
        loss.backward()
        for group in opt.param_groups:
            for p in group["params"] if group["frozen"] else ():
                p.grad = None
        opt.step()
        return loss.detach()

    def after(i: int, result: Tensor) -> None:
        opt.param_groups[0]["frozen"] = i != 2

    return World(step, labelled(), {"model": model, "opt": opt}, after, changing=True)


def arrays_of_numpy(seed: int) -> World:
    """A batch of arrays, weights that change in place, and a number read from an array."""
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, scale = torch.ones(4).numpy(), torch.ones(2).numpy()

    def step(x: Any, y: Any) -> Tensor:
        logits = model.logits(torch.from_numpy(x)) * float(scale[1])
        loss = F.cross_entropy(logits, torch.as_tensor(y), weight=torch.from_numpy(weight).clone())
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    def after(i: int, result: Tensor) -> None:
        weight[i % 2] += 1
        scale[1] += i == 2

    batches = [(x.numpy(), y.numpy()) for x, y in labelled(batches=2)]
    return World(step, batches, {"model": model, "opt": opt}, after, changing=True)


@register(BOOKKEEPING)
def lists_that_grow(seed: int) -> World:
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, last = list[Tensor](), deque[float](maxlen=3)
    log: dict[str, list[Any]] = {"loss": [], "norm": []}

    def step(x: Tensor, y: Tensor) -> None:
        loss = model(x, y)
        opt.zero_grad()
        loss.backward()
        log["norm"] += [nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        opt.step()
        losses.append(loss.detach())
        log["loss"].append({"value": loss.detach(), "lr": opt.param_groups[0]["lr"]})
        last.append(loss.item())

    watch = {"model": model, "opt": opt, "losses": losses, "log": log, "last": last}
    return World(step, labelled(), watch)


@register(BOOKKEEPING)
def boolean_masks_of_constants(seed: int) -> World:
    """Contrastive learning: the mask says nothing of data, so the shapes that it gives are known."""
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(model.logits(torch.cat([x, x + 0.1])), dim=1)
        same = torch.arange(len(x)).repeat(2)
        same = same.unsqueeze(0) == same.unsqueeze(1)
        others = ~torch.eye(len(z), dtype=torch.bool)
        pairs, near = (z @ z.T)[others].view(len(z), -1), same[others].view(len(z), -1)
        logits = torch.cat([pairs[near].view(len(z), -1), pairs[~near].view(len(z), -1)], 1)
        loss = F.cross_entropy(logits / 0.1, torch.zeros(len(z), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    return World(step, labelled(), {"model": model, "opt": opt})


@register(BOOKKEEPING)
def parameters_as_one_vector(seed: int) -> World:
    """A perturbation tried and taken back."""
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        old = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        nn.utils.vector_to_parameters(old + 0.1 * torch.randn_like(old), model.parameters())
        loss = model(x, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.vector_to_parameters(old, model.parameters())
        opt.step()
        return loss.detach(), [p.detach().clone() for p in model.parameters()]

    return World(step, labelled(), {"model": model, "opt": opt})


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as people have it (Foret et al. 2021): the parameter gets the copy's memory back."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.defaults["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


@register(BOOKKEEPING)
def sharpness_aware(seed: int) -> World:
    model = MLP()
    opt, shown = SAM(model.parameters()), [model.state_dict()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        opt.first_step()
        model(x, y).backward()
        opt.second_step()
        return loss.detach()

    def after(call: int, result: Any) -> None:
        shown.append(model.state_dict())

    return World(step, labelled(), {"model": model, "opt": opt, "base": opt.base, "shown": shown}, after)


@register(BOOKKEEPING)
def own_generators(seed: int) -> World:
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = torch.Generator().manual_seed(3)

    def step(x: Tensor, y: Tensor, order: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randperm(len(x), generator=order)
        x = x + torch.randn(x.shape, generator=noise) + torch.empty_like(x).uniform_(generator=order)
        loss = model(F.dropout(x[index]), y[index])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach(), x

    order = torch.Generator().manual_seed(5)
    batches = [(x, y, order) for x, y in labelled()]
    return World(step, batches, {"model": model, "opt": opt})
