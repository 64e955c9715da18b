"""Optimizer state made before a step is first captured, as the optimizer's own first step would make it.

torch's optimizers create `exp_avg = zeros_like(p)` when they first meet a parameter. Made beforehand, one capture
serves from the first call on. What an optimizer creates is asked of the optimizer itself, for tiny parameters: each
tensor of it must be filled with one number. State that follows from a gradient is not made here: the first step then is
another program than the next. (SGD's momentum buffer alone has a start that gives the same bits, where nothing is
dampened.)
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from wholestep.capture.snapshot.names_read import NamesRead
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.tensor_parts import mark_part, part_of
from wholestep.torch_compat import make_optimizer_state, no_modes, set_versions

# What code names that may set a rate which the state begins with, as ASGD's and Rprop's does.
_SETTING = "param_groups"
# What code names that may look at an optimizer's state itself, and must find none at the first call.
_LOOKING = {"state", "state_dict", "vars", "__dict__", "__getstate__", "dir", "eval", "exec", "copy", "deepcopy"}


@dataclass(frozen=True)
class _Filled:
    """A tensor of state at its creation: one number in every element.

    Attributes:
        dims: its parameter's dimensions, by which its sizes are (None: a size of 1), in contiguous memory; None where
            it has the parameter's shape and strides.
        unwritten: how often the first update writes to it, where eager makes it with its value by then.
    """

    value: float
    dtype: torch.dtype
    device: torch.device
    dims: tuple[int | None, ...] | None
    unwritten: int = 0

    def make(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor; like a parameter it is not filled yet, as memory is not there before it is written."""
        options: Any = {"dtype": self.dtype, "device": self.device}
        if self.dims is not None:  # a step count, which Python may decide on, or sums of rows
            return torch.full([1 if dim is None else parameter.shape[dim] for dim in self.dims], self.value, **options)
        return mark_part(torch.empty_like(parameter, requires_grad=False, **options), part_of(parameter))


_Described = dict[str, _Filled | None]  # the state of one parameter; what is None is so until later


@dataclass(eq=False)
class _Made:
    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    state: dict[str, Any]
    fills: list[tuple[torch.Tensor, _Filled]]


class InitialState:
    """State that the optimizers in sight of a step lack, put there until `drop`.

    Args:
        snap: where to look for optimizers; those that have no state at all are given theirs. None: nowhere.
    """

    def __init__(self, snap: Snapshot | None) -> None:
        self._made: list[_Made] = []
        self._filled = snap is None
        if snap is None or not _LOOKING.isdisjoint(snap.reachable.names_read.names):
            return
        read = snap.reachable.names_read
        owners = {id(container.owner): container.owner for container in snap.containers}
        if any(map(_looks_inside, owners.values())):
            return
        for owner in owners.values():
            if isinstance(owner, torch.optim.Optimizer) and not vars(owner).get("state"):
                self._made += _state_of(owner, _SETTING in read.names | read.by_libraries)
        for made in self._made:
            made.optimizer.state[made.parameter] = made.state

    def __bool__(self) -> bool:
        return bool(self._made)

    def owns(self, tensor: Any) -> bool:
        """Whether a tensor is one of those made here, which `fill` gives their values."""
        return any(tensor is t for made in self._made for t, _ in made.fills)

    def drop(self, kept: Collection[int] = ()) -> bool:
        """Takes state out again, but for that of parameters with a tensor among those kept; tells if any was."""
        gone = [m for m in self._made if all(id(t) not in kept for t, _ in m.fills)]
        for made in gone:
            if made.optimizer.state.get(made.parameter) is made.state:
                del made.optimizer.state[made.parameter]
        self._made = [m for m in self._made if m not in gone]
        return bool(gone)

    def fill(self) -> None:
        """Writes the values, to what may be parts by now; once."""
        if self._filled:
            return
        self._filled = True
        with no_modes():
            for tensor, filled in (fill for made in self._made for fill in made.fills):
                tensor.fill_(filled.value)
                set_versions((tensor,), (0,))

    def keep(self) -> None:
        """The first run has succeeded: the state stays."""
        new = [(tensor, filled.unwritten) for made in self._made for tensor, filled in made.fills if filled.unwritten]
        for tensor, unwritten in new:
            set_versions((tensor,), (max(0, tensor._version - unwritten),))
        self._made.clear()


def _looks_inside(wrapper: Any) -> bool:
    """Whether what wraps optimizers, such as a library's or a schedule, may look at their state in its own step."""
    held = vars(wrapper).values() if hasattr(type(wrapper), "step") and hasattr(wrapper, "__dict__") else ()
    if not any(isinstance(value, torch.optim.Optimizer) for value in held):
        return False
    called = {"step", "zero_grad", "train", "eval"}
    names = NamesRead(called)
    for kind in type(wrapper).__mro__:
        for name, member in vars(kind).items() if not kind.__module__.startswith("torch.optim.") else ():
            method = inspect.unwrap(getattr(member, "fget", member))
            if isinstance(method, FunctionType) and not name.startswith("__"):
                names.add(method, name)
    return not _LOOKING.isdisjoint(names.settle() - called)


def _state_of(optimizer: torch.optim.Optimizer, rate_may_change: bool) -> list[_Made]:
    """The state that an optimizer of torch's own would make for its parameters; none where that is not known.

    Args:
        rate_may_change: before it makes it.
    """
    if not (getattr(type(optimizer).step, "__module__", None) or "").startswith("torch.optim."):
        return []
    made: list[_Made] = []
    known: dict[Any, _Described | None] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            whole = getattr(type(parameter), "of_whole", type(parameter))
            if whole not in (torch.Tensor, torch.nn.Parameter) or parameter.layout != torch.strided:
                return []
            kind = index, tuple(_order(parameter)), parameter.dtype, parameter.device
            if kind not in known:
                known[kind] = _described(optimizer, index, parameter)
                rate = optimizer.param_groups[index]["lr"]
                if rate_may_change and known[kind] != _described(optimizer, index, parameter, lr=rate * 2 + 1):
                    return []
            described = known[kind]
            if described is None:
                return []
            if described:
                state: dict[str, Any] = {k: d and d.make(parameter) for k, d in described.items()}
                fills = [(state[k], d) for k, d in described.items() if d is not None]
                made.append(_Made(optimizer, parameter, state, fills))
    return made


def _described(
    optimizer: torch.optim.Optimizer, index: int, parameter: torch.Tensor, **options: Any
) -> _Described | None:
    """The state of one parameter as a group's first step creates it, for a tiny one in its place.

    Args:
        options: other ones than the group has.

    Returns:
        `_Filled` or None by key; None where something else is in it.
    """
    tiny = torch.nn.Parameter(_tiny(parameter))
    tiny.grad = torch.zeros_like(tiny)
    kind, group = type(optimizer), {**optimizer.param_groups[index], **options, "params": [tiny]}
    trial: Any = object.__new__(kind)
    vars(trial).update(vars(optimizer), state=defaultdict(dict), param_groups=[group])
    with no_modes():
        try:
            make_optimizer_state(trial, group)
        except Exception:  # the step itself will say so, at its own time
            return None
    if kind.step is torch.optim.SGD.step and group["momentum"]:
        # its buffer is at first a copy of the gradient: ``-0.0 * momentum + gradient``, where nothing is dampened
        first = _Filled(-0.0, tiny.dtype, tiny.device, None, unwritten=0 if group["fused"] else 2)
        return None if group["dampening"] else {"momentum_buffer": first}
    described: _Described = {key: _filled(value, tiny) for key, value in trial.state[tiny].items()}
    return None if any(described[key] is None is not value for key, value in trial.state[tiny].items()) else described


def _filled(value: Any, tiny: torch.Tensor) -> _Filled | None:
    """What a tensor of state is beside its parameter; None where it has no one value, or a shape of its own."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    first = value.flatten()[0].item()
    if not bool((value == first).all()):
        return None
    if value.dim() and value.shape == tiny.shape and value.stride() == torch.empty_like(tiny).stride():
        return _Filled(first, value.dtype, value.device, None)
    dims = {1: None, **{size: dim for dim, size in enumerate(tiny.shape)}}
    if not value.is_contiguous() or any(size not in dims for size in value.shape):
        return None
    return _Filled(first, value.dtype, value.device, tuple(dims[size] for size in value.shape))


def _tiny(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of as many dimensions, in the same order in memory, of sizes 2, 3, …"""
    order = _order(parameter)
    sizes = [2 + dim for dim in range(parameter.dim())]
    flat = torch.zeros([sizes[dim] for dim in order], dtype=parameter.dtype, device=parameter.device)
    return flat.permute([order.index(dim) for dim in range(parameter.dim())])


def _order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions by stride, the largest first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
