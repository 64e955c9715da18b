"""Fake evaluation of calls, memoised: the layers of a model make the same calls again.

A value says shape, strides, dtype and device; nodes of equal ones may share the object.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.torch_compat import below_autograd

_MEMORY = "wholestep_values"  # an attribute of the mode of fake tensors: it lives as long as they do


def evaluate(target: Any, args: Any, kwargs: Any) -> Any:
    """The value of a call, one of whose operands is a tensor.

    Args:
        target: what is called.
        args, kwargs: its arguments, nodes among them.
    """
    values: list[torch.Tensor] = []
    key = target, key_of(args, values), key_of(kwargs, values)
    mode = values[0].fake_mode  # type: ignore[attr-defined]
    known: dict[Any, Any] = mode.__dict__.setdefault(_MEMORY, {})
    with contextlib.suppress(KeyError, TypeError):  # not met before, or with an argument that has no hash
        return known[key]
    args, kwargs = fx.map_arg((args, kwargs), lambda node: info(node).value)
    with mode, torch.no_grad(), below_autograd():
        found = target(*args, **kwargs)
    with contextlib.suppress(TypeError):
        known[key] = found
    return found


def key_of(argument: Any, values: list[torch.Tensor]) -> Any:
    """All of an argument that rules and operators on fake tensors see; collects tensors."""
    if isinstance(argument, fx.Node):
        argument = info(argument).value
    if isinstance(argument, torch.Tensor):
        values.append(argument)
        strides = argument.stride() if argument.layout is torch.strided else id(argument)
        return argument.shape, strides, argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple([key_of(one, values) for one in argument])
    if isinstance(argument, dict):
        return tuple([(name, key_of(one, values)) for name, one in argument.items()])
    return type(argument), argument
