"""Whole steps of real models along one axis and two: each rank ends with its parts of what one device computes."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.spmd.test_expand import cut, rows_of_everything
from tests.support.spmd_equal import precision
from tests.support.spmd_models import FIRST, HELD_OUT, make, train
from wholestep.capture_call import capture
from wholestep.ir import check, info
from wholestep.report.traffic_and_memory import missing_rules
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Replicate
from wholestep.spmd.plans.global_view import StatePlacements, state_placements
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def compare(name: str, sizes: tuple[int, ...]) -> None:
    made = make(name)  # which loads its module
    with precision(torch.float64):
        compare_steps(made, sizes)


def compare_steps(made: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    """Rows of everything along each axis, in turn."""
    traced = capture(train, made, {}, differentiable=False)[1]
    step, real = traced.step, [item.value for item in traced.inputs]
    assert not missing_rules(step)
    values = [_value(real[i] if i < len(real) else None, info(node).value) for i, node in enumerate(step.placeholders)]
    wanted = step.gm(*values)
    lock = threading.Lock()

    def rank() -> tuple[list[Any], list[tuple[StatePlacements, AxisGroup]]]:
        mesh = ws.init_device_mesh("cpu", sizes)
        program, axes = step, []
        with lock:
            for line in map(mesh.axis_group, range(len(sizes))):
                axes.append((state_placements(program, rows_of_everything, line), line))
                program = check(expand(program, group=line, placements=axes[-1][0]), "expand")
        parts = [_part(value, [(rest.inputs[i], line) for rest, line in axes]) for i, value in enumerate(values)]
        return list(program.gm(*parts)), axes

    for outputs, axes in run_ranks(rank, math.prod(sizes), "thread"):
        for index, (whole, found) in enumerate(zip(wanted, outputs, strict=True)):
            want = _part(whole, [(rest.outputs.get(index, Replicate()), line) for rest, line in axes])
            torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)


def _value(real: Any, fake: Any) -> Any:
    """What a placeholder is given: a state that the step makes is zero."""
    if isinstance(fake, torch.Tensor):
        exists = type(real) in (torch.Tensor, torch.nn.Parameter)
        return real.detach() if exists else torch.zeros(fake.shape, dtype=fake.dtype)
    return fake if real is None else real


def _part(value: Any, axes: Sequence[tuple[Any, AxisGroup]]) -> Any:
    for placement, line in axes:
        value = cut(value, placement, line)
    return value


@pytest.mark.parametrize("name", FIRST if LONG else ["convnet", "lstm", "t5", "resnet"])
def test_on_two_ranks(name: str) -> None:
    compare(name, (2,))


@pytest.mark.parametrize("name", FIRST if LONG else ["llama"])
def test_on_three_ranks(name: str) -> None:
    compare(name, (3,))


@pytest.mark.parametrize("name", FIRST if LONG else ["gpt"])
def test_on_two_axes(name: str) -> None:
    compare(name, (2, 2))


@pytest.mark.parametrize("name", HELD_OUT if LONG else ["convnext"])
def test_held_out_models(name: str) -> None:
    compare(name, (2,))


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "whisper", "mamba", "gru"])  # the others are compared
def test_every_operator_has_a_rule(name: str) -> None:
    assert not missing_rules(ws.trace(train, *make(name)))
