"""Dropout's masks are torch's bit for bit, and so is what its generator gives afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wholestep as ws
from wholestep.lower.fusion import draws


@given(
    seed=st.integers(0, 2**63),
    calls=st.lists(
        st.tuples(st.integers(draws.LEAST, 3 * draws.LEAST), st.floats(0, 1), st.integers(0, 700)), max_size=4
    ),
)
def test_draws_among_others(seed: int, calls: list[tuple[int, float, int]]) -> None:
    """Between draws the generator gives words, and normal numbers, of which it keeps one for the next call."""
    ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
    for count, p, others in calls:
        for generator in (ours, theirs):
            torch.randint(10, (others,), generator=generator)
            torch.randn(others % 5, generator=generator)
        mask = draws.bernoulli_(torch.empty(count), p, generator=ours)
        assert torch.equal(mask, torch.empty(count).bernoulli_(p, generator=theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_torchs_error(p: float) -> None:
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
        draws.bernoulli_(torch.empty(draws.LEAST), p)


def test_memory_of_another_kind_is_drawn_by_torch() -> None:
    whole = torch.zeros(2 * draws.LEAST)
    for out in (whole[::2], torch.zeros(draws.LEAST, dtype=torch.bfloat16), torch.zeros(8)):
        torch.manual_seed(3)
        expected = torch.empty_like(out, memory_format=torch.preserve_format).bernoulli_(0.5)
        torch.manual_seed(3)
        assert torch.equal(draws.bernoulli_(out, 0.5), expected)


def test_a_state_of_something_else_is_refused() -> None:
    out, state = torch.empty(4), torch.zeros(5056, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the state of a seeded CPU generator"):
        draws.native.bernoulli(out.data_ptr(), 4, 0.5, state.data_ptr())


@pytest.mark.parametrize("same", [True, False])
def test_steps_with_dropout(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not same:
        monkeypatch.setattr(draws, "_has_torchs_bits", lambda: False)
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.1))
    models = eager, copy.deepcopy(eager)

    def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return loss.detach()

    compiled = ws.compile(train, fullgraph=True)
    found = []
    for run, model in zip((train, compiled), models, strict=True):
        torch.manual_seed(1)
        found.append([run(model, torch.randn(64, 8)) for _ in range(3)] + [torch.get_rng_state()])
    assert all(map(torch.equal, *found)) and "host_bernoulli_(" in compiled.code
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
