"""Autocast in a step, around it and around its backward: casts are those of eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.errors import UnsupportedError

X, W = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-0.7, 0.9, 24).view(4, 6).requires_grad_()


def cast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype) if dtype is not None else nullcontext()


@torch.library.custom_op("test_autocast::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).float()


@torch.library.custom_op("test_autocast::with_rule", mutates_args=())
def with_rule(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).float()


for op in (product, with_rule):
    op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32))
    op.register_autograd(lambda ctx, grad: (None, X.T @ grad), setup_context=lambda ctx, inputs, output: None)
with_rule.register_autocast("cpu", torch.bfloat16)


def plain(x: Tensor) -> Tensor:
    return (x @ W).float()


def off(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return (x @ W).sin() @ W.T


def other(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ W).float()


def reads(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scale = (x @ W).sum().item()
        return (x * scale @ W).float()


def of_others(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return product(x, W)


def of_others_around(x: Tensor) -> Tensor:
    return product(x, W)


def of_others_with_a_rule(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return with_rule(x, W)


def of_torch(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.bilinear(x, x, W.T.reshape(6, 4, 1) * x[0]).float()


STATES = None, torch.float16, torch.bfloat16
STEPS = plain, off, other, reads, of_others, of_others_around, of_others_with_a_rule, of_torch


@pytest.mark.parametrize("options", [{}, {"backend": lambda gm, example: gm.forward}], ids=["aten", "other compiler"])
@pytest.mark.parametrize("step", STEPS)
def test_states_around_a_step_and_its_backward(step: Callable[..., Any], options: dict[str, Any]) -> None:
    compiled = ws.compile(step, **options)
    for around, behind in itertools.product(STATES, STATES):
        found = []
        for function in (step, compiled, compiled):
            with cast(around):
                result = function(X)
            with cast(behind):
                found.append((result, *torch.autograd.grad(result.sin().sum(), W)))
        for one in found[1:]:
            for got, expected in zip(one, found[0], strict=True):
                assert torch.equal(got, expected) and got.dtype == expected.dtype, (around, behind)


def test_kernels_by_operators_that_would_be_cast_are_refused() -> None:
    line = of_others.__code__.co_firstlineno + 2
    with pytest.raises(UnsupportedError, match=rf"product.default runs under autocast(.|\n)*{__file__}:{line}"):
        ws.compile(of_others, fullgraph=True)(X)
    compiled = ws.compile(of_others_with_a_rule, fullgraph=True)
    assert torch.equal(compiled(X), of_others_with_a_rule(X)) and compiled.captures == 1
