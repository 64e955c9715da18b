"""Chains of operators, views, writes and numbers longer than Python's stack; values that double at each level."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.autograd import aot_function, min_cut_partition
from wholestep.testing import run_ranks

LONG = 300


@pytest.fixture(autouse=True)
def shallow() -> Iterator[None]:
    """A stack that is shorter than the chains."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 270)
    yield
    sys.setrecursionlimit(before)


def chain(x: Tensor) -> Tensor:
    for _ in range(LONG):
        x = x.sin()
    return x


def whole(x: Tensor) -> Any:
    out = chain(x)
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]


def views(x: Tensor) -> Any:
    base = x * 2
    view = base
    for _ in range(LONG // 2):
        view = view.view(2, 2).t().reshape(4) if view.is_contiguous() and view.dim() == 1 else view.view(4)
    view.mul_(3)
    return base * 1, view + 1


def transposed(x: Tensor) -> Any:
    view = (x * 1).view(2, 2)
    for _ in range(LONG + 1):
        view = view.t()
    view.mul_(2)
    return view * 1, torch.autograd.grad(view.exp().sum(), x)[0]


def written(x: Tensor) -> Tensor:
    with torch.no_grad():
        for _ in range(LONG):
            x.mul_(1.01)
    return x.sum()


def pieces(x: Tensor) -> Tensor:
    y = x * 1
    for place in range(LONG):
        y[place % 3 : place % 3 + 2].mul_(1.01)
    return y


def decided(x: Tensor) -> Tensor:
    number = x.sum()
    for _ in range(LONG):
        number = number + 1.5
    return x * 2 if number > 3 else x


def doubled(x: Tensor) -> Tensor:
    made, number = torch.ones(3), x.sum()
    for _ in range(40):
        made, number = made.sin() + made.cos(), number.sin() + number.cos()
    return made * x[0] if number > 0 else x


def state() -> Callable[[Tensor], Tensor]:
    kept: dict[str, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if "state" not in kept:
            kept["state"] = chain(torch.full((4,), 2.0))
        kept["state"] = kept["state"] * 0.5 + x.detach()
        return kept["state"] * 1

    return step


STEPS: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    name: lambda step=step: step  # type: ignore[misc]
    for name, step in {
        "forward": chain, "forward and backward": whole, "views written": views, "views and backward": transposed,
        "an input written": written, "pieces written": pieces, "a decision": decided, "doubled values": doubled,
    }.items()
} | {"state": state}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in STEPS), ("forward and backward", True), ("views written", True)]
)
def test_steps_deeper_than_pythons_stack(name: str, dynamic: bool) -> None:
    seen = []
    for compiled in (False, True):
        step = STEPS[name]()
        run = ws.compile(step, dynamic=dynamic, fullgraph=name != "a decision") if compiled else step
        for _ in range(2):
            x = torch.linspace(0, 1, 4).requires_grad_()
            found = run(x)
        seen.append([x, *(found if isinstance(found, tuple) else [found])])
    assert all(map(torch.equal, *seen))


def test_backwards_deeper_than_pythons_stack() -> None:
    x = torch.linspace(0, 1, 4).requires_grad_()
    for run in (ws.compile(chain, fullgraph=True), aot_function(chain, "aten", partition_fn=min_cut_partition)):
        for weight in (torch.linspace(1, 2, 4), torch.ones(()).expand(4)):
            assert torch.equal(*(torch.autograd.grad(call(x), x, weight)[0] for call in (chain, run)))
    assert ws.compile(whole, fullgraph=True).explain(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for _ in range(LONG):
            weight = weight.t()
        return chain(x @ weight) @ self.weight


def on_two_ranks() -> list[list[Tensor]]:
    sys.setrecursionlimit(len(inspect.stack(0)) + 270)
    return [under(plan("data")) for plan in (ws.DataParallel, ws.FullyShard, ws.ShardedOptimizer)]


def under(plan: Any) -> list[Tensor]:
    model = Deep()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    compiled = ws.compile(
        step, mesh=ws.init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), plan=plan, fullgraph=True
    )
    return [compiled(torch.ones(2, 4)) for _ in range(2)]


def test_plans_of_steps_deeper_than_pythons_stack() -> None:
    for one, two in zip(*run_ranks(on_two_ranks, 2), strict=True):
        assert all(map(torch.equal, one, two)) and not torch.equal(one[0], one[1])
