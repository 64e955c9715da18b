"""Fake-to-unbacked materialisation: copies of a model and its optimizer whose tensors have sizes and no content.

With them a step can be looked at alone.

A model built under a `FakeTensorMode` has no memory. What a capture reads are tensors with an identity and a layout, so
each fake one becomes a tensor of the same layout in memory that nobody touches: the kernel gives pages when they are
written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wholestep.capture.snapshot.snapshot import tensors_below
from wholestep.capture.sources import Args, Kwargs
from wholestep.errors import UnsupportedError
from wholestep.tensor_parts import mark_part, part_of
from wholestep.torch_compat import FakeTensor

Called = tuple[Callable[..., Any], Args, Kwargs]


def materialize_fakes(fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Called:
    """A call with copies in which no tensor is fake; the call itself where there are no fake tensors.

    Raises:
        UnsupportedError: a fake tensor of another device than the CPU, or of no strided layout.
    """
    below = [fn, args, kwargs, getattr(fn, "__self__", None)]
    fakes = [tensor for tensor in tensors_below(below) if isinstance(tensor, FakeTensor)]
    if not fakes:
        return fn, args, kwargs
    memo: dict[int, Any] = {id(fake): _materialized(fake) for fake in fakes}
    for fake in fakes:
        if fake.is_leaf and fake.grad is not None:
            memo[id(fake)].grad = memo.get(id(fake.grad), None) or _materialized(fake.grad)
    found: Called = copy.deepcopy((fn, args, kwargs), memo)
    return found


def _materialized(fake: torch.Tensor) -> torch.Tensor:
    if fake.device.type != "cpu" or fake.layout != torch.strided:
        raise UnsupportedError(
            f"a fake tensor of shape {list(fake.shape)} on {fake.device}, {fake.layout}: only those of the CPU can be "
            "looked at", remedy="build the model for the CPU: what it computes, sends and holds is the same",
        )  # fmt: skip
    empty = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype)
    made = nn.Parameter(empty, fake.requires_grad) if isinstance(fake, nn.Parameter) else empty
    return mark_part(made.requires_grad_(fake.requires_grad and fake.is_leaf), part_of(fake))
