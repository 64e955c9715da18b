"""What is generated for fake tensors of a GPU, which need none; its text, run on the CPU, has the bits of eager."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lower.test_interpreter import equal
from tests.support.lower_programs import clone_inputs, on_cuda, program
from wholestep.lower.backends import aten
from wholestep.lower.backends.interpreter import lower_naive
from wholestep.lower.codegen import emit
from wholestep.lower.plan import operator_facts

_DEVICE = re.compile(r"(device=|, )(torch.device\('cuda:0'\)|'cuda:0')")  # arenas are called by its name, too


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are those of the CPU, and so is memory."""
    of, made, there = emit.emit, aten.arena_memory, operator_facts.has_native_kernel

    def emitted(*given: Any) -> Any:
        source = of(*given)
        source.text = _DEVICE.sub(r"\1'cpu'", source.text)
        return source

    monkeypatch.setattr(emit, "emit", emitted)
    monkeypatch.setattr(aten, "arena_memory", lambda size, device: made(size, "cpu"))
    monkeypatch.setattr(operator_facts, "has_native_kernel", lambda op, key: there(op, "CPU"))
    operator_facts.out_variant.cache_clear()
    yield
    operator_facts.out_variant.cache_clear()


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "optimizer"), [("wide", "adamw"), ("wide", "adamw_fused"), ("gpt", "adamw"), ("gpt", "momentum")]
)
def test_training_steps(name: str, optimizer: str) -> None:
    step, inputs = program(name, optimizer)
    ours, theirs = clone_inputs(inputs), clone_inputs(inputs)
    there = on_cuda(step, "fused" in optimizer)
    fast, slow = aten.lower_aten(there), lower_naive(step)
    for call in range(2):
        torch.manual_seed(call)
        expected = slow(*theirs)
        torch.manual_seed(call)
        assert all(map(equal, fast(*ours), expected))
    assert all(map(equal, ours, theirs))
    counts = {
        str(n) for n, v in zip(there.placeholders, ours, strict=True) if isinstance(v, torch.Tensor) and not v.dim()
    }
    chained = set(re.findall(r"\('\w+', '(\w+)', \(", fast.code))  # what chains write, which the CPU alone runs
    assert chained == (counts if optimizer == "adamw" else set())
    assert not re.search(r"straight_\d|parts\(|tiles\(|fresh\(|loans", fast.code)
    assert fast._sizes.keys() == {"cuda:0"} and " out=" in fast.code
    assert all(slot.offset % 512 == 0 for slot in aten.plan_of(there).slots)
