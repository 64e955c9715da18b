"""Saved values are free as soon as the backward has read them, unless the graph is kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from wholestep.autograd import aot_function, default_partition, min_cut_partition

WATCHED: list[weakref.ref[torch.UntypedStorage]] = []
SEEN: list[int] = []


@torch.library.custom_op("tests::passed", mutates_args=())
def passed(x: Tensor) -> Tensor:
    """A copy."""
    return x.clone()


@torch.library.custom_op("tests::passed_back", mutates_args=())
def passed_back(grad: Tensor) -> Tensor:
    """Notes how many of the watched memories exist when the backward comes by."""
    SEEN.append(sum(ref() is not None for ref in WATCHED))
    return grad.clone()


for copying in (passed, passed_back):
    copying.register_fake(lambda x: torch.empty_like(x))
passed.register_autograd(lambda ctx, grad: passed_back(grad))


def function(x: Tensor) -> Tensor:
    return passed(x.exp()).cos().sum()


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_saved_values_die_on_the_way(partition: Any) -> None:
    compiled = aot_function(function, "aten", partition_fn=partition)
    x = torch.randn(300, requires_grad=True)
    for _ in range(2):
        loss = compiled(x)
        saved = [t for t in loss.grad_fn.saved_tensors if t is not x]
        assert len(saved) == 2
        WATCHED[:] = [weakref.ref(t.untyped_storage()) for t in saved]
        del saved
        SEEN.clear()
        x.grad = None
        loss.backward(retain_graph=True)
        first, x.grad = x.grad, None
        loss.backward()
        assert SEEN == [2, 1], "kept for the second backward, then one of two is free halfway"
        assert torch.equal(first, x.grad)
        assert all(ref() is None for ref in WATCHED)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_gradients_are_as_eager() -> None:
    x = torch.randn(300, requires_grad=True)
    (want,) = torch.autograd.grad(function(x), x)
    (got,) = torch.autograd.grad(aot_function(function, "aten")(x), x)
    assert torch.equal(want, got)
