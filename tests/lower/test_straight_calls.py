"""Calls that run in a row with no Python between them: torch's bits at every shape and layout, and torch's settings."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.lower.test_interpreter import compare
from tests.support.lower_programs import Builder
from wholestep.lower.fusion import chains
from wholestep.torch_compat import matrix_product

aten = torch.ops.aten


def layer(rows: int, columns: int, wide: int, flipped: bool) -> tuple[ws.ir.StepGraph, list[torch.Tensor]]:
    """Forward and backward of a linear layer with a relu, whose gradients take the parameters' places."""
    b = Builder()
    torch.manual_seed(0)
    given = torch.randn(wide, rows).t() if flipped else torch.randn(rows, wide)
    given[0, :2] = torch.tensor([-0.0, 1e-40])
    x = b.input("x", given, "parameter")
    weight = b.input("w", torch.randn(columns, wide), "parameter")
    bias = b.input("b", torch.randn(columns), "parameter")
    hidden = b.call(aten.addmm.default, bias, x, b.call(aten.t.default, weight))
    result = b.call(aten.relu.default, hidden)
    grad = b.call(aten.threshold_backward.default, b.call(aten.add.Tensor, result, hidden), hidden, 0)
    back = b.call(aten.mm.default, grad, weight)
    new = b.call(aten.mm.default, b.call(aten.t.default, grad), b.call(aten.sub.Tensor, x, back))
    return b.finish([new, b.call(aten.sum.dim_IntList, grad, [0])], {0: 1, 1: 2})


SHAPES = [(2, 2, 2), (3, 64, 5), (32, 64, 64), (17, 33, 65), (15, 100, 2), (300, 128, 4), (4200, 3, 2), (1, 8, 8),
          (8, 1, 8)]  # fmt: skip


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_bitwise(shape: tuple[int, int, int], flipped: bool) -> None:
    fast = compare(*layer(*shape, flipped))
    assert "straight_0()" in fast.code


def test_sums_over_few_rows_bitwise() -> None:
    """torch adds up the last columns, up to three, in another order than those before."""
    shapes = [(rows, columns) for rows in range(2, 9) for columns in range(2, 9)]

    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        return [((x * 2).sum(0) / 3).exp() for x in given]

    compiled = ws.compile(step, fullgraph=True)
    for seed in range(20):
        torch.manual_seed(seed)
        given = [torch.randn(shape) for shape in shapes]
        assert all(map(torch.equal, compiled(*given), step(*given)))
    assert "straight_0()" in compiled.code


def test_special_numbers_go_through_as_torchs() -> None:
    step, inputs = layer(32, 64, 64, False)
    for index, number in enumerate([math.inf, -math.inf, math.nan, -0.0, 1e-42]):
        inputs[0][index] = number
        inputs[2][index :: 9] = number
    compare(step, inputs)


def test_products_follow_the_precision_that_torch_is_set_to() -> None:
    step, inputs = layer(32, 64, 64, False)
    fast = compare(step, inputs)
    in_rows = fast.code.count("\n    #   torch.mm(")
    assert in_rows == (2 if matrix_product() else 0)
    try:
        torch.set_float32_matmul_precision("medium")
        fast(*inputs)
        assert fast.code.count("\n    torch.mm(") == 2 and "\n    #   torch.mm(" not in fast.code
    finally:
        torch.set_float32_matmul_precision("highest")
    fast(*inputs)
    assert fast.code.count("\n    #   torch.mm(") == in_rows


def test_a_step_of_many_sizes() -> None:
    """What is of one size runs in a row; what changes with the batch was tried at one size alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU())
    models = [model, copy.deepcopy(model)]

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        return loss.detach()

    compiled = ws.compile(step, fullgraph=True, dynamic=True)
    for rows in (5, 9, 2, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(models[0], x), step(models[1], x))
    assert len(compiled.recompiles) == 0
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_wrong_rows_are_refused() -> None:
    asks = chains.native.chain(4, [(2, 0)], [(chains.native.KERNELS["neg"], 0, 0, -1, -1, -1, -1, 0)])
    for rows in ([(0, 1)], [(4, 1)], [(1, 1)], [asks], [object()]):
        with pytest.raises(ValueError):
            chains.native.straight(0, rows)
