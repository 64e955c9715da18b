"""Graphs at rest: what comes back is what was there, and nothing else is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

import wholestep as ws
from wholestep.capture_call import capture
from wholestep.ir import check, info
from wholestep.lower.backends.interpreter import interpret
from wholestep.packed_graph import Packed
from wholestep.torch_compat import FakeTensor


def train(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    hidden, order = torch.sort(model(x).view(4, -1), dim=1)
    loss = (hidden * torch.tensor([0.5])).sum() + nn.functional.dropout(order.float(), 0.5).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def world() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    return model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(4, 1, 5, 5)


def test_a_graph_comes_back_as_it_was():
    step = capture(train, world(), {})[1].step
    again = Packed(step).unpack()
    check(again, "packed")
    assert str(again.graph) == str(step.graph) and again.gm.code == step.gm.code
    assert again.signature == step.signature
    for old, new in zip(step.graph.nodes, again.graph.nodes, strict=True):
        assert list(old.meta) == list(new.meta) and old.name == new.name
        if old.op == "output":
            continue
        mine, other = info(old), info(new)
        assert (mine.phase, mine.seq, mine.where, mine.module) == (other.phase, other.seq, other.where, other.module)
        for a, b in zip(flat(mine.value), flat(other.value), strict=True):
            assert type(a) is type(b)
            if isinstance(a, FakeTensor):
                assert (a.size(), a.stride(), a.dtype, a.device) == (b.size(), b.stride(), b.dtype, b.device)
            else:
                assert a == b
    values = [info(node).value for node in step.placeholders]
    inputs = [torch.rand(v.shape).to(v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
    torch.manual_seed(1)
    expected = interpret(step, [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs])
    torch.manual_seed(1)
    found = interpret(again, inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if isinstance(a, torch.Tensor))


def flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (tuple, list)) else [value]


def test_a_program_keeps_no_graph_until_somebody_looks():
    step = ws.compile(train, fullgraph=True)
    args = world()
    for _ in range(3):
        step(*args)
    gc.collect()
    graph = step.graphs[0]
    assert graph is step.graphs[0] and any(node.name == "output" for node in graph.graph.nodes)
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None
    assert step.graphs[0].code  # made anew


def test_replay_holds_neither_the_first_batch_nor_what_tracing_made():
    def run(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        return {"x": x, "both": [model(x), (x, 1)]}

    step, model = ws.compile(run, fullgraph=True), nn.Linear(2, 2)
    first = torch.randn(3, 2)
    step(model, first)
    held = weakref.ref(first)
    del first
    x = torch.randn(3, 2)
    found = step(model, x)
    gc.collect()
    assert held() is None
    assert found["x"] is x and found["both"][1] == (x, 1) and torch.equal(found["both"][0], model(x))
    assert step.captures == 1
