"""Lowering to generated Python over ATen kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholestep.ir import StepGraph
from wholestep.lower.naive import lower_naive


def lower_aten(step: StepGraph, example_inputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Turns a graph into a callable ``fn(*inputs) -> outputs``; mutated inputs are written in place."""
    return lower_naive(step, example_inputs)
