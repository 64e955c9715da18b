"""One program for many sizes: bit for bit as eager at each, and another one where planning decides otherwise."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import wholestep as ws
from examples.gpt import GPT, GPTConfig
from tests.support.lower_programs import arena_bytes
from wholestep.lower.plan.arena import Slot, grow, place
from wholestep.sizes import Size, SizeDecisions, plain

F = nn.functional
# Before torch 2.13 a `matmul` of three dimensions decides on its sizes: each has a program and is first run in eager.
MATMUL_DECIDES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def same(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, Tensor) else a == b for a, b in pairs)


def check(fn: Callable[..., Any], batches: list[tuple[Tensor, ...]], programs: int, **how: Any) -> Any:
    """Compares a function with eager on several batches; gives it compiled."""
    compiled = ws.compile(fn, dynamic=True, fullgraph=True, **how)
    for batch in batches:
        mine = copy.deepcopy(batch)
        assert same(compiled(*mine), fn(*batch)), [t.shape for t in batch]
        assert same(mine, batch)
    assert compiled.captures == programs, compiled.recompiles
    return compiled


def test_the_demos_model_at_ever_new_sizes() -> None:
    torch.manual_seed(0)
    models = [GPT(GPTConfig(layers=2, heads=2, width=64, context=64, dropout=0.1))]
    models.append(copy.deepcopy(models[0]))
    found = []
    for model in models:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            return loss.detach()

        call: Any = ws.compile(step) if model is models[1] else step
        draw, losses = random.Random(0), []
        for seed in range(20):
            torch.manual_seed(seed)
            shape = draw.randint(2, 7), draw.randint(2, 64)
            losses.append(call(model, opt, torch.randint(256, shape), torch.randint(256, shape)))
        found.append([*losses, *model.parameters()])
    assert same(*found)
    if MATMUL_DECIDES:
        return
    assert call.captures <= 8 and call.eager_calls == 0 and len(call.recompiles) <= 2
    assert "What lasts between calls of one size" in call.code
    inputs = [node.meta["val"] for node in call.graphs[0].graph.nodes if node.op == "placeholder"]
    assert all(type(size) is int for one in inputs if isinstance(one, Tensor) for size in one.shape)


def test_sizes_in_views_results_and_numbers() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        z = (x @ y).relu()
        n = x.shape[0]
        wide = torch.cat([x, x]).view(n, -1)
        return z[1:], z.t(), n, z.numel() * 2, x[: n // 2] * (n - 1) ** 0.5, z.sum() / n, wide, torch.zeros(n)

    batches = [(torch.randn(n, 8), torch.randn(8, m)) for n, m in ((4, 6), (5, 6), (9, 2), (6, 3), (31, 40), (4, 6))]
    check(fn, batches, 1)


def test_inputs_that_are_written() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        x.mul_(2).add_(y)
        y[1:] += x[:-1]
        return [x + 1]

    check(fn, [(torch.randn(n, 3), torch.randn(n, 3)) for n in (4, 6, 3, 12)], 1)


def test_targets_shifted_by_padding_as_language_models_do() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [F.pad(x, (0, 1), value=-100)[..., 1:].contiguous(), F.pad(x, (1, 0, 0, 2))]

    check(fn, [(torch.randn(n, m),) for n, m in ((4, 6), (5, 6), (9, 2), (6, 3))], 1)


def test_a_size_for_which_planning_decides_otherwise_has_another_program() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [((x * 2 + 1).relu() * 3).sum(0)]

    sizes = (100, 120, 300, 400, 110, 310)  # in chains from 2^18 elements on
    compiled = check(fn, [(torch.randn(n, 1024),) for n in sizes], 2)
    assert compiled.recompiles == []
    assert any("262144" in str(guard) for guard in compiled.guards)


def test_convolutions_whose_kernels_are_asked_for_each_size() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))

    def fn(x: Tensor) -> list[Tensor]:
        net.zero_grad()
        out = net(x)
        out.square().mean().backward()
        return [out.detach(), *(p.grad for p in net.parameters())]  # type: ignore[misc]

    last = torch.channels_last
    batches = [(torch.randn(n, 3, s, s),) for n, s in ((4, 8), (2, 12), (3, 8))]
    batches += [(torch.randn(n, 3, 8, 8).to(memory_format=last),) for n in (4, 5)]
    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    assert all(same(compiled(*batch), fn(*batch)) for batch in batches)


def test_memory_grows_with_the_largest_size_and_is_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.lower.backends.aten.MOST_SIZES", 3)

    def fn(x: Tensor) -> list[Tensor]:
        y = torch.softmax(x, 0).cos()
        return [(y @ y.t()).sum(0)]

    compiled = check(fn, [(torch.randn(n, 5),) for n in (4, 30, 8, 40, 12, 7, 5, 40, 4)], 1)
    (program,) = compiled._capturer.known.programs.values()
    assert len(program.run._runs) == 3 and program.run.rebinds <= 3
    assert 2 * 40 * 5 * 4 <= arena_bytes(program.run) <= 2 * 2 * 40 * 40 * 4
    program.release_memory()
    x = torch.randn(6, 5)
    assert same(compiled(x), fn(x))


def test_results_that_are_held_between_calls_of_other_sizes() -> None:
    model = nn.Linear(256, 256)

    def fn(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [model.weight.grad, model(x)]  # type: ignore[list-item]

    compiled, held, expected = ws.compile(fn, dynamic=True, fullgraph=True), [], []
    for n in (4, 6, 4, 9, 2, 6, 1100, 1200):
        x = torch.randn(n, 256)
        held += compiled(x)
        expected += [t.clone() for t in fn(x)]
    assert all(map(torch.equal, held, expected))


def test_a_step_that_is_planned_for_one_size_alone() -> None:
    weight = nn.Parameter(torch.randn(2048, 1536))  # its gradient is computed by rows: tried at each size
    opt = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def fn(x: Tensor) -> Tensor:
        loss = (x @ weight).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    before, losses = weight.detach().clone(), []
    batches = [torch.randn(n, 2048) for n in (8, 8, 12, 16, 12)]
    for call in (compiled, fn):
        with torch.no_grad():
            weight.copy_(before)
        opt.state.clear()
        losses.append([*(call(x) for x in batches), weight.detach().clone()])
    assert same(*losses)


def test_a_trace_of_one_size_is_no_program_for_many() -> None:
    compiled = ws.compile(lambda x: sum(x.unbind(), torch.zeros(2)))
    for n in (3, 4, 5, 6, 5):
        assert torch.equal(compiled(x := torch.ones(n, 2)), x.sum(0))
    assert compiled.captures == 3 and compiled.eager_calls == 2
    assert all(entry.many is None for entry in compiled._entries)


def size(name: str, number: int, decisions: SizeDecisions) -> Size:
    return Size(number, sympy.Symbol(name, integer=True, positive=True), decisions)


def test_numbers_that_know_what_they_are_at_other_sizes() -> None:
    decisions = SizeDecisions({sympy.Symbol("s"): 4, sympy.Symbol("t"): 4}, {})
    s, t = size("s", 4, decisions), size("t", 4, decisions)
    assert s != t and s != 4 and 3 * s - s == 2 * s and s - s == 0 and type(s - s) is int and len({s, t, 4}) == 3
    assert repr((3, 2 * s, 1 + s)) == "(3, 2*s, 1 + s)" and plain([s, (t, 1)]) == [4, (4, 1)] and -s == s * -1
    assert not decisions.conditions and not decisions.specialized
    assert 3 < s and not 2 * s > 9 and bool(s)
    (holds,) = {decisions.function(decisions.conditions)(n, 2) for n in (4,)}
    assert all(holds) and decisions.function(decisions.conditions)(3, 2) != holds
    assert decisions.function(map(repr, [s * t, 7]))(5, 6) == (30, 7)
    assert not decisions.specialized
    assert int(s) == 4 and decisions.specialized


def test_places_for_the_largest_sizes_so_far_do_for_smaller_ones() -> None:
    slots = [Slot(100, 0, 2), Slot(200, 1, 3), Slot(64, 3, 4)]
    place(slots)
    assert grow(slots, (100, 200, 64)) is None and grow(slots, (10, 20, 64)) is None
    grown = grow(slots, (1000, 2000, 64))
    assert grown is not None and grown["cpu"] >= 3000 and slots[0].offset != slots[1].offset
    offsets = [slot.offset for slot in slots]
    assert grow(slots, (1100, 2200, 64)) is None and grow(slots, (3, 6, 64)) is None
    assert [slot.offset for slot in slots] == offsets


@pytest.mark.parametrize("dynamic", [None, True])
def test_kernels_within_functional_variants_are_asked_for_layouts(dynamic: bool | None) -> None:
    """BatchNorm's gives a contiguous result of a transposed operand; by its strides attention chooses a kernel."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.batch_norm(x.t().contiguous().t(), None, None, training=True)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)

    compiled = ws.compile(step, dynamic=dynamic)
    for rows in (36, 30, 20, 30):
        x = torch.randn(rows, 6)
        want, got = step(x), compiled(x)
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize(
    ("dtype", "affine", "training", "order"),
    [
        (torch.float32, True, True, torch.channels_last),
        (torch.float64, False, False, torch.contiguous_format),
        (torch.bfloat16, True, True, torch.contiguous_format),  # with parameters in single precision
    ],
)
def test_batch_normalisation(dtype: torch.dtype, affine: bool, training: bool, order: torch.memory_format) -> None:
    kept = torch.float64 if dtype is torch.float64 else torch.float32

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y = F.batch_norm(x, w.detach() * 2, b.detach() + 3, *([w, b] if affine else []), training=training)
        return y, *torch.autograd.grad(y.square().sum(), [x, w, b][: 3 if affine else 1])

    def batch(n: int) -> tuple[Tensor, ...]:
        x = torch.randn(n, 3, 5, 4).to(dtype, memory_format=order)
        return x.requires_grad_(), *(torch.rand(3, dtype=kept).requires_grad_() for _ in range(2))

    check(fn, [batch(4), batch(2)], programs=1)
