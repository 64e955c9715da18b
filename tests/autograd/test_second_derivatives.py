"""`create_graph=True` outside of a compiled function: gradients that have a derivative in eager refuse one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wholestep as ws

REFUSED = "does not currently support double backward"
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(3)]


FUNCTIONS: dict[str, Fn] = {
    "saves what follows from the weight": lambda x, w, b: (x * 2) @ (w * 2) + b,
    "saves weight and input": lambda x, w, b: x @ w + b,
    "saves its result": lambda x, w, b: (x + w).sigmoid() + b,
    "saves integers": lambda x, w, b: (x + w).relu() + b,
    "linear": lambda x, w, b: x + 2 * w - b,
    "saves none of the input": lambda x, w, b: x.sum() + (w * 3).exp().sum() + b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tangent_too", [False, True])
def test_each_gradient_requires_grad_where_eagers_does(name: str, tangent_too: bool) -> None:
    found = []
    for run in (FUNCTIONS[name], ws.compile(FUNCTIONS[name], fullgraph=True)):
        given = leaves()
        out = run(*given)
        tangent = torch.ones_like(out).requires_grad_(tangent_too)
        found.append(torch.autograd.grad(out, given, tangent, create_graph=True))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two) and one.requires_grad == two.requires_grad
        if two.requires_grad:
            with pytest.raises(RuntimeError, match=REFUSED):
                two.sum().backward()


def test_a_gradient_penalty_is_refused_where_nothing_that_is_saved_is_an_input() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return (((x - 0.5) @ (self.one * 0.3)).tanh() @ (self.two * 0.3)).mean()

    critic = Scaled()
    compiled, x = ws.compile(critic), torch.randn(4, 4, requires_grad=True)
    for of in ([*critic.parameters()], [critic.two]):
        (slope,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(compiled(x) + slope.square().sum(), of)
