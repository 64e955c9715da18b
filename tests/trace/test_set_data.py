"""`tensor.data = new` on a tensor from outside: what else shows the memory that it leaves, or gets, is as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wholestep as ws
from wholestep.errors import UnsupportedError

Tensors = list[torch.Tensor]


def halve(s: Tensors) -> None:
    s[0].data = s[0].data * 0.5


def seen_after(s: Tensors) -> Any:
    halve(s)
    return s[0].t()


def seen_before(s: Tensors) -> Any:
    seen = s[0].t()
    halve(s)
    return seen


def read_before(s: Tensors) -> Any:
    seen = s[0].detach()
    halve(s)
    return (seen * 2).sum()


def given(s: Tensors) -> Any:
    new = s[0] * 0.5
    s[0].data = new
    return new


def read_after(s: Tensors) -> Any:
    halve(s)
    s[1].data = s[1] + s[0]
    return s[0].t() * 1


def results(step: Callable[[Tensors], Any]) -> Tensors:
    torch.manual_seed(0)
    held = [torch.randn(3, 4), torch.randn(3, 4)]
    return [step(held) for _ in range(4)] + held


@pytest.mark.parametrize("step", [seen_after, seen_before, read_before, given, read_after])
def test_each_calls_result_keeps_its_values(step: Callable[[Tensors], Any]) -> None:
    assert all(map(torch.equal, results(ws.compile(step)), results(step)))
    if step is read_after:
        assert all(map(torch.equal, results(ws.compile(step, fullgraph=True)), results(step)))
    else:
        with pytest.raises(UnsupportedError, match=r"\.data"):
            results(ws.compile(step, fullgraph=True))
