"""Expansion of whole steps: every rank's graph, run on its parts, gives the parts of what one device gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wholestep import comm
from wholestep.api import capture
from wholestep.comm.rows import piece
from wholestep.ir import Input, check, info
from wholestep.spmd.expand import expand
from wholestep.spmd.mesh import Line
from wholestep.spmd.placements import Placement, Replicate, Shard
from wholestep.testing import run_ranks

PlacementOf = Callable[[Input, torch.Tensor], Placement]


def rows_of_everything(item: Input, value: torch.Tensor) -> Placement:
    """Rows of batches, and of large parameters and their states."""
    split = value.dim() > 0 and (item.kind == "tensor" or value.numel() > 20)
    return Shard(0) if split else Replicate()


def cut(value: Any, placement: Placement | None, line: Line) -> Any:
    """What a rank holds of a whole value."""
    if not isinstance(placement, Shard):
        return value.clone() if isinstance(value, torch.Tensor) else value
    start, stop = piece(value.shape[placement.dim], line.size, line.rank)
    return value.narrow(placement.dim, start, stop - start).clone()


def compare(fn: Callable[..., Any], *args: Any, ranks: int = 2, of: PlacementOf = rows_of_everything) -> list[str]:
    """Runs a step whole, and expanded on thread ranks; gives rank 0's operators."""
    traced = capture(fn, args, {}, differentiable=False)[1]
    step = traced.step
    real = [item.value for item in traced.lifted]
    values = []
    for place, node in enumerate(step.placeholders):
        fake = info(node).value
        value = real[place] if place < len(real) else fake
        hoisted = isinstance(fake, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter)
        values.append(torch.zeros(fake.shape, dtype=fake.dtype) if hoisted else value)
    values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
    items = step.signature.inputs
    rest = [of(i, v) if isinstance(v, torch.Tensor) else None for i, v in zip(items, values, strict=True)]
    torch.manual_seed(1)
    want = step.gm(*values)
    lock = threading.Lock()

    def rank() -> tuple[list[Any], list[str]]:
        group = comm.get_group()
        line = Line(group.group_name, ranks, group.rank())
        with lock:
            mine = check(expand(step, line=line, placement_of=of), "expand")
        parts = [cut(v, p, line) for v, p in zip(values, rest, strict=True)]
        return list(mine.gm(*parts)), [str(node.target) for node in mine.graph.nodes]

    torch.manual_seed(1)
    found = run_ranks(rank, ranks, transport="thread")
    for number, (outputs, _) in enumerate(found):
        for index, (whole, part) in enumerate(zip(want, outputs, strict=True)):
            into = step.signature.mutations.get(index)
            placement = None if into is None else rest[into]
            torch.testing.assert_close(part, cut(whole, placement, Line("", ranks, number)), rtol=1e-10, atol=1e-12)
    return list(found[0][1])


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_mlp(how: dict[str, bool], ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    operators = compare(train, model, torch.optim.AdamW(model.parameters(), **how), torch.randn(5, 6), ranks=ranks)
    assert any("wholestep" in name for name in operators)
