"""The judge itself: it lets the identity pass and catches every kind of wrong compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.equal import Different, Step, World, assert_same_failure, assert_same_run, identity
from tests.zoo.nets import MLP


def world(seed: int) -> World:
    model = MLP(dropout=0.2)
    model.register_buffer("calls", torch.zeros(3))
    model.spare, model.extra = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    opt = torch.optim.Adam(model.parameters())
    log: list[float] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        opt.step()
        model.calls.add_(1)
        model.spare.grad, model.extra.grad = torch.zeros(4), torch.zeros(4)
        log.append(1.0)
        return loss, x[0]

    batch = [(torch.randn(4, 6), torch.randint(4, (4,)))]
    return World(step, batch, {"model": model, "opt": opt, "log": log})


def wrong(damage: Callable[[nn.Module, torch.optim.Optimizer, Any], Any]) -> Callable[[Step], Step]:
    """A compile function whose step does damage afterwards: takes model, optimizer, results; gives results."""

    def compile(step: Step) -> Step:
        cells = dict(zip(step.__code__.co_freevars, (c.cell_contents for c in step.__closure__ or ()), strict=True))

        def damaged(*args: Any) -> Any:
            return damage(cells["model"], cells["opt"], step(*args))

        return damaged

    return compile


def one_bit(model: Any, opt: Any, result: Any) -> Any:
    model.fc2.bias.data.view(torch.int32)[1] ^= 1
    return result


def grad_forgotten(model: Any, opt: Any, result: Any) -> Any:
    model.fc1.weight.grad = None
    return result


def grads_share_memory(model: Any, opt: Any, result: Any) -> Any:
    model.spare.grad = torch.zeros(4)
    model.extra.grad = model.spare.grad.view(4)
    return result


def rng_behind(model: Any, opt: Any, result: Any) -> Any:
    torch.manual_seed(3)
    return result


def version_bumped(model: Any, opt: Any, result: Any) -> Any:
    with torch.no_grad():
        model.calls.add_(0)
    return result


def parameter_replaced(model: Any, opt: Any, result: Any) -> Any:
    old = model.fc2.bias
    model.fc2.bias = nn.Parameter(old.detach().clone())
    return result


def buffer_replaced(model: Any, opt: Any, result: Any) -> Any:
    version = model.calls._version
    model.calls = model.calls.clone()
    torch._C._autograd._unsafe_set_version_counter((model.calls,), (version,))
    return result


def state_is_a_number(model: Any, opt: Any, result: Any) -> Any:
    state = opt.state[model.fc1.weight]
    state["step"] = float(state["step"])
    return result


def state_missing(model: Any, opt: Any, result: Any) -> Any:
    del opt.state[model.fc1.weight]["exp_avg"]
    return result


def lr_baked(model: Any, opt: Any, result: Any) -> Any:
    opt.param_groups[0]["lr"] = 0.5
    return result


def training_off(model: Any, opt: Any, result: Any) -> Any:
    model.drop.eval()
    return result


def result_copied(model: Any, opt: Any, result: Any) -> Any:
    return result[0], result[1].clone()


def result_detached(model: Any, opt: Any, result: Any) -> Any:
    return result[0].detach(), result[1]


def result_in_a_list(model: Any, opt: Any, result: Any) -> Any:
    return list(result)


def result_in_double(model: Any, opt: Any, result: Any) -> Any:
    return result[0].double(), result[1]


def grad_mode_left_off(model: Any, opt: Any, result: Any) -> Any:
    torch.set_grad_enabled(False)
    return result


def hook_left_behind(model: Any, opt: Any, result: Any) -> Any:
    model.fc1.register_forward_hook(lambda *_: None)
    return result


DAMAGES = (
    (one_bit, "model.fc2.bias: values: 1 of 4 differ"),
    (grad_forgotten, "model.fc1.weight.grad: "),
    (grads_share_memory, "model.extra.grad: same memory as model.extra.grad in eager, as model.spare.grad"),
    (rng_behind, "random state"),
    (version_bumped, "model.calls: version: eager 1, compiled 2"),
    (parameter_replaced, "model.fc2.bias"),
    (buffer_replaced, "model.calls: .same object, same memory"),
    (state_is_a_number, r"opt.state\[0.2\]\['step'\]"),
    (state_missing, r"opt.state\[0.2\].<keys>"),
    (lr_baked, r"opt.param_groups\[0\]\['lr'\]: eager 0.001 .float., compiled 0.5"),
    (training_off, "model.drop.training: eager True"),
    (result_copied, r"results\[0\]\[1\]: (same memory|.*version)"),
    (result_detached, r"results\[0\]\[0\]: requires_grad"),
    (result_in_a_list, r"results\[0\].<type>: eager 'tuple'"),
    (result_in_double, r"results\[0\]\[0\]: dtype"),
    (grad_mode_left_off, "modes"),
    (hook_left_behind, "model.fc1._forward_hooks"),
)


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_catches(damage: Callable[..., Any], message: str) -> None:
    try:
        with pytest.raises(Different, match=message):
            assert_same_run(world, compile=wrong(damage))
    finally:
        torch.set_grad_enabled(True)


def test_passes_eager_against_eager() -> None:
    run = assert_same_run(world, compile=identity, poke=True)
    assert len(run.results) == 5


def test_catches_side_effects_that_happen_once() -> None:
    def compile(step: Step) -> Step:
        def damaged(x: torch.Tensor, log: list[int]) -> torch.Tensor:
            kept = list(log)
            result = step(x, log)
            if kept:
                log[:] = kept
            return result

        return damaged

    def make(seed: int) -> World:
        def step(x: torch.Tensor, log: list[int]) -> torch.Tensor:
            log.append(len(log))
            return x + 1

        return World(step, [(torch.ones(2), [])])

    with pytest.raises(Different, match=r"call 1: args\[0\]\[1\].<len>"):
        assert_same_run(make, compile=compile)


def test_catches_a_result_overwritten_by_the_next_call() -> None:
    def compile(step: Step) -> Step:
        buffer = torch.zeros(2)

        def damaged(x: torch.Tensor) -> torch.Tensor:
            buffer.data.copy_(step(x))
            return buffer

        return damaged

    def make(seed: int) -> World:
        return World(lambda x: x * 2, [(torch.ones(2),), (torch.zeros(2),)])

    with pytest.raises(Different, match="call 1"):
        assert_same_run(make, compile=compile)


def test_catches_late_recompiles() -> None:
    class Nervous:
        def __init__(self, step: Step) -> None:
            self.step, self.recompiles = step, []

        def __call__(self, *args: Any) -> Any:
            self.recompiles.append("L['x'] is new")
            return self.step(*args)

    with pytest.raises(Different, match="recompiled when nothing had changed"):
        assert_same_run(world, compile=Nervous)


def test_catches_lost_aliases_among_results_by_writing() -> None:
    def make(seed: int) -> World:
        return World(lambda x: (x, x.view(2, 2)), [(torch.ones(4),)])

    assert_same_run(make, compile=identity, poke=True)
    with pytest.raises(Different, match="memory"):
        assert_same_run(make, compile=lambda step: lambda x: (x, step(x)[1].clone()), poke=True)


def test_a_failed_call_must_raise_alike_and_leave_the_world() -> None:
    def make(seed: int) -> World:
        x = torch.ones(2)

        def step() -> None:
            x.add_(1)
            raise KeyError("user")

        return World(step, watch={"x": x})

    with pytest.raises(Different, match="after a failed call: x: values"):
        assert_same_failure(make, compile=identity)

    def refuse(step: Step) -> Step:
        def refused() -> None:
            raise KeyError("user")

        return refused

    def mistake(step: Step) -> Step:
        def refused() -> None:
            raise ValueError("other")

        return refused

    assert_same_failure(make, compile=refuse)
    with pytest.raises(Different, match="eager raises KeyError"):
        assert_same_failure(make, compile=mistake)
