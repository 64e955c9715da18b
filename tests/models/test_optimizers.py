"""Every optimizer of torch.optim, in every implementation it has on the CPU: as eager, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import wholestep as ws
from tests.support.equal import (
    Make,
    World,
    assert_refused,
    assert_same_failure,
    assert_same_or_refused,
    assert_same_run,
)
from tests.zoo.optimizers import FUSED, SCHEDULED, SETTINGS, optimized, optimizers
from wholestep.errors import UnsupportedError

OPTIMIZERS = optimizers()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    assert_same_run(OPTIMIZERS[name], steps=7 if name.startswith("RAdam") else 4)


def test_the_table_knows_every_optimizer() -> None:
    found = {cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)}
    assert found == {*SETTINGS, optim.Optimizer, optim.LBFGS, optim.SparseAdam}  # SparseAdam has a test of its own


def test_capturable_fails_as_in_eager_where_it_is_not_supported() -> None:
    assert_same_failure(optimized(lambda groups: optim.Adam(groups, capturable=True)))


def sparse(factory: Any) -> Make:
    """A world that trains an embedding by sparse gradients, and a dense layer where the optimizer takes both."""

    def make(seed: int) -> World:
        model, head = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)
        opt = factory([*model.parameters(), *(() if factory.func is optim.SparseAdam else head.parameters())])

        def step(tokens: Tensor) -> Tensor:
            loss = head(model(tokens)).pow(2).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        batches = [(torch.tensor(tokens),) for tokens in ([1, 2, 2], [1, 5, 0], [3, 3, 3])]
        return World(step, batches, {"model": model, "opt": opt})

    return make


SPARSE = {
    "SparseAdam": partial(optim.SparseAdam),
    "SparseAdam, other settings": partial(optim.SparseAdam, lr=0.1, betas=(0.5, 0.9), eps=1e-6, maximize=True),
    "SparseAdam, a tensor as rate": partial(optim.SparseAdam, lr=torch.tensor(0.1)),
    "Adagrad": partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1, maximize=True),
    "Adagrad, foreach": partial(optim.Adagrad, lr=torch.tensor(0.1), foreach=True),
    "SGD": partial(optim.SGD, lr=0.1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name: str) -> None:
    """How many values such a gradient has is in the data, which optimizers that coalesce it ask for in Python."""
    run = assert_same_run(sparse(SPARSE[name]), steps=7, compile=ws.compile)
    assert bool(run.step.breaks) == (name != "SGD")
    if run.step.breaks:
        error = assert_refused(sparse(SPARSE[name]), UnsupportedError)
        assert "depends on data" in error.what and "test_optimizers.py:" in error.where
        assert "without fullgraph=True" in error.remedy


def test_sparse_gradients_and_weight_decay_fail_as_in_eager() -> None:
    world = sparse(partial(optim.Adagrad, weight_decay=0.1))(0)
    with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse gradients"):
        ws.compile(world.step)(*world.args[0])


def unscales(kind: type[optim.Optimizer]) -> bool:
    """Whether its kernel takes the scale; before torch 2.13 that of `Adagrad` did not."""
    opt = kind([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)  # type: ignore[call-arg]
    return getattr(opt, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("kind", [*filter(unscales, FUSED)])
def test_a_gradient_scaler_with_fused_kernels(kind: type[optim.Optimizer]) -> None:
    """The kernel unscales the gradients, and leaves everything alone where one overflowed."""

    def make(seed: int) -> World:
        model = nn.Linear(3, 2)
        opt = kind(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step(x: Tensor) -> Tensor:
            opt.zero_grad()
            loss = model(x).pow(2).sum()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss

        batches = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)),) for i in range(3)]
        batches.append((torch.full((4, 3), torch.inf),))
        return World(step, batches, {"model": model, "opt": opt, "scaler": scaler})

    assert_same_run(make, steps=7)


def change(what: str) -> Any:
    """after(i, result, model, opt): one thing a user does to an optimizer between two calls."""

    def after(i: int, result: Any, model: Any, opt: optim.Optimizer) -> None:
        group = opt.param_groups[0]
        if what == "weight decay each call":
            group["weight_decay"] = 0.1 * 0.5**i
        elif what == "weight decay switched off" and i == 2:
            group["weight_decay"] = 0.0
        elif what == "betas each call" and "betas" in group:
            group["betas"] = (0.9 - 0.01 * i, 0.99)
        elif what == "state loaded" and i == 2:
            opt.load_state_dict(opt.state_dict())
        elif what == "state cleared" and i == 2:
            opt.state.clear()
        elif what == "group added" and i == 2:
            model.frozen.requires_grad_(True)
            opt.add_param_group({"params": [model.frozen], "lr": 0.5})
        elif what == "parameter frozen" and i == 2:
            model.inner.fc1.weight.requires_grad_(False)
        elif what == "parameter loaded" and i == 2:
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        elif what == "eager step between":
            model(torch.ones(2, 6), torch.tensor([1, 2])).backward()
            opt.step()
            opt.zero_grad()

    return after


CHANGES = (
    "weight decay each call",
    "weight decay switched off",
    "betas each call",
    "state loaded",
    "state cleared",
    "group added",
    "parameter frozen",
    "parameter loaded",
    "eager step between",
)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW-fused"])
@pytest.mark.parametrize("what", CHANGES)
def test_changes_between_calls(what: str, optimizer: str) -> None:
    changing = what in ("weight decay switched off", "state cleared", "group added", "parameter frozen", "state loaded")
    assert_same_run(optimized(SCHEDULED[optimizer], change(what), changing=changing))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW-fused"])
def test_state_that_was_there_before_the_first_call(optimizer: str) -> None:
    def make(seed: int) -> World:
        world = optimized(SCHEDULED[optimizer])(seed)
        for i in range(2):
            world.step(*world.args[i])
        return world

    run = assert_same_run(make)
    assert run.recompiles[-1] == []


def test_optimizer_made_inside_and_differentiated_through() -> None:
    def make(seed: int) -> World:
        start = torch.randn(4, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            fast = start.clone()
            inner = optim.SGD([fast], lr=0.1, differentiable=True)
            (fast.grad,) = torch.autograd.grad((fast * x).pow(2).sum(), fast, create_graph=True)
            inner.step()
            loss = (fast - x).pow(2).sum()
            loss.backward()
            return loss.detach()

        return World(step, [(torch.randn(4),)], {"start": start}, versions=False)

    assert_same_or_refused(make)


def test_a_sparse_gradient_that_follows_from_nothing_but_the_step() -> None:
    def step(model: nn.Embedding, row: int) -> torch.Tensor:
        model.zero_grad()
        model(torch.tensor([row, 1])).sum().backward()
        return model.weight.grad.to_dense()

    models, compiled = [nn.Embedding(4, 3, sparse=True) for _ in range(2)], ws.compile(step, fullgraph=True)
    models[1].load_state_dict(models[0].state_dict())
    for row in (0, 0, 2, 3):
        assert torch.equal(compiled(models[0], row), step(models[1], row))
        assert torch.equal(models[0].weight.grad.to_dense(), models[1].weight.grad.to_dense())
