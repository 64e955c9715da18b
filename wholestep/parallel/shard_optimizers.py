"""Optimizers of parts: their states are parts, too, and none may compute across the elements of a parameter."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholestep.comm.api.tracing import is_captured
from wholestep.errors import UnsupportedError
from wholestep.parallel.outputs import tensors_in
from wholestep.parallel.shard_tensors import RULES, ShardGrad
from wholestep.tensor_parts import own_part, part_of, say_parts
from wholestep.torch_compat import UnwrappedDispatchMode, no_modes

_SEEN: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()  # the states that have no whole tensors
_SIZES = 7, 5, 3, 2, 2, 2, 2, 2  # of a tried parameter: neither sums nor products of it have as many elements
_ELEMENTS = {math.prod(_SIZES[:dim]) for dim in range(1, 9)}


def watch_optimizers() -> None:
    """Has each optimizer's next step look whether its parameters are parts, now that some have become so."""
    _SEEN.clear()
    _watch()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_take_parts)


def _take_parts(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A step begins: whole tensors beside parts become parts. Loading gives an optimizer another ``state`` object."""
    states = vars(optimizer).get("state", {})
    if _SEEN.get(optimizer) is states or is_captured():
        return
    known = [(one, part_of(one)) for group in vars(optimizer).get("param_groups", []) for one in group["params"]]
    parts = [(one, part) for one, part in known if part is not None and one.shape != part.shape]  # not whole for now
    if parts and optimizer not in _SEEN:
        _try_step(optimizer, [one for one, _ in parts], args[1:], kwargs)
        say_parts([optimizer])
    for parameter, part in parts:
        state = states.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                own = own_part(value, part, f"{name} in the optimizer's state")
                state[name] = value if own is value else own.clone()
    _SEEN[optimizer] = states


def _try_step(optimizer: torch.optim.Optimizer, parts: list[torch.Tensor], args: Any, kwargs: Any) -> None:
    """Has a copy of the optimizer take its first step with small parameters, while its operators are looked at.

    Raises:
        UnsupportedError: it computes across the elements of a parameter, or fails.
    """
    try:
        with no_modes(), torch.random.fork_rng(devices=[]):
            tried = _small_copy(optimizer, {id(one) for one in parts})
            step: Any = type(tried).step  # not what schedulers and hooks have put in its place
            with _AcrossElements():
                given = {name: _no_loss if callable(one) else one for name, one in kwargs.items()}
                step(tried, *(_no_loss if callable(one) else one for one in args), **given)
    except Exception as error:
        raise UnsupportedError(
            f"fully_shard with {type(optimizer).__name__}, {_why(error)}",
            remedy="an optimizer that treats each element by itself, as AdamW, or, without fully_shard, "
            "ws.compile(step, plan=ws.FullyShard(axis))",
        ) from error


def _small_copy(optimizer: torch.optim.Optimizer, parts: set[int]) -> torch.optim.Optimizer:
    """A copy that has small parameters in the place of some of the optimizer's, and none in that of the others.

    Args:
        parts: ids of the former.
    """
    small = _small_parameters(optimizer)
    memo: dict[int, Any] = {**small, **{id(one): one for one in small.values()}}
    memo[id(optimizer.state)] = copy.deepcopy(_small_states(optimizer, small), memo)
    settings = {name: value for name, value in vars(optimizer).items() if not name.startswith("_optimizer_")}  # hooks
    copied = object.__new__(type(optimizer))
    copied.__setstate__(copy.deepcopy(settings, memo))
    kept = {id(small[one]) for one in parts}
    for group in copied.param_groups:
        group["params"][:] = dict.fromkeys(one for one in group["params"] if id(one) in kept)
    return copied


def _small_parameters(optimizer: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Id of a parameter -> a small one with a gradient, the same for all of one number of dimensions and one dtype."""
    found: dict[int, nn.Parameter] = {}
    made: dict[Any, nn.Parameter] = {}
    for one in (one for group in optimizer.param_groups for one in group["params"]):
        kind = one.dim(), one.dtype, one.device
        if kind not in made:
            size = _SIZES[: one.dim()]
            values = torch.linspace(0.5, 1.5, math.prod(size), dtype=one.dtype, device=one.device).view(size)
            made[kind] = nn.Parameter(values, one.requires_grad)
            made[kind].grad = values.clone().as_subclass(_TriedGrad)
        found[id(one)] = made[kind]
    return found


def _small_states(optimizer: torch.optim.Optimizer, small: Mapping[int, nn.Parameter]) -> dict[Any, Any]:
    """The states that there are, of the small parameters' sizes."""
    states: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in optimizer.state.items():
        parameter = small.get(id(key))
        if parameter is None:
            states[key] = values
            continue
        states[parameter] = {
            name: value.new_zeros(parameter.shape)
            if isinstance(value, torch.Tensor) and (value.numel() > 1 or value.shape == key.shape) else value
            for name, value in values.items()
        }  # fmt: skip
    return states


def _why(error: Exception) -> str:
    if isinstance(error, _AcrossElementsError):
        return f"which computes across the elements of a parameter ({error})"
    return f"whose step was tried on small tensors and failed ({type(error).__name__}: {error})"


def _no_loss() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


class _AcrossElementsError(Exception):
    pass


class _AcrossElements(UnwrappedDispatchMode):
    """Refuses what gives another number of elements than it was given: sums, norms, products, selections."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ({one.numel() for one in tensors_in(value)} for value in ((args, kwargs), result))
        several = any(isinstance(one, (list, tuple)) for one in args)  # parameters at once
        expected = given if several else given - {1}
        if given & _ELEMENTS and "new_" not in func.__name__ and (made - expected or len(expected) > 1 and not several):
            raise _AcrossElementsError(func)
        return result


class _TriedGrad(ShardGrad):
    """Norms, which are of all ranks' parts, are no operators across the elements of one."""

    group = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_modes() if func in RULES else nullcontext():
            return super().__torch_function__(func, types, args, kwargs)
