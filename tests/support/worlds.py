"""Worlds, and one call of a world's step: what the judge compares."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

Step = Callable[..., Any]
Compile = Callable[[Step], Step]


@dataclass
class World:
    """All that one training step can see and touch.

    Attributes:
        step: the training step.
        args: positional arguments per call; call ``i`` takes ``args[i % len(args)]``.
        watch: named objects to compare: modules, optimizers, schedulers, tensors, lists that hooks fill…
        after: runs outside of the step after call ``i`` with its result (a scheduler, a kept gradient).
        changing: the step legitimately changes after its third call, so later recompiles are allowed.
        versions: compare version counters; not where an opaque operator, or autograd summing gradients in place,
            counts writes that a capture cannot see.
    """

    step: Step
    args: Sequence[tuple[Any, ...]] = ((),)
    watch: dict[str, Any] = field(default_factory=dict)
    after: Callable[[int, Any], None] | None = None
    changing: bool = False
    versions: bool = True


Make = Callable[[int], World]


@dataclass
class RandomState:
    """State of the three generators that a step may draw from."""

    torch: Tensor
    python: Any
    numpy: Any

    def same(self, other: RandomState) -> str:
        """The name of the first generator that differs, or an empty string."""
        if not torch.equal(self.torch, other.torch):
            return "torch"
        if self.python != other.python:
            return "python"
        return "" if all(map(numpy.array_equal, self.numpy, other.numpy)) else "numpy"

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)


def random_state() -> RandomState:
    """The state of all generators, now."""
    return RandomState(torch.get_rng_state(), random.getstate(), numpy.random.get_state())


@dataclass
class Outcome:
    """What one call gave: a result or an exception, and the random state and modes it left."""

    result: Any = None
    error: Exception | None = None
    rng: RandomState = field(default_factory=lambda: random_state())
    modes: tuple[Any, ...] = ()


def build(make: Make) -> World:
    """A fresh world; the same at each call."""
    torch.manual_seed(1)
    return make(0)


def modes() -> tuple[Any, ...]:
    """Modes of the calling thread that a step must leave as it found them."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()


def call(step: Step, world: World, i: int, rng: RandomState) -> Outcome:
    """Call ``i`` of a world from a random state; an exception becomes part of the outcome."""
    rng.restore()
    outcome = Outcome()
    try:
        outcome.result = step(*world.args[i % len(world.args)])
    except Exception as error:  # noqa: BLE001 (a user's step may raise anything; both worlds are compared)
        outcome.error = error
    outcome.rng, outcome.modes = random_state(), modes()
    return outcome


def pair(step: Step, one: World, compiled: Step, two: World, i: int) -> tuple[Outcome, Outcome]:
    """Call ``i`` of both worlds, from the same random state."""
    rng = random_state()
    outcomes = call(step, one, i, rng), call(compiled, two, i, rng)
    if outcomes[1].error is not None:
        outcomes[1].error.add_note(f"in call {i}")
    return outcomes
