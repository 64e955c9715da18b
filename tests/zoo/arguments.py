"""Worlds that differ in what goes into a step and what comes out of it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.equal import Make, World
from tests.zoo import register
from tests.zoo.models import labelled
from tests.zoo.nets import MLP
from tests.zoo.steps import trained

ARGUMENTS: dict[str, Make] = {}


@register(ARGUMENTS)
def loss_as_a_number(seed: int) -> World:
    """`.item()` whose value goes nowhere but out."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> float:
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    return World(step, labelled(), watch)


@register(ARGUMENTS)
def metrics(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = model.logits(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return {
            "loss": loss.item(),
            "perplexity": loss.detach().exp(),
            "norm": norm,
            "right": (logits.argmax(-1) == y).sum(),
            "n": x.shape[0],
            "name": "train",
            "nothing": None,
        }

    return World(step, labelled(), watch)


@register(ARGUMENTS)
def nested_results(seed: int) -> World:
    model, _, watch = trained()
    pair = collections.namedtuple("pair", "first second")

    def step(x: Tensor, y: Tensor) -> Any:
        logits = model.logits(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        return {"a": [loss, (logits, logits)], "b": pair(logits.t(), 3), "c": {"d": logits[0], "x": x}, "e": (), 1: 2.5}

    return World(step, labelled(), watch)


@register(ARGUMENTS)
def one_memory_in_several_results(seed: int) -> World:
    """A tensor beside its detached form, its data and a view of all of it: four objects, one memory."""
    model, _, watch = trained()

    def step(x: Tensor, y: Tensor) -> Any:
        logits = model.logits(x)
        return logits.detach(), logits, logits.data, logits.view_as(logits), x.detach(), x

    return World(step, labelled(), watch)


@dataclasses.dataclass
class Batch:
    """A batch as a dataclass holding a dict and a list."""

    inputs: dict[str, Tensor]
    targets: list[Tensor]
    scale: float = 1.0


@dataclasses.dataclass
class Report:
    """A result as a dataclass."""

    loss: Tensor
    batch: Batch


@register(ARGUMENTS)
def dataclasses_in_and_out(seed: int) -> World:
    model, opt, watch = trained()

    def step(batch: Batch, *, extra: tuple[Tensor, ...] = ()) -> Report:
        loss = model(batch.inputs["x"], batch.targets[0]) * batch.scale
        loss.backward()
        opt.step()
        opt.zero_grad()
        return Report(loss, batch)

    return World(step, [(Batch({"x": x}, [y]),) for x, y in labelled()], watch)


@register(ARGUMENTS)
def arguments_written(seed: int) -> World:
    """The step writes into its arguments, as a recurrent state or a running metric."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor, total: Tensor, counts: dict[str, Tensor]) -> Tensor:
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        total += loss.detach()
        counts["n"].add_(x.shape[0])
        counts["rows"][1:].copy_(x[:2].detach())
        return loss

    batches = [(x, y, torch.zeros(()), {"n": torch.tensor(0), "rows": torch.zeros(3, 6)}) for x, y in labelled()]
    return World(step, batches, watch)


@register(ARGUMENTS)
def dict_argument_updated(seed: int) -> World:
    """A container argument gains and loses entries inside of the step."""
    model, _, watch = trained()

    def step(batch: dict[str, Any]) -> Tensor:
        batch["logits"] = model.logits(batch["x"])
        batch["seen"] = batch.get("seen", 0) + 1
        return F.cross_entropy(batch["logits"], batch["y"])

    batches = [({"x": x, "y": y},) for x, y in labelled()]
    return World(step, batches, watch, changing=True)


@register(ARGUMENTS)
def model_and_optimizer_as_arguments(seed: int) -> World:
    model, opt, watch = trained()

    def step(state: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = state["model"](*batch)
        loss.backward()
        state["opt"].step()
        state["opt"].zero_grad()
        return loss

    return World(step, [({"model": model, "opt": opt}, batch) for batch in labelled()], watch)


@register(ARGUMENTS)
def bound_method(seed: int) -> World:
    """The step is a method of a trainer that holds everything."""

    class Trainer:
        def __init__(self) -> None:
            self.model = MLP()
            self.opt = torch.optim.Adam(self.model.parameters())
            self.weight = torch.tensor(0.5)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.model(x, y) * self.weight
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            return loss

    trainer = Trainer()
    return World(trainer.step, labelled(), {"model": trainer.model, "opt": trainer.opt})


@register(ARGUMENTS)
def attributes_hold_tensors(seed: int) -> World:
    """A module keeps a plain tensor attribute that each call replaces, as a recurrent state."""
    model, opt, watch = trained()
    model.memory = torch.zeros(4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model.logits(x) + model.memory
        model.memory = logits.detach().mean(0)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, labelled(), watch)


@register(ARGUMENTS)
def same_argument_twice(seed: int) -> World:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        y.add_(1)
        return x + y, y

    x = torch.randn(3)
    return World(step, [(x, x)])


@register(ARGUMENTS)
def overlapping_arguments(seed: int) -> World:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y.t().add_(1)
        return x.sum() + y.sum()

    base = torch.randn(3, 4)
    return World(step, [(base[:2], base[1:])], {"base": base})


@register(ARGUMENTS)
def number_argument(seed: int) -> World:
    """A Python number as an argument: guarded, or lifted; the result must follow it."""
    return World(lambda x, scale: x * scale + scale**2, [(torch.ones(2), 0.5), (torch.ones(2), 0.25)], changing=True)


@register(ARGUMENTS)
def last_batch_smaller(seed: int) -> World:
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [*labelled(2, 5), *labelled(1, 3)], watch)


@register(ARGUMENTS)
def sparse_embedding(seed: int) -> World:
    """Sparse gradients with plain SGD: as eager, or refused clearly (see test_bad_input)."""
    model = nn.Embedding(7, 3, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens).pow(2).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return World(step, [(torch.randint(7, (4,)),)], {"model": model, "opt": opt})


@register(ARGUMENTS)
def prediction(seed: int) -> World:
    """A forward alone, without gradients; `topk` gives a named tuple of its own."""
    model, _, _ = trained()
    model.eval()

    @torch.no_grad()
    def predict(x: Tensor) -> Any:
        logits = model.logits(x)
        return {"probabilities": logits.softmax(-1), "best": logits.topk(2), "largest": logits.max(1)}

    return World(predict, [(x,) for x, _ in labelled()], {"model": model})


@register(ARGUMENTS)
def inference_mode(seed: int) -> World:
    """Results are inference tensors, those that share memory too; what is mixed in from a normal mode is not."""
    model, opt, watch = trained()

    def step(x: Tensor, y: Tensor) -> Any:
        with torch.inference_mode():
            before = model.logits(x)
            half = before[:2]
        loss = F.cross_entropy(model.logits(x), F.one_hot(y, 4).float())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return before, half, loss

    return World(step, labelled(), watch)
