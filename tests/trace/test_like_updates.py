"""Updates of like parameters are recorded once, and what they share or do not share is as in eager."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.support.equal import Make, World, assert_same_run
from wholestep.trace.patches.like_updates import LikeUpdates

LAYERS = 5


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))


def trained(model: nn.Module, opt: optim.Optimizer, change: Callable[[], None] = lambda: None) -> World:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        change()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randn(3, 4),) for _ in range(3)], {"model": model, "opt": opt})


def plain(seed: int) -> World:
    model = net()
    return trained(model, optim.AdamW(model.parameters()))


def one_memory(seed: int) -> World:
    """Parameters that are parts of one flat memory, as some wrappers keep them."""
    model = net()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    return trained(model, optim.Adam(model.parameters()))


def one_gradient(seed: int) -> World:
    """Two parameters whose gradient is one tensor, of which an in-place decay of the first would show in the second."""
    model = net()
    first, second = (layer.weight for layer in (model[0], model[1]))

    def share() -> None:
        second.grad = first.grad

    return trained(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), share)


def one_state(seed: int) -> World:
    """Two parameters that share a momentum buffer."""
    model = net()
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shared = torch.ones(4, 4)
    for layer in (model[0], model[2]):
        opt.state[layer.weight]["momentum_buffer"] = shared
    return trained(model, opt)


def one_parameter_twice(seed: int) -> World:
    model = net()
    opt = optim.Adam(model.parameters())
    opt.param_groups[0]["params"].append(model[0].weight)  # torch warns of it in its constructor alone
    return trained(model, opt)


def unlike_counts(seed: int) -> World:
    """Parameters that have seen different numbers of steps, of which RAdam's formula depends."""
    model = net()
    opt = optim.RAdam(model.parameters())
    for n, p in enumerate(model.parameters()):
        opt.state[p] = {"step": torch.tensor(float(2 * n)), "exp_avg": p.detach() * 0, "exp_avg_sq": p.detach() * 0}
    world = trained(model, opt)
    world.changing = True
    return world


def expanded_gradients(seed: int) -> World:
    """Gradients that lie as no parameter does: one number, many times."""
    model = net()
    opt = optim.Adam(model.parameters(), maximize=True)

    def step(x: Tensor) -> Tensor:
        loss = torch.stack([p.sum() for p in model.parameters()]).sum() * x.sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randn(3, 4),) for _ in range(3)], {"model": model, "opt": opt})


def kept_momentum(seed: int) -> World:
    """A view of one parameter's state that is read between the update of it and the end of the step."""
    model = net()
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
    rows = [opt.state[layer.weight]["momentum_buffer"][1] for layer in model]

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        before = torch.stack(rows)
        opt.step()
        opt.zero_grad()
        return torch.stack(rows) - before

    return World(step, [(torch.randn(3, 4),) for _ in range(3)], {"model": model, "opt": opt})


def test_a_function_of_the_users_in_torchs_place_is_given_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that scales by the norm of all gradients, which rows alone would not have."""

    def scaled(params: list[Tensor], grads: list[Tensor], *args: Any, lr: float, **kwargs: Any) -> None:
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for p, grad in zip(params, grads, strict=True):
            p.sub_(grad / norm * lr)

    monkeypatch.setattr(sys.modules[optim.SGD.__module__], "_single_tensor_sgd", scaled)

    def make(seed: int) -> World:
        model = net()
        return trained(model, optim.SGD(model.parameters(), lr=0.1))

    assert_same_run(make, steps=3)


WORLDS: list[tuple[Make, int]] = [
    (plain, 2 * LAYERS - 3),
    (expanded_gradients, 2 * LAYERS - 3),
    (kept_momentum, 2 * LAYERS - 3),
    (one_state, 2 * LAYERS - 3),
    (one_gradient, 0),
    (one_memory, 0),
    (one_parameter_twice, 0),
    (unlike_counts, 0),
]


@pytest.mark.parametrize(("make", "copies"), WORLDS, ids=[make.__name__ for make, _ in WORLDS])
def test_as_in_eager(make: Make, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    copy = LikeUpdates._copy
    monkeypatch.setattr(LikeUpdates, "_copy", lambda self, update, row: made.append(1) or copy(self, update, row))
    assert_same_run(make, steps=4)
    assert len(made) >= copies
