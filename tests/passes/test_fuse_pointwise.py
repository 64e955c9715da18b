"""Pointwise fusion: which calls become regions, and what a step does before, while and after these are compiled."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.support.lower_programs import Builder, clone_inputs
from wholestep.functional import base_name
from wholestep.ir import StepGraph, check, is_effectful
from wholestep.lower.backends.interpreter import interpret
from wholestep.lower.fusion import compiled_regions
from wholestep.passes import Region, fuse_pointwise
from wholestep.testing import run_ranks

aten = torch.ops.aten
START = threading.Lock()
CALLS = [aten.mul.Tensor, aten.add.Tensor, aten.maximum.default, aten.mm.default]


def regions(step: StepGraph) -> list[Region]:
    return [node.target for node in step.graph.nodes if isinstance(node.target, Region)]


@pytest.mark.parametrize("seed", range(12))
def test_any_graph_stays_a_graph_of_the_same_values(seed: int) -> None:
    draw, b = random.Random(seed), Builder()
    values = [b.input("x", torch.rand(4, 4), "parameter"), b.input("y", torch.rand(4, 4), "batch")]
    for _ in range(40):
        one, two = draw.choices(values[-8:], k=2)
        kind = draw.randrange(6)
        if kind == 4:
            values.append(b.call(aten.t.default, one))
        elif kind == 5:
            values.append(b.call(aten.bernoulli.p, one, 0.5))
        else:
            values.append(b.call(CALLS[kind], b.call(aten.tanh.default, one), two))
    step, real = b.finish(values[-3:], {})
    fused = check(fuse_pointwise(step), "fuse_pointwise")
    assert regions(fused)
    torch.manual_seed(0)
    expected = interpret(step, clone_inputs(real))
    torch.manual_seed(0)
    assert all(torch.equal(a, e) for a, e in zip(interpret(fused, real), expected, strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.norm(self.up(x)))), 0.1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Small(nn.Module):
    """One region forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.up(x))).square().mean()


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def started(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(make: Callable[[], nn.Module], step: Callable[..., Any], rows: int = 4, steps: int = 4) -> list[Any]:
    model, opt = started(make)
    losses = [step(model, opt, torch.randn(rows, 16)) for _ in range(steps)]
    return [*losses, *(p.detach() for p in model.parameters())]


def close(found: list[Any], expected: list[Any]) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def compiled(seen: list[StepGraph] | None = None, **how: Any) -> Any:
    """A compiled step; its graphs after fusion are kept in a list."""

    def keep(step: StepGraph) -> StepGraph:
        if seen is not None:
            seen.append(step)
        return step

    return ws.compile(train_step, passes=[fuse_pointwise, keep], **how)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    """A process's first compilation, with nothing on disk."""
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "kernels"))
    compilation = compiled_regions._Compilation()
    monkeypatch.setattr(compiled_regions, "COMPILATION", compilation)
    yield compilation
    compilation.end()


def wait_for(compilation: Any) -> None:
    end = time.monotonic() + 300
    while not compilation.kernels.keys() >= compilation._begun:
        assert time.monotonic() < end, "regions are not compiled after 5 minutes"
        time.sleep(0.02)


def test_products_random_operators_and_updates_are_in_no_region(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []
    monkeypatch.setattr(fresh, "_run", lambda request: requests.append(request) or {})
    seen: list[StepGraph] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = compiled(seen)
        close(trained(Two, step), trained(Two, train_step))
    found = regions(seen[-1])
    inside = [node.target for region in found for node in region.graph.nodes if node.op == "call_function"]
    assert len(found) > len({region.text for region in found}) > 1, "equal layers have equal regions"
    assert not {aten.mm.default, aten.addmm.default, aten.lerp.Scalar} & {*inside}
    effects = [node for node in seen[-1].graph.nodes if node.op == "call_function" and is_effectful(node)]
    assert [base_name(node.target.op) for node in effects] == ["bernoulli_"] * 2
    wait_for(fresh)
    asked = [name for request in requests for name in request]
    assert len(asked) == len({*asked}) == len({region.text for region in found}), "each unique region once"
    assert "fused_region(" in seen[-1].gm.code


def test_a_step_does_not_wait_for_its_regions(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slowly(request: dict[str, Any]) -> dict[str, str]:
        assert go.wait(60)
        return dict.fromkeys(request, "CppCompileError: no room")

    monkeypatch.setattr(fresh, "_run", slowly)
    seen: list[StepGraph] = []
    step = compiled(seen)
    found = trained(Small, step)  # before one of them is compiled
    close(found, trained(Small, train_step))
    assert not fresh.kernels and len(regions(seen[-1])) == 2
    go.set()
    wait_for(fresh)
    with pytest.warns(match=r"stay as they were \(.*; .*\): CppCompileError: no room") as told:
        close(trained(Small, step), found)
    assert ["stay as they were" in str(one.message) for one in told].count(True) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(trained(Small, compiled()), found)


def test_without_a_compiler_it_runs_unfused(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    step = compiled()
    with pytest.warns(match=r"stay as they were \(.*gelu.*\): there is no C\+\+ compiler '/nowhere/g\+\+'"):
        found = trained(Small, step)
        wait_for(fresh)
        step(*started(Small), torch.randn(4, 16))
    close(found, trained(Small, train_step))
    assert {*fresh.kernels.values()} == {None}


def test_compiled_regions_are_swapped_in_and_kept_on_disk(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "PROCESSES", 1)
    step = compiled()
    expected = trained(Small, train_step)
    close(trained(Small, step), expected)
    wait_for(fresh)
    assert fresh.errors == {} and None not in fresh.kernels.values()
    close(trained(Small, step), expected)
    assert "fused_region" in step.code and "native_layer_norm, gelu" in step.code

    later = compiled_regions._Compilation()  # as in another process
    monkeypatch.setattr(compiled_regions, "COMPILATION", later)
    monkeypatch.setattr(later, "_run", lambda request: pytest.fail("compiles what is on disk"))
    again = compiled()
    close(trained(Small, again), expected)
    assert "fused_region" in again.code
    whole = trained(Small, train_step, rows=8)
    for transport, plan in [("thread", ws.DataParallel), ("shm", ws.DataParallel), ("shm", ws.ShardedOptimizer)]:
        for results, text in run_ranks(on_two_ranks, 2, transport, (plan, str(compiled_regions.folder()))):
            close(results[-4:], whole[-4:])
            assert "fused_region" in text

    next(compiled_regions.folder().glob("*.json")).write_text("{")  # a torn file is made anew
    torn = compiled_regions._Compilation()
    monkeypatch.setattr(compiled_regions, "COMPILATION", torn)
    monkeypatch.setattr(torn, "_run", lambda request: {})
    torn.start(regions_of_small())
    wait_for(torn)
    assert sorted(kernel is None for kernel in torn.kernels.values()) == [False, True]


def regions_of_small() -> list[Region]:
    seen: list[StepGraph] = []
    trained(Small, compiled(seen, backend="naive"), steps=1)
    return regions(seen[-1])


def on_two_ranks(plan: Callable[[str], Any], kernels: str) -> tuple[list[Any], str]:
    """Each rank has half of the rows."""
    os.environ["WHOLESTEP_CACHE"] = kernels
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    step = compiled(mesh=mesh, plan=plan("dp"))
    with START:  # threads share the random generator
        model, opt = started(Small)
        batches = torch.randn(4, 8, 16)
    for x in batches:
        step(model, opt, x[4 * mesh.get_local_rank() :][:4])
    return [p.detach() for p in model.parameters()], step.code
