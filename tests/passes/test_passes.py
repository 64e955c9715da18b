"""Passes that keep every bit."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.lower_programs import Builder, clone_inputs
from wholestep.ir import StepGraph, check
from wholestep.lower.backends.interpreter import interpret
from wholestep.passes import same_values

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
