"""The generated program against the naive interpreter, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.lower_programs import OPTIMIZERS, clone_inputs, program
from wholestep.lower.backends.aten import lower_aten
from wholestep.lower.backends.interpreter import lower_naive


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        alike = a.shape == b.shape and a.stride() == b.stride()
        return alike and (torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True))
    return bool(a == b)


def compare(step: Any, inputs: list[Any], calls: int = 3) -> Any:
    """Runs both lowerings on copies for some calls; all outputs and inputs stay equal."""
    ours, theirs = clone_inputs(inputs), clone_inputs(inputs)
    fast, slow = lower_aten(step), lower_naive(step)
    for call in range(calls):
        torch.manual_seed(call)
        expected = slow(*theirs)
        state = torch.get_rng_state()
        torch.manual_seed(call)
        got = fast(*ours)
        assert torch.equal(torch.get_rng_state(), state)
        assert len(got) == len(expected)
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert equal(a, b), (call, index)
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert equal(a, b), (call, step.signature.inputs[index])
        for out, into in step.signature.mutations.items():
            assert got[out] is ours[into]
    return fast


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("name", ["mlp", "wide", "conv", "gpt"])
def test_training_steps_bitwise(name: str, optimizer: str) -> None:
    step, inputs = program(name, optimizer, keep_grads=name == "mlp")
    compare(step, inputs)
