"""Worlds that differ in what becomes of gradients: clearing, accumulation, clipping, edits by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.models import labelled
from tests.zoo.nets import MLP
from tests.zoo.steps import trained

GRADIENTS: dict[str, Make] = {}


@register(GRADIENTS)
def zero_grad_at_start(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        opt.step()
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def zero_grad_keeps_tensors(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def zero_grad_keeps_tensors_at_start(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad(set_to_none=False)
        loss = model(x, y)
        loss.backward()
        opt.step()
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def gradients_never_cleared(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        opt.step()
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def gradients_cleared_outside(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        opt.step()
        return loss

    return World(step, labelled(), watch, after=lambda i, result: opt.zero_grad())


@register(GRADIENTS)
def backward_only(seed: int) -> World:
    """Gradients accumulate inside; the optimizer steps outside every second call."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y) / 2
        loss.backward()
        return loss.detach()

    def after(i: int, result: Tensor) -> None:
        if i % 2:
            opt.step()
            opt.zero_grad()

    return World(step, labelled(), watch, after)


@register(GRADIENTS)
def micro_batches(seed: int) -> World:
    model, opt, watch = trained(dropout=0.1)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        losses = []
        for part_x, part_y in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = model(part_x, part_y) / 3
            loss.backward()
            losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
        return losses

    return World(step, labelled(n=6), watch)


@register(GRADIENTS)
def clip_norm_foreach_off_and_inf(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = model(x, y)
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        largest = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))
        opt.step()
        opt.zero_grad()
        return loss, total, largest

    return World(step, labelled(), watch)


@register(GRADIENTS)
def clip_value(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()
        return loss

    return World(step, labelled(), watch, after=lambda i, result: opt.zero_grad())


@register(GRADIENTS)
def autograd_grad(seed: int) -> World:
    """Gradient penalty: the first gradient is differentiated again."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()
        opt.step()
        opt.zero_grad()
        return loss, slope

    return World(step, labelled(), watch)


@register(GRADIENTS)
def gradients_edited(seed: int) -> World:
    """Gradients assigned, scaled in place and through .data, with noise."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        for p in model.parameters():
            p.grad.data.mul_(0.5)
            p.grad += 0.01 * torch.randn_like(p)
        model.fc2.bias.grad = model.fc2.bias.grad * 2
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def hand_written_sgd(seed: int) -> World:
    model, _, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def data_written(seed: int) -> World:
    """The old way: parameters updated through .data."""
    model, _, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
            p.grad.detach_().zero_()
        return loss

    return World(step, labelled(), watch)


@register(GRADIENTS)
def data_assigned(seed: int) -> World:
    """Projected gradient ascent: the perturbation's ``.data`` is another tensor after each round."""
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
        for _ in range(2):
            (grad,) = torch.autograd.grad(model(x + shift, y), shift)
            shift.data = (shift + 0.02 * grad.sign()).clamp(-0.1, 0.1).detach()
        opt.zero_grad()
        loss = model(x + shift.detach(), y)
        loss.backward()
        opt.step()
        narrow = x * 2
        narrow.data = narrow[:, :3]
        other = torch.zeros_like(x)
        fresh = x * 3
        other.data = fresh
        other.add_(1)
        fresh.mul_(2)
        return loss, narrow, other

    return World(step, labelled(), {"model": model, "opt": opt})
