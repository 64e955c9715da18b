"""`ws.log`, `ws.disable`, `ws.graph_break` and `ws.is_compiling` inside of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import UnsupportedError


def training(seen: list[Any], reads: bool) -> Any:
    """A step that logs, and reads a value besides if it is to."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = torch.optim.Adam(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        ws.log(lambda **values: seen.append(values), loss=loss, rows=len(x), out=out)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        ws.log(lambda norm: seen.append(norm), norm=norm)
        if reads:
            seen.append(float(f"{loss.item()}"))
        opt.step()
        opt.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("reads", [False, True], ids=["replayed", "co-run"])
def test_what_is_logged_comes_after_each_call_with_real_values(reads: bool) -> None:
    eager, ours = [], list[Any]()
    step, compiled = training(eager, False), ws.compile(training(ours, reads), fullgraph=not reads)
    for call in range(6):
        x = torch.full((2, 4), float(call))
        eager.clear()
        ours.clear()
        assert torch.equal(step(x), compiled(x))
        if reads:
            assert ours.pop(0) == eager[0]["loss"]  # read in the step, and so before what is logged
        assert [entry["loss"] if isinstance(entry, dict) else entry for entry in ours] == \
            [entry["loss"] if isinstance(entry, dict) else entry for entry in eager]
        assert type(ours[0]["loss"]) is float and ours[0]["rows"] == 2 and torch.equal(ours[0]["out"], eager[0]["out"])
    assert bool(compiled.breaks) == reads and len(compiled.recompiles) <= 1


def test_a_step_that_raises_logs_nothing_and_outside_of_steps_it_is_at_once() -> None:
    seen: list[float] = []

    @ws.compile
    def failing(x: Tensor) -> None:
        ws.log(lambda total: seen.append(total), total=x.sum())
        raise KeyError("after it")

    for _ in range(3):
        with pytest.raises(KeyError):
            failing(torch.ones(2))
    assert not seen
    ws.log(lambda total: seen.append(total), total=torch.ones(2).sum())
    assert seen == [2.0]


def test_disabled_functions_run_as_they_are_with_all_before_done() -> None:
    seen: list[Any] = []

    @ws.disable
    def host(x: Tensor) -> Tensor:
        seen.append((x.sum().item(), ws.is_compiling()))
        return x.mul_(2)

    def step(x: Tensor) -> Tensor:
        y = x + 1
        ws.graph_break()
        return host(y).cumsum(0) * 3

    compiled = ws.compile(step)
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(compiled(x), step(x))
    assert len(seen) == 10 and seen[::2] == seen[1::2] and not any(compiling for _, compiling in seen)
    assert "ws.graph_break()" in compiled.breaks[0] and host.__name__ == "host"


@pytest.mark.parametrize("call", [ws.graph_break, ws.disable(len)], ids=["graph_break", "disable"])
def test_where_python_may_not_run_they_are_refused(call: Any) -> None:
    @ws.compile(fullgraph=True)
    def step(x: Tensor) -> Tensor:
        call(*([x] if call is not ws.graph_break else []))
        return x + 1

    with pytest.raises(UnsupportedError, match="fullgraph=True") as caught:
        step(torch.ones(2))
    assert caught.value.where.startswith(__file__)


def test_is_compiling_while_a_step_is_captured() -> None:
    seen: list[bool] = []
    ws.compile(lambda x: seen.append(ws.is_compiling()) or x + 1, fullgraph=True)(torch.ones(2))
    assert seen == [True] and not ws.is_compiling()


def test_explain_says_why_and_in_which_segments() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2 + 1
        if float(f"{y.sum()}") > 0:
            y = y.sin()
        return y

    compiled, x = ws.compile(step), torch.ones(64, 64)
    before = compiled.explain(x)
    assert before.breaks and not before.segments and "runs at each call" in str(before)
    for _ in range(5):
        compiled(x)
    found = compiled.explain(x)
    assert [operators for operators, _, _ in found.segments] == [4, 1] or found.eager
    assert not found.segments or found.segments[0][1] >= 4 * 64 * 64 and f"{__file__}:" in found.segments[0][2]
    assert "because: " in str(found)


def test_the_code_and_the_graphs_of_segments() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2 + 1
        seen.append(float(f"{y.sum()}"))
        return y.sin()

    seen: list[float] = []
    compiled, x = ws.compile(step), torch.ones(64, 64)
    compiled(x)
    with pytest.raises(ValueError, match="call the step again"):
        print(compiled.code)
    assert compiled.graphs == []
    for _ in range(2):
        compiled(x)
    titles = [line for line in compiled.code.split("\n") if " operators, run at " in line]
    assert [title.split()[1] for title in titles] == ["4", "1"] and all(f"{__file__}:" in title for title in titles)
    assert compiled.code.count("def run(") == len(compiled.graphs) == 2
    assert repr(compiled).endswith("its Python runs at each call, segments: 2")
    assert any("sin" in str(node.target) for node in compiled.graphs[1].graph.nodes)
    for _ in range(40):
        compiled(x)
    if compiled.explain(x).eager:
        with pytest.raises(ValueError, match="runs in eager"):
            print(compiled.code)
