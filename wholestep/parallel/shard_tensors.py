"""Parts of parameters, which no layer takes for whole ones, and their gradients, whose norms are the whole gradients'.

Norms and unscaling are what clipping, logging and `GradScaler` ask for. The states of optimizers are parts, too, and
whole ones that these load, or have made before, become so when the next step begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholestep import comm
from wholestep.comm.api.tracing import is_captured
from wholestep.errors import UnsupportedError
from wholestep.ir import want_mean
from wholestep.tensor_parts import Part, mark_states, part_of, refuse_torchs_full_state
from wholestep.torch_compat import UNSCALE_GRADIENTS, plain_subclasses, plain_torch_function

_LAYERS = "linear bilinear embedding embedding_bag layer_norm rms_norm group_norm batch_norm conv1d conv2d conv3d prelu"
_PRODUCTS = torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__rmatmul__
_OF_WHOLE = {getattr(functional, name) for name in _LAYERS.split()} | set(_PRODUCTS)


class ShardParameter(nn.Parameter):
    """A parameter of which this rank has a part. Layers refuse it: with fewer rows they would give something else.

    Attributes:
        of_whole: the class of the whole one, which it has while a step is captured.
        wholestep_grad: the class of its gradient.
    """

    of_whole = nn.Parameter
    wholestep_grad: type[ShardGrad]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_WHOLE:
            given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, ShardParameter)]
            for part in (part for part in map(part_of, given) if part is not None and not part.is_whole):
                raise RuntimeError(
                    f"fully_shard: {func.__name__} was given {part} of a parameter, outside of its module's forward: "
                    "call the module itself (not its forward), or unshard() it before"
                )
        return plain_torch_function(func, types, args, kwargs or {})

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """As of any tensor: optimizers ask often, and this way takes a third of the time."""
        return plain_torch_function(_GRAD.__get__, (), (self,), {})  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        plain_torch_function(_GRAD.__set__, (), (self, value), {})
        if type(value) is torch.Tensor:  # by a replay, say
            value.__class__ = self.wholestep_grad


_GRAD: Any = torch.Tensor.grad


class ShardGrad(torch.Tensor):
    """A part's gradient. Its norms are collectives: every rank asks for them. All else is of the part.

    Attributes:
        group: the ranks that have the other parts.
    """

    of_whole = torch.Tensor
    is_sparse = False  # here, because optimizers ask each
    group: comm.ProcessGroup

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            return plain_torch_function(func, types, args, kwargs or {})
        with plain_subclasses():
            return rule(*args, **kwargs or {})


def become_parts(parameters: Sequence[torch.Tensor], group: comm.ProcessGroup) -> None:
    """The parameters are `ShardParameter`s, and what a backward leaves in their ``grad`` is a `ShardGrad`."""
    _watch_optimizers()
    _SEEN.clear()
    kind = type("ShardGrad", (ShardGrad,), {"group": group})

    def mark(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if is_captured() and grad is not None:
            want_mean(grad, group.group_name)
        elif type(grad) is torch.Tensor:
            grad.__class__ = kind  # the same object: a backward costs a microsecond for each

    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ShardParameter
            parameter.__dict__["wholestep_grad"] = kind
    _hook_gradients(parameters, mark)


_SEEN: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()  # the states that have no whole tensors


def _take_parts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step begins: whole tensors beside parts become parts. Loading gives an optimizer another ``state`` object."""
    states = vars(optimizer).get("state", {})
    if _SEEN.get(optimizer) is states or is_captured():
        return
    parts = _parts_of(optimizer)
    if parts and isinstance(optimizer, _MIXES):
        _refuse_mixing(optimizer, "")
    if parts and optimizer not in _SEEN:
        optimizer.register_step_post_hook(_check_states)
        optimizer.register_state_dict_post_hook(_give_parts)
    for parameter, part in parts:
        state = states.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == part.shape:
                state[name] = value[part.slices].clone()
            elif isinstance(value, torch.Tensor) and part_of(value) not in (None, part):
                raise RuntimeError(
                    f"fully_shard: {name} in the optimizer's state is {part_of(value)}, this rank has {part}: load "
                    "what this rank saved, or whole tensors (ws.full_state_dict)"
                )
    _require_parts(optimizer)
    _SEEN[optimizer] = states


def _parts_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Part]]:
    """The parameters that are parts now, not in the place of whole ones."""
    known = [(one, part_of(one)) for group in vars(optimizer).get("param_groups", []) for one in group["params"]]
    return [(one, part) for one, part in known if part is not None and one.shape != part.shape]


_MIXES = tuple(getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, name))
_CHECKED: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # how many states were looked at


def _check_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step has ended, which may have made the first states."""
    states = vars(optimizer).get("state", {})
    if _CHECKED.get(optimizer) != len(states) and not is_captured():
        _require_parts(optimizer)
        _CHECKED[optimizer] = len(states)


def _give_parts(optimizer: torch.optim.Optimizer, _: Any) -> None:
    if _parts_of(optimizer):
        refuse_torchs_full_state()
    mark_states(optimizer)


def _require_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises:
    UnsupportedError: a state beside a part is neither a number nor of the part's shape, as of sums over its rows.
    """
    for parameter, part in _parts_of(optimizer):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                _refuse_mixing(optimizer, f" (its {name} is {list(value.shape)} beside {part})")


def _refuse_mixing(optimizer: torch.optim.Optimizer, why: str) -> None:
    raise UnsupportedError(
        f"fully_shard with {type(optimizer).__name__}, which computes across the elements of a parameter{why}",
        remedy="an optimizer that treats each element by itself, as AdamW, or, without fully_shard, "
        "ws.compile(step, plan=ws.FullyShard(axis))",
    )


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_take_parts)


def stay_whole(parameters: Sequence[torch.Tensor], groups: Sequence[comm.ProcessGroup], syncs: Any) -> None:
    """Parameters that cannot be divided: rank 0's values are all ranks', gradients the mean of theirs where it syncs.

    A gradient that was there before is the same on all ranks, or not reduced yet: the mean of the sum serves both.
    """

    @torch.no_grad()
    def reduce(parameter: torch.Tensor) -> None:
        if parameter.grad is None or not syncs():
            return
        for group in groups:
            if is_captured():
                want_mean(parameter.grad, group.group_name)
            else:
                comm.all_reduce(parameter.grad, "avg", group)

    for parameter in parameters:
        for group in reversed(groups):
            comm.broadcast(parameter.detach(), group=group, group_src=0)
    _hook_gradients(parameters, reduce)


def _hook_gradients(parameters: Sequence[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> None:
    """Frozen parameters have it, too: they may be so no longer."""
    for parameter in parameters:
        if parameter.is_floating_point():
            learns = parameter.requires_grad
            parameter.requires_grad_().register_post_accumulate_grad_hook(hook)
            parameter.requires_grad_(learns)


@torch.no_grad()
def _norms(tensors: Sequence[torch.Tensor], order: Any = 2, **kwargs: Any) -> list[torch.Tensor]:
    """The norm of each gradient, of which the ranks hold parts.

    Raises:
        NotImplementedError: norms along dimensions.
    """
    if kwargs:
        raise NotImplementedError(f"norms of sharded gradients are of all elements, found {sorted(kwargs)}")
    power = 2.0 if order in (None, "fro") else float(order)
    none = math.inf if power == -math.inf else 0.0
    local = [torch.linalg.vector_norm(one, power) if one.numel() else one.new_full((), none) for one in tensors]
    for group in {getattr(one, "group", None) for one in tensors} - {None}:
        members = [i for i, one in enumerate(tensors) if getattr(one, "group", None) is group]
        found = torch.stack([local[i].to(torch.promote_types(local[i].dtype, torch.float32)) for i in members])
        if math.isinf(power):
            comm.all_reduce(found, "max" if power > 0 else "min", group)
        else:
            found = found.pow(power) if power else found
            comm.all_reduce(found, "sum", group)
            found = found.pow(1 / power) if power else found
        for i, one in zip(members, found, strict=True):
            local[i] = one.to(local[i].dtype)
    return local


def _norm(tensor: torch.Tensor, order: Any = 2, dim: Any = None, *_: Any, **kwargs: Any) -> torch.Tensor:
    order = kwargs.pop("ord", kwargs.pop("p", order))
    given = {name: value for name, value in ({"dim": dim} | kwargs).items() if value is not None and value is not False}
    return _norms([tensor], order, **given)[0]


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
    """Of all ranks, if one finds a number that is not finite, all do."""
    UNSCALE_GRADIENTS(grads, found_inf, scale)
    for group in {getattr(one, "group", None) for one in grads} - {None}:
        comm.all_reduce(found_inf, "max", group)


# Functions that mean something else of a part than of the whole gradient.
_RULES: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _norms,
    torch.linalg.vector_norm: _norm,
    torch.linalg.norm: _norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    UNSCALE_GRADIENTS: _unscale,
}
