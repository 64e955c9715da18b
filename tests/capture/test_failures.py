"""Exceptions in the user's own code, interrupts, threads: eager's error, and a world left as it was."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import wholestep as ws
from tests.support.equal import World, assert_same_failure, assert_same_run
from tests.zoo.models import training
from tests.zoo.nets import MLP
from wholestep.errors import DataDependentError, UnsupportedError


def on_a_thread(function: Callable[[], Any]) -> Any:
    """Result of a function run on a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    (result,) = results
    return result


def test_calls_on_other_threads() -> None:
    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled = ws.compile(step, fullgraph=True)
        return lambda *args: on_a_thread(lambda: compiled(*args))

    assert_same_run(training(lambda model, x, y: model(x, y)), compile=compile)


def test_capture_here_and_calls_there() -> None:
    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled, calls = ws.compile(step, fullgraph=True), []

        def alternate(*args: Any) -> Any:
            calls.append(0)
            return compiled(*args) if len(calls) % 2 else on_a_thread(lambda: compiled(*args))

        return alternate

    assert_same_run(training(lambda model, x, y: model(x, y)), compile=compile)


class UserError(Exception):
    """Raised by the user's own code."""


class FailsBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise UserError


def raising(*_: Any) -> Any:
    raise UserError


def fails_in_forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    raise UserError


def fails_in_a_tensor_hook(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    logits.register_hook(raising)
    return F.cross_entropy(logits, y)


def fails_in_backward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(FailsBackward.apply(model.logits(x)), y)


def wrong_shapes(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return (model.fc1(x) @ model.fc2.weight).sum()


def leaf_written(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    model.fc1.weight.add_(1)
    return model(x, y)


def saved_value_overwritten(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    hidden = model.fc1(x).exp()
    loss = hidden.sum()
    hidden.mul_(2)
    return loss


def backward_twice(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    loss.backward()
    return loss


def no_gradient(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y).detach()


FAILING = (
    fails_in_forward,
    fails_in_a_tensor_hook,
    fails_in_backward,
    wrong_shapes,
    leaf_written,
    saved_value_overwritten,
    backward_twice,
    no_gradient,
)


@pytest.mark.parametrize("forward", FAILING, ids=lambda f: f.__name__)
def test_exceptions_are_eagers_own_and_change_nothing(forward: Callable[..., Tensor]) -> None:
    assert_same_failure(training(forward))


def test_exception_in_a_permanent_hook_and_in_an_optimizer_hook() -> None:
    def with_parameter_hook(seed: int) -> World:
        world = training(lambda model, x, y: model(x, y))(seed)
        world.watch["model"].fc1.bias.register_post_accumulate_grad_hook(raising)
        return world

    def with_optimizer_hook(seed: int) -> World:
        world = training(lambda model, x, y: model(x, y))(seed)
        world.watch["opt"].register_step_post_hook(raising)
        return world

    assert_same_failure(with_parameter_hook)
    assert_same_failure(with_optimizer_hook)


def test_exception_on_a_later_call() -> None:
    """Two good calls, then a flag makes the user's code raise."""

    def make(seed: int) -> World:
        def forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y)
            if x.shape[0] == 3:
                raise UserError
            return loss

        world = training(forward)(seed)
        x, y = world.args[0]
        return World(world.step, [(x, y), (x, y), (x[:3], y[:3])], world.watch)

    assert_same_failure(make, calls_before=2)


def test_interrupt_changes_nothing_and_the_step_serves_afterwards() -> None:
    def make(seed: int) -> World:
        trouble = [KeyboardInterrupt, UserError]

        def forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y)
            if model.trouble:
                raise trouble[len(model.trouble) - 1]
            return loss

        world = training(forward)(seed)
        world.watch["model"].trouble = ""
        return world

    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled, calls = ws.compile(step, fullgraph=True), []
        model = inspect.getclosurevars(step).nonlocals["model"]

        def troubled(*args: Any) -> Any:
            calls.append(0)
            for trouble, error in (("x", KeyboardInterrupt), ("xx", UserError)):
                model.trouble = trouble if len(calls) in (1, 3) else ""
                if model.trouble:
                    with pytest.raises(error):
                        compiled(*args)
            model.trouble = ""
            return compiled(*args)

        return troubled

    def forgiving(seed: int) -> World:
        world = make(seed)
        world.changing = True
        return world

    assert_same_run(forgiving, compile=compile)


def test_a_refused_step_leaves_an_eager_world_that_trains_on() -> None:
    """After the refusal, the same objects train eagerly as if nothing had been."""

    def make(seed: int) -> World:
        return training(lambda model, x, y: model(x, y) * (2 if model(x, y) > 0 else 1))(seed)

    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        def fallback(*args: Any) -> Any:
            rng = torch.get_rng_state()
            with pytest.raises(DataDependentError):
                ws.compile(step, fullgraph=True)(*args)
            assert torch.equal(rng, torch.get_rng_state())
            return step(*args)

        return fallback

    assert_same_run(make, compile=compile)


class TensorError(Exception):
    """An exception that holds what it is given."""


def test_an_exception_with_a_tensor_that_the_step_made_does_not_reach_the_user() -> None:
    def step(x: torch.Tensor) -> None:
        raise TensorError("no", [x * 2])

    with pytest.raises(UnsupportedError, match=r"raises TensorError with a tensor(?s:.)*test_failures.py"):
        ws.compile(step, fullgraph=True)(torch.ones(3))


def test_slices_of_tensors_are_made_anew_in_each_call() -> None:
    def step(x: torch.Tensor) -> object:
        return slice(x * 2, None), slice(1, 2), [slice(0, x)]

    compiled = ws.compile(step)
    for number in (1.0, 2.0):
        x = torch.tensor(number)
        made, plain, (given,) = compiled(x)
        assert made.start.item() == 2 * number and plain == slice(1, 2) and given.stop is x


def test_a_step_that_is_not_captured_handles_no_exception_of_a_capture() -> None:
    handled: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        handled.append(sys.exc_info()[1])
        print(end="")
        return x + 1

    compiled = ws.compile(step)
    for _ in range(3):
        compiled(torch.ones(1))
    assert compiled.breaks and handled == [None] * len(handled)


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("where", ["arguments", "results"])
def test_what_is_nested_too_deeply_is_refused_or_served_by_python(where: str) -> None:
    def step(x: Any) -> Any:
        while isinstance(x, list):
            (x,) = x
        return nested(x * 2, 700 if where == "results" else 0)

    def given(number: int) -> Any:
        return nested(torch.tensor(number), 700 if where == "arguments" else 0)

    with pytest.raises(UnsupportedError, match="nested too deeply") as error:
        ws.compile(step, fullgraph=True)(given(1))
    assert f"at: {__file__}" in str(error.value) and "to do: nest them less deeply" in str(error.value)
    compiled = ws.compile(step)
    for number in range(3):
        got = compiled(given(number))
        while isinstance(got, list):
            (got,) = got
        assert got.item() == 2 * number
    assert "nested too deeply" in compiled.breaks[0]


def test_functions_that_call_themselves_for_ever_raise_what_they_do_in_eager() -> None:
    def step(x: torch.Tensor) -> Any:
        return step(x + 1)

    with pytest.raises(RecursionError):
        ws.compile(step, fullgraph=True)(torch.ones(1))
