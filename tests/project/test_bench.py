"""The benchmark harness measures what it says: turns, ratios, memory of its own, ranks that fail."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import Crew, Measured, compare, markdown
from benchmarks.models import MODELS, train_step
from benchmarks.tensor_memory import peak
from benchmarks.variants import VARIANTS
from tests.support.slow_steps import MIB, prepare


def test_turns_ratios_and_memory():
    found = compare(prepare, "none", {"quick": 1, "slow": 2}, rounds=2, say=lambda what: None)
    assert [len(m.rounds) for m in found.values()] == [2, 2]
    assert found["slow"].ratio(found["quick"]) > 1 > found["quick"].ratio(found["slow"])
    assert found["slow"].memory >= 64 * MIB > found["quick"].memory
    assert found["slow"].loss == 1.0, "the mean over ranks"


@pytest.mark.parametrize("variant", ["dies", "raises"])
def test_a_rank_that_fails_is_named(variant: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(RuntimeError, match=f"{variant}: rank 0 died"):
        Crew(prepare, "none", variant, 1)
    assert ("no such way" in capfd.readouterr().err) == (variant == "raises")


def test_a_ratio_compares_round_with_round():
    """A slow round of the machine falls on both and leaves the ratio alone."""
    base, ours = Measured("base", rounds=[1.0, 9.0, 1.0]), Measured("ours", rounds=[0.5, 4.5, 0.5])
    assert ours.ratio(base) == 0.5 and base.step == 1.0


def test_markdown_lines_up():
    lines = markdown(("a", "bb"), [["long", "1"]]).splitlines()
    assert lines == ["| a    | bb |", "| ---- | -: |", "| long |  1 |"]


def test_every_variant_names_a_baseline_with_as_many_ranks():
    for variant in VARIANTS.values():
        assert VARIANTS[variant.baseline].ranks == variant.ranks


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("toy", "bert-base")])
def test_models_learn_what_they_are_given(name: str):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [train_step(model, opt, batch).item() for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("model", ["mlp", "bert-small"])
def test_tensors_take_no_more_than_in_eager(model: str):
    threads = torch.get_num_threads()
    try:
        assert 0 < peak(model, "ours") <= peak(model, "eager")
    finally:
        torch.set_num_threads(threads)
