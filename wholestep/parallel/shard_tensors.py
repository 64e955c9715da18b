"""Parts of parameters, which no layer takes for whole ones, and their gradients, whose norms are the whole gradients'.

Norms and unscaling are what clipping, logging and `GradScaler` ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from wholestep import comm
from wholestep.comm.api.tracing import is_captured
from wholestep.marks import want_mean
from wholestep.tensor_parts import part_of
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
        rule = RULES.get(func)
        if rule is None:
            return plain_torch_function(func, types, args, kwargs or {})
        with plain_subclasses():
            return rule(*args, **kwargs or {})


def become_parts(parameters: Sequence[torch.Tensor], group: comm.ProcessGroup) -> None:
    """The parameters are `ShardParameter`s, and what a backward leaves in their ``grad`` is a `ShardGrad`."""
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
RULES: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _norms,
    torch.linalg.vector_norm: _norm,
    torch.linalg.norm: _norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    UNSCALE_GRADIENTS: _unscale,
}
