"""Fake evaluation of calls, memoised: the layers of a model make the same calls again.

A value says shape, strides, dtype and device; nodes of equal ones may share the object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.ir import info
from wholestep.nested import tensors_of
from wholestep.torch_compat import below_autograd

_MEMORY = "wholestep_values"  # an attribute of the mode of fake tensors: it lives as long as they do


def evaluate(target: Any, args: Any, kwargs: Any) -> Any:
    """The value of a call, one of whose operands is a tensor.

    Args:
        target: what is called.
        args, kwargs: its arguments, nodes among them.
    """
    values: list[torch.Tensor] = []
    key = (target, _key(args, values), _key(kwargs, values))
    mode = values[0].fake_mode  # type: ignore[attr-defined]
    known: dict[Any, Any] = mode.__dict__.setdefault(_MEMORY, {})
    try:
        return known[key]
    except (KeyError, TypeError):  # not met before, or with an argument that has no hash
        found = run_on_fakes(target, args, kwargs)
    try:
        known[key] = found
    except TypeError:
        pass
    return found


def run_on_fakes(target: Any, args: Any, kwargs: Any) -> Any:
    """Runs a call on the fake values of its operands."""
    args, kwargs = fx.map_arg((args, kwargs), lambda node: info(node).value)
    tensor = next(tensors_of([args, *kwargs.values()]))
    with tensor.fake_mode, torch.no_grad(), below_autograd():  # type: ignore[attr-defined]
        return target(*args, **kwargs)


def meta(value: torch.Tensor) -> Any:
    """All that operators on fake tensors see of one."""
    strides = value.stride() if value.layout is torch.strided else id(value)
    return value.shape, strides, value.dtype, value.device


def _key(argument: Any, values: list[torch.Tensor]) -> Any:
    """What the value of a call can depend on; collects tensors."""
    if isinstance(argument, fx.Node):
        return _key(info(argument).value, values)
    if isinstance(argument, torch.Tensor):
        values.append(argument)
        return meta(argument)
    if isinstance(argument, (list, tuple)):
        return tuple([_key(one, values) for one in argument])
    if isinstance(argument, dict):
        return tuple([(name, _key(one, values)) for name, one in argument.items()])
    return float if type(argument) is float else (type(argument), argument)
