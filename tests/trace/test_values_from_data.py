"""Numbers and shapes that follow from data: every call gives what eager gives, and whole graphs refuse them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import DataDependentError


def branch(x: Tensor) -> Any:
    return x * 2 if x.sum() > 0 else x - 1


def number(x: Tensor) -> Any:
    return x * float(x.abs().max()) + int(x[0] * 10)


def sizes(x: Tensor) -> Any:
    return torch.zeros(int((x > 0).sum()), 2) + x[x > 0][:, None]


def listed(x: Tensor) -> Any:
    return [x.sin() for value in x.tolist() if value > 0]


def found(x: Tensor) -> Any:
    return (x > 0).nonzero(), torch.unique((x > 0).long(), return_counts=True)


def contains(x: Tensor) -> Any:
    return x + 1 if 0.5 in x else x


def rounded(x: Tensor) -> Any:
    return x + math.floor(x.mean().item()) + float(f"{x.sum().item():.1f}")


def equal(x: Tensor) -> Any:
    return x * 3 if torch.equal(x, x.abs()) or torch.allclose(x, -x) else x


def after_a_write(x: Tensor) -> Any:
    x.add_(1.0)
    return x[x > 0.5]


def from_a_view(x: Tensor) -> Any:
    """A strided view of a view: its offset counts from the start of the memory."""
    return x * 2 if bool(torch.as_strided(x[1:], (2,), (2,)).sum() > 0) else x


def split(x: Tensor) -> Any:
    """Reads its indices in C++, past the dispatcher."""
    return torch.tensor_split(x, (x > 0).long()[:2].cumsum(0))


def lengths(x: Tensor) -> Any:
    found = (x[:2] > 0).int() + 1
    chances, targets = x.repeat(3, 2, 1).log_softmax(-1), torch.ones(2, 1, dtype=torch.long)
    return torch.nn.functional.ctc_loss(chances, targets, found + 1, target_lengths=found // 2)


PROGRAMS = [split, lengths, branch, number, sizes, listed, found, contains, rounded, equal, after_a_write, from_a_view]
INPUTS = [
    [1.0, -1.0, 0.5, -0.25, 2.0],
    [-1.0, -2.0, 0.5, 3.0, -2.0],
    [1.0, 2.0, 0.5, 0.25, 0.0],
    [1.0, -1.0, 0.5, -0.25, 2.0],
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("offset", [0, 2])
def test_every_call_is_as_eager(program: Callable[[Tensor], Any], offset: int) -> None:
    compiled = ws.compile(program)
    for values in INPUTS:
        one, two = (torch.tensor([9.0] * offset + values)[offset:] for _ in range(2))
        want, got = program(one), compiled(two)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(two, one, rtol=0, atol=0)


def test_the_reason_names_the_decision_and_its_line() -> None:
    compiled = ws.compile(branch)
    compiled(torch.ones(3))
    compiled(-torch.ones(3))
    (reason,) = compiled.recompiles
    assert "expected True, found False" in reason and "test_values_from_data.py:" in reason and "L['x']" in reason


def test_nan_is_a_value_like_any_other() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x.clone().clamp(max=float(x.sum()))

    compiled = ws.compile(scaled)
    x = torch.tensor([math.nan, 1.0])
    for _ in range(3):
        assert torch.equal(compiled(x).isnan(), scaled(x).isnan())


def test_a_decision_after_attention_without_dropout_is_no_random_one() -> None:
    def routed(x: Tensor) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0, is_causal=True)
        counts = (y.sum(-1) > 0).flatten().sum()
        parts = y.reshape(-1).split([int(counts), y.numel() - int(counts)])
        return parts[0].sum() - parts[1].sum()

    compiled = ws.compile(routed)
    for seed in (0, 1, 0):
        x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compiled(x), routed(x))


@pytest.mark.parametrize("in_tensors", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ctc_after_dropout_is_sized_by_its_lengths(in_tensors: bool, padded: bool, reduction: str) -> None:
    model = nn.Linear(8, 6)

    def step(x: Tensor, targets: Tensor, frames: Any, lengths: Any) -> tuple[Tensor, Tensor]:
        chances = nn.functional.dropout(model(x), 0.1).log_softmax(-1).transpose(0, 1)
        found = nn.functional.ctc_loss(chances, targets, frames, lengths, reduction=reduction, zero_infinity=padded)
        (gradient,) = torch.autograd.grad(found.sum(), model.weight)
        return found.detach(), gradient

    compiled = ws.compile(step)
    for lengths in ([3, 2], [3, 2], [1, 3]):
        targets = torch.randint(1, 6, (2, 4) if padded else (sum(lengths),))
        given = [[9, 7], lengths]
        one, two = (torch.tensor(row) if in_tensors else row for row in given)
        x = torch.randn(2, 9, 8)
        state = torch.get_rng_state()
        want = step(x, targets, one, two)
        torch.set_rng_state(state)
        got = compiled(x, targets, one, two)
        assert all(map(torch.equal, got, want))


def test_a_decision_on_random_numbers_draws_as_eager_does() -> None:
    def step(x: Tensor) -> Tensor:
        y = x + torch.rand(2)
        return y if torch.rand(3).sum() > 1.5 else y - torch.rand(2)

    before = torch.get_rng_state()
    with pytest.raises(DataDependentError, match="only known when the step runs"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)
    compiled, x = ws.compile(step), torch.ones(2)
    for _ in range(12):
        before = torch.get_rng_state()
        want, after = step(x), torch.get_rng_state()
        torch.set_rng_state(before)
        assert torch.equal(compiled(x), want) and torch.equal(torch.get_rng_state(), after)
    assert compiled.captures == 2


def test_whole_graphs_refuse_them() -> None:
    for program in (sizes, listed, found, lengths, split):
        with pytest.raises(DataDependentError):
            ws.compile(program, fullgraph=True)(torch.tensor(INPUTS[0]))


def test_decisions_after_an_update_follow_from_the_state_as_it_begins() -> None:
    torch.manual_seed(0)
    x, seen = torch.randn(5, 4), []
    for compiles in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(4, 2)
        opt = torch.optim.Adam(net.parameters(), lr=0.1)

        def step(x: Tensor, net: nn.Module = net, opt: Any = opt) -> list[float]:
            losses = []
            for _ in range(2):
                loss = net(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses.append(float(f"{loss.item():.5e}"))
            return losses

        run = ws.compile(step) if compiles else step
        seen.append([run(x), run(x), [p.tolist() for p in net.parameters()]])
    assert seen[0] == seen[1]


def test_the_advice_is_to_run_python() -> None:
    for fn in (lambda x: f"{x.sum().item():.2f}", torch.nonzero):
        with pytest.raises(DataDependentError) as refused:
            ws.compile(fn, fullgraph=True)(torch.ones(3))
        assert "without fullgraph=True" in refused.value.remedy
