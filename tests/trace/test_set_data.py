"""`tensor.data = new` on a tensor from outside gives it other memory: who shows either sees what eager has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import UnsupportedError

Tensors = list[Tensor]


def halve(s: Tensors) -> None:
    s[0].data = s[0].data * 0.5


def seen_after(s: Tensors) -> Any:
    halve(s)
    return s[0].t(), s[0].detach()


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


def exchanged(s: Tensors) -> Any:
    s[0].add_(1)
    first = s[0].data
    s[0].data = s[1]
    s[1].data = first
    return s[1].add_(0.5)


def written_through_a_view(s: Tensors) -> Any:
    new = s[0] * 0.5
    row = new[0]
    s[0].data = new
    row.add_(1)


def of_an_input(s: Tensors) -> Any:
    s[0].data = s[1]
    s[0].mul_(2)


def parts(s: Tensors) -> Any:
    flat = torch.cat([t.flatten() for t in s]) * 0.5
    for t, part in zip(s, flat.split(12), strict=True):
        t.data = part.view(3, 4)
    return flat.add_(1)


def perturbed(s: Tensors) -> Any:
    """As SAM does: the parameter lies in the copy's memory afterwards."""
    old = s[0].data.clone()
    s[0].add_(s[1] * 0.1)
    s[1].copy_(s[0].square())
    s[0].data = old
    s[0].sub_(s[1])
    return old


def of_shared_memory(flat: Tensor, one: Tensor, beside: Tensor) -> Any:
    flat.add_(1)
    seen = one.t()
    one.data = one * 0.5
    one.mul_(beside)
    return seen, one.t(), one.detach()


def results(step: Callable[[Tensors], Any]) -> list[Any]:
    torch.manual_seed(0)
    held, seen = [torch.randn(3, 4), torch.randn(3, 4)], list[Any]()
    for _ in range(4):
        seen += [t.detach() for t in held]  # who shows the memory that they leave
        found = step(held)
        seen += found if isinstance(found, tuple) else [found]
        seen += [t._version for t in held]
    return [t.tolist() if isinstance(t, Tensor) else t for t in (*seen, *held)]


STEPS = [seen_after, seen_before, read_before, given, read_after, exchanged, parts, perturbed]


@pytest.mark.parametrize("step", [*STEPS, written_through_a_view, of_an_input])
def test_each_calls_result_keeps_its_values(step: Callable[[Tensors], Any]) -> None:
    assert results(ws.compile(step, fullgraph=True)) == results(step)


class Renormed(nn.Module):
    """Its weight is used before and after it is renormed, and its gradients come from a backward outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).square()
        self.first.weight.data = torch.renorm(self.first.weight.data, 2, 0, 0.5)
        out: Tensor = self.last(self.first(hidden).relu())
        return out


def trained(compile: Callable[[nn.Module], nn.Module]) -> list[Any]:
    torch.manual_seed(0)
    model = Renormed()
    called, opt, seen = compile(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), list[Any]()
    for k in range(4):
        seen.append(model.first.weight.detach())
        called(torch.full((4, 3), 1.0 + k)).square().mean().backward()
        seen += [p.grad for p in model.parameters()]
        opt.step()
        opt.zero_grad()
    return [t.tolist() for t in (*seen, *model.parameters())]


def test_a_module_may_do_it_that_is_differentiated_outside() -> None:
    assert trained(lambda model: ws.compile(model, fullgraph=True)) == trained(lambda model: model)


def test_its_memory_is_not_asked_for_afterwards() -> None:
    def step(s: Tensors) -> Any:
        halve(s)
        return s[0] * s[0].untyped_storage().nbytes()

    with pytest.raises(UnsupportedError, match=r"assigns \.data"):
        results(ws.compile(step, fullgraph=True))
    assert results(ws.compile(step)) == results(step)


def test_a_part_of_memory_that_others_share_leaves_it() -> None:
    said = []
    for step in (of_shared_memory, ws.compile(of_shared_memory, fullgraph=True)):
        flat, seen = torch.arange(12.0), list[Any]()
        one, beside = flat[:6].view(2, 3).detach(), torch.full((2, 3), 3.0)
        for _ in range(3):
            one.data = flat[:6].view(2, 3)
            seen += [*step(flat, one, beside), flat.clone(), one]
        said.append([(t.tolist(), t._version) for t in seen])
    assert said[0] == said[1]
