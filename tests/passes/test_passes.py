"""Passes: equal results where they promise that, fused kernels' results where they change rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lower.test_interpreter import compare
from tests.support.lower_programs import Builder, clone_inputs, program
from wholestep.ir import StepGraph, check
from wholestep.lower.backends.aten import lower_aten
from wholestep.lower.backends.interpreter import interpret
from wholestep.passes import fuse_optimizer, same_values

aten = torch.ops.aten


def targets(step: StepGraph) -> list[Any]:
    return [n.target for n in step.graph.nodes if n.op == "call_function"]


def test_equal_values_are_computed_once() -> None:
    b = Builder()
    x = b.input("x", torch.randn(4, 4), "parameter")
    one, two = (b.call(aten.mm.default, x, b.call(aten.t.default, x)) for _ in range(2))
    noise = [b.call(aten.bernoulli.p, x, 0.5) for _ in range(2)]
    step, real = b.finish([b.call(aten.add.Tensor, one, two), *noise], {})
    before = clone_inputs(real)
    torch.manual_seed(0)
    expected = interpret(step, before)
    small = check(same_values(step), "same_values")
    assert targets(small).count(aten.mm.default) == 1 and targets(small).count(aten.bernoulli.p) == 2
    torch.manual_seed(0)
    assert all(torch.equal(a, c) for a, c in zip(interpret(small, real), expected, strict=True))


FUSED = {
    "adamw": (aten._fused_adamw.default, torch.optim.AdamW, {"weight_decay": 0.01}),
    "adamw_foreach": (aten._fused_adamw.default, torch.optim.AdamW, {"weight_decay": 0.01}),
    "adam": (aten._fused_adam.default, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "momentum": (aten._fused_sgd.default, torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9}),
    "nesterov": (aten._fused_sgd.default, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd": (aten._fused_sgd.default, torch.optim.SGD, {}),
    "adagrad": (aten._fused_adagrad.default, torch.optim.Adagrad, {"lr_decay": 0.1}),
}
STATE = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adagrad: ("step", "sum"),
}


@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_optimizer_gives_what_eager_fused_gives(name: str) -> None:
    """The program's gradients, given to torch's own fused optimizer, must lead to the same parameters."""
    overload, kind, options = FUSED[name]
    step, real = program("mlp", name, keep_grads=True)
    fused = check(fuse_optimizer(step), "fuse_optimizer")
    assert targets(fused).count(overload) == 1
    assert not {aten.addcdiv.default, aten.addcmul.default} & set(targets(fused))
    kinds = [i.kind for i in step.signature.inputs]
    params = [torch.nn.Parameter(x.detach().clone()) for x, k in zip(real, kinds, strict=True) if k == "parameter"]
    states = iter([x.clone() for x, k in zip(real, kinds, strict=True) if k == "state"])
    optimizer = kind(params, lr=1e-3, fused=True, **options)
    names = STATE[kind] if name != "sgd" else ()
    for p in params:
        optimizer.state[p].update({n: next(states) for n in names})
    ours = clone_inputs(real)
    program_ = lower_aten(fused)
    assert ".clone()" not in program_.code
    for _ in range(3):
        got = program_(*ours)
        for p, g in zip(params, got[-len(params) :], strict=True):
            p.grad = g.clone()
        optimizer.step()
        for p, mine in zip(params, ours, strict=False):
            assert torch.equal(p, mine)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_fused_programs_lower_bitwise(name: str) -> None:
    step, real = program(name, "adamw")
    compare(fuse_optimizer(step), real)


def test_two_updates_of_one_parameter_stay_in_order() -> None:
    step, real = program("mlp", "sgd_twice")
    fused = check(fuse_optimizer(step), "fuse_optimizer")
    assert targets(fused).count(aten._fused_sgd.default) == 2
    ours, theirs = clone_inputs(real), clone_inputs(real)
    got, expected = lower_aten(fused)(*ours), interpret(step, theirs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_unknown_arithmetic_stays() -> None:
    b = Builder()
    b.phase = "optimizer"
    x, y = (b.input(n, torch.rand(4), "parameter") for n in "xy")
    new = b.call(aten.addcdiv.default, x, y, b.call(aten.add.Tensor, y, 1.0), value=-0.5)
    step, real = b.finish([new], {0: 0})
    assert targets(fuse_optimizer(step)) == targets(step)
    compare(fuse_optimizer(step), real)
