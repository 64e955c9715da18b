"""Inductor and users' own callables as backends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.support.lower_programs import clone_inputs, program
from wholestep.autograd import aot_function
from wholestep.errors import LoweringError
from wholestep.lower.backends.interpreter import interpret
from wholestep.lower.backends.other_compilers import lower_callable, lower_inductor


def test_inductor_gives_the_same_step() -> None:
    step, real = program("mlp", keep_grads=True)
    fast, ours, theirs = lower_inductor(step), clone_inputs(real), clone_inputs(real)
    for _ in range(2):
        got, expected = fast(*ours), interpret(step, theirs)
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            torch.testing.assert_close(a, b)
            if index in step.signature.mutations:
                assert a is ours[step.signature.mutations[index]]
    assert len({t.untyped_storage().data_ptr() for t in got}) == len(got)


def test_a_function_of_the_user_is_a_backend() -> None:
    step, real = program("mlp", "momentum")
    seen = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        seen.append(len(example_inputs))
        return gm.forward

    fast, ours, theirs = lower_callable(backend, step), clone_inputs(real), clone_inputs(real)
    for a, b in zip(fast(*ours), interpret(step, theirs), strict=True):
        assert torch.equal(a, b)
    assert seen == [len(real)]
    assert all(torch.equal(a, b) for a, b in zip(ours[:-1], theirs[:-1], strict=True))


def test_each_input_of_a_backend_has_an_example_of_its_own() -> None:
    """Inductor takes one that is given twice for one input: the gradients of equal layers were those of one of them."""
    examples: list[list[Any]] = []

    def backend(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        examples.append(given)
        return gm

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))]
    model = torch.nn.Sequential(*layers)
    plain, x = copy.deepcopy(model), torch.rand(2, 4)
    plain(x).sum().backward()
    ws.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert len(examples) == 2 and all(len({id(one) for one in given}) == len(given) for given in examples)


def test_a_backend_that_returns_too_little_is_named() -> None:
    step, real = program("mlp", "sgd")
    with pytest.raises(LoweringError, match="returned 1 outputs"):
        lower_callable(lambda gm, inputs: lambda *a: [0], step)(*real)
    with pytest.raises(LoweringError, match="required a callable"):
        lower_callable(lambda gm, inputs: None, step)


def test_sparse_gradients_of_a_users_backend() -> None:
    runs = []
    for compile in (lambda fn: fn, lambda fn: aot_function(fn, lambda gm, inputs: gm.forward)):
        weight = torch.ones(10, 4, requires_grad=True)
        tokens = torch.tensor([1, 2, 2])
        look_up = compile(lambda tokens, weight: torch.nn.functional.embedding(tokens, weight, sparse=True))
        look_up(tokens, weight).sum().backward()
        runs.append(weight.grad)
    assert runs[0].layout == runs[1].layout and torch.equal(runs[0].to_dense(), runs[1].to_dense())
