"""Memory that captures leave behind: what refers to itself is freed by the collector, however often one captures."""

import gc
import weakref
from typing import Any

import pytest
import torch

import wholestep as ws
from wholestep.errors import CaptureError
from wholestep.patches import Patch, Patches
from wholestep.trace.outputs import leaks


class Garbage:
    """An object that only the collector frees, and many others with it."""

    def __init__(self) -> None:
        self.me = self
        self.others: list[list[int]] = [[] for _ in range(30_000)]


def test_garbage_is_collected_while_steps_are_captured() -> None:
    alive = []
    for number in range(60):
        alive.append(weakref.ref(Garbage()))
        step = ws.compile(lambda x, number=number: x + number, fullgraph=True)
        assert torch.equal(step(torch.ones(2)), torch.ones(2) + number)
    assert sum(ref() is not None for ref in alive) < 55


def test_a_trace_that_fails_leaves_nothing_for_the_collector() -> None:
    """A capture without symbols follows it: what is alive then is searched for among all objects, which takes long."""
    whole: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            whole.append(1)

    compiled = ws.compile(lambda x: x * x.storage_offset(), dynamic=True, fullgraph=True)
    x = torch.arange(12.0)[4:]
    gc.collect()
    gc.callbacks.append(note)
    try:
        assert torch.equal(compiled(x), x * 4)
    finally:
        gc.callbacks.remove(note)
    assert whole == []


def test_all_objects_are_searched_only_for_what_others_hold_than_a_refused_steps_variables(monkeypatch: Any) -> None:
    searches: list[int] = []
    referrers = leaks.referrers

    def searched(values: Any, frozen: bool) -> Any:
        searches.append(sum(isinstance(value, torch.Tensor) for value in values))
        return referrers(values, frozen)

    def step(x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
        y = torch.relu(x * 2)
        names = {"y": (y, [y * y])}
        kept.append(y.sum())
        return float(kept[0]) + len(names)

    monkeypatch.setattr(leaks, "referrers", searched)
    x, kept = torch.ones(3, requires_grad=True), list[torch.Tensor]()
    with pytest.raises(CaptureError, match="__float__"):
        ws.compile(step, fullgraph=True)(x, kept)
    assert not any(searches) and kept == []
    monkeypatch.setattr(leaks, "_BETWEEN", ())
    with pytest.raises(CaptureError, match="__float__"):
        ws.compile(step, fullgraph=True)(x, kept)
    assert any(searches) and kept == []


def test_what_histories_keep_alive_is_searched_for_at_once(monkeypatch: Any) -> None:
    """C++ keeps an object for each operand of a `stack`, and each search looks at all objects that there are."""
    searches: list[int] = []
    monkeypatch.setattr(leaks, "_holder", lambda value, known: searches.append(1))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.stack([x * i for i in range(40)]).sum(0)
        return y, *torch.autograd.grad(y.sum(), x)

    x = torch.ones(3, requires_grad=True)
    assert all(map(torch.equal, ws.compile(step, fullgraph=True)(x), step(x)))
    assert searches == []


def test_patches_go_when_they_end() -> None:
    class Owner:
        flag = 1

    patches = Patches()
    patches.put([(Owner, "flag", 2)], lambda: True)
    found = weakref.ref(next(patch for patch, _ in patches._open))
    assert isinstance(found(), Patch) and Owner.flag == 2
    patches.restore()
    assert found() is None and Owner.flag == 1


def test_a_generator_among_the_arguments_is_not_kept_alive() -> None:
    compiled, generator = ws.compile(lambda x, g: x + torch.rand(2, generator=g), fullgraph=True), torch.Generator()
    for _ in range(2):
        compiled(torch.ones(2), generator)
    has_weak_references = bool(torch.Generator.__weakrefoffset__)  # not before torch 2.13
    alive = weakref.ref(generator) if has_weak_references else lambda: None
    del generator
    gc.collect()
    assert alive() is None
    other, same = (torch.Generator().manual_seed(1) for _ in range(2))
    assert torch.equal(compiled(torch.ones(2), other), 1 + torch.rand(2, generator=same))


def test_classes_of_modules_are_freed() -> None:
    """With all that their methods close over."""

    def alive() -> weakref.ref[torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.ones(3))

        class Scale(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return weight * x

        assert torch.equal(ws.compile(Scale())(torch.ones(3)), torch.ones(3))
        return weakref.ref(weight)

    ref = alive()
    gc.collect()
    assert ref() is None
