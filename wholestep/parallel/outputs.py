"""Tensors in what a module's forward gives: found, exchanged, and followed back to the nodes that they come from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from wholestep.torch_compat import tree_map

Exchange = Callable[[torch.Tensor], torch.Tensor]


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, dict))


def map_tensors(exchange: Exchange, value: Any) -> Any:
    """The same nested containers, dataclasses among them, with each tensor exchanged."""

    def leaf(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return exchange(one)
        if not _is_record(one):
            return one
        copied = copy.copy(one)
        for field in dataclasses.fields(one):
            if hasattr(one, field.name):
                object.__setattr__(copied, field.name, map_tensors(exchange, getattr(one, field.name)))
        return copied

    return tree_map(leaf, value, is_leaf=_is_record)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested containers, in order."""
    found: list[torch.Tensor] = []
    map_tensors(lambda one: found.append(one) or one, value)  # type: ignore[func-returns-value]
    return found


class _Outputs(torch.autograd.Function):
    """Makes all outputs those of one autograd node, so that a backward from some of them reaches what made any."""

    @staticmethod
    def forward(ctx: Any, begun: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.begun = begun
        return tuple(one.clone() for one in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.begun()
        return (None, *grads)


def joined_in_one_node(outputs: Any, begun: Callable[[], None]) -> Any:
    """The outputs as results of one autograd node, whose backward calls ``begun`` first."""
    differentiable = {id(one): one for one in tensors_in(outputs) if one.grad_fn is not None}
    if not differentiable:
        return outputs
    given = _Outputs.apply(begun, *differentiable.values())  # type: ignore[no-untyped-call]
    exchanged = dict(zip(differentiable, given, strict=True))
    return map_tensors(lambda one: exchanged.get(id(one), one), outputs)


def nodes_of(outputs: Any) -> list[Any]:
    """The autograd nodes that the outputs come from."""
    return [get_gradient_edge(one).node for one in tensors_in(outputs) if one.requires_grad]
