"""Worlds that differ in what the step does: autocast, checkpointing, modes, random numbers, in-place writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.models import labelled
from tests.zoo.nets import GPT, MLP

STEPS: dict[str, Make] = {}


def trained(dropout: float = 0.0, **settings: Any) -> tuple[MLP, torch.optim.Optimizer, dict[str, Any]]:
    """(model, SGD with momentum, watch)."""
    model = MLP(dropout)
    opt = torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | settings))
    return model, opt, {"model": model, "opt": opt}


@register(STEPS)
def autocast_bf16(seed: int) -> World:
    model, opt, watch = trained(dropout=0.1)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(x)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, logits

    return World(step, labelled(), watch)


@register(STEPS)
def autocast_gpt(seed: int) -> World:
    model = GPT()
    opt = torch.optim.AdamW(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randint(19, (2, 9)),)], {"model": model, "opt": opt})


def _checkpointed(use_reentrant: bool) -> World:
    model = GPT(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x = checkpoint_sequential(nn.Sequential(model.norm, model.head), 2, x, use_reentrant=use_reentrant)
        loss = F.cross_entropy(x.flatten(0, 1), tokens.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randint(19, (2, 8)),) for _ in range(2)], {"model": model, "opt": opt})


@register(STEPS)
def checkpoint_non_reentrant(seed: int) -> World:
    return _checkpointed(False)


@register(STEPS)
def checkpoint_reentrant(seed: int) -> World:
    return _checkpointed(True)


@register(STEPS)
def evaluation(seed: int) -> World:
    model, _, watch = trained(dropout=0.5)
    model.eval()

    @torch.no_grad()
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = model.logits(x)
        return {"loss": F.cross_entropy(logits, y), "right": (logits.argmax(1) == y).float().mean(), "logits": logits}

    return World(step, labelled(), watch)


@register(STEPS)
def training_flag_alternates(seed: int) -> World:
    """Train and eval in turn: two captures, each used again."""
    model, _, watch = trained(dropout=0.5)

    def after(i: int, result: Tensor) -> None:
        model.train(not model.training)

    return World(lambda x, y: model(x, y), labelled(), watch, after)


@register(STEPS)
def modes_switched_inside(seed: int) -> World:
    model, opt, watch = trained(dropout=0.5)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        model.eval()
        with torch.no_grad():
            before = model(x, y)
        model.train()
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, before

    return World(step, labelled(), watch)


@register(STEPS)
def buffers_written_through_views(seed: int) -> World:
    model, opt, watch = trained()
    model.register_buffer("table", torch.zeros(4, 3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.table[0] += 1
        model.table.t().mul_(0.5)
        model.table[1:3, ::2] = x[:2, :2]
        model.table.view(-1)[5].fill_(x.shape[0])
        model.table.diagonal().sub_(0.1)
        loss = model(x, y) + model.table.sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, labelled(), watch)


@register(STEPS)
def random_operators(seed: int) -> World:
    def step(x: Tensor) -> list[Tensor]:
        return [
            torch.rand(3),
            torch.randn_like(x),
            torch.randint(0, 9, (4,)),
            torch.randperm(5),
            torch.bernoulli(x.sigmoid()),
            torch.multinomial(x.softmax(-1), 2),
            torch.normal(0.0, 1.0, (2,)),
            torch.empty(3).uniform_(-1, 1),
            torch.empty(3).exponential_(),
            torch.nn.init.kaiming_uniform_(torch.empty(4, 4)),
            F.dropout(x, 0.5),
            F.gumbel_softmax(x, hard=True),
            F.rrelu(x, training=True),
            torch.poisson(x.abs()),
            torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
        ]

    return World(step, [(torch.randn(2, 5),)])


@register(STEPS)
def constants_made_inside(seed: int) -> World:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        weight = torch.tensor([1.0, 2.0, 3.0])
        weight[0] = 5
        parameter = nn.Parameter(torch.ones(3))
        loss = (x * weight * parameter).sum()
        loss.backward()
        return loss.detach(), weight, parameter.grad, torch.arange(3), torch.full((2,), 7), torch.tensor(2.5)

    return World(step, [(torch.randn(3),)])


@register(STEPS)
def learning_rate_written_inside(seed: int) -> World:
    """A schedule inside the step: numbers read from and written to param_groups."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        for group in opt.param_groups:
            group["lr"] = group["lr"] * 0.9
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, labelled(), watch)


@register(STEPS)
def teacher_of_transformer_layers(seed: int) -> World:
    """A teacher in eval mode runs on torch's fused transformer kernels, which round otherwise than the plain way."""
    layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
    student = nn.TransformerEncoderLayer(**layer)
    teacher = nn.TransformerEncoder(copy.deepcopy(student), 2, enable_nested_tensor=False).requires_grad_(False).eval()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    opt = torch.optim.Adam(student.parameters())

    def step(x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x, src_key_padding_mask=mask) + attention(x, x, x)[0]
        loss = F.mse_loss(student(x, src_key_padding_mask=mask), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return World(step, [(torch.randn(2, 5, 8), mask)], {"student": student, "teacher": teacher, "opt": opt})


@register(STEPS)
def deep_copies_inside(seed: int) -> World:
    """A copy of the model from before the update is judged beside it, and the best state is kept."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    kept: dict[str, Any] = {"state": None}

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        kept["state"] = copy.deepcopy(model.state_dict())
        before = copy.deepcopy(model).eval()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            return loss.detach(), F.cross_entropy(before(x), y)

    batches = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(3)]
    return World(step, batches, {"model": model, "opt": opt, "kept": kept})
