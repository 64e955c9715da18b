"""Gradients of the operators, each by the collectives that carry it back.

They follow the local view: the loss is the sum of the ranks' losses. All ranks of the group must run a backward pass
through an operator alike, so a tensor that only gives a shape (that of ``recv``, and of ``scatter`` off its source)
must require a gradient where the operator is to have one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from wholestep.comm.api.groups import get_group
from wholestep.comm.reduce_op import RedOpType, as_op


def _call(name: str, *args: Any) -> torch.Tensor:
    """Operator, then wait."""
    return torch.ops.wholestep.wait(getattr(torch.ops.wholestep, name)(*args))


def _scale(op: str, what: str, group: str) -> float:
    """What a reduction multiplies each rank's tensor by.

    Raises:
        RuntimeError: it is not a sum.
    """
    kind, factor = as_op(op)
    if kind not in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM):
        raise RuntimeError(f"wholestep::{what} with {op!r} has no gradient: sum, avg, mean or premul_sum is required")
    return 1 / get_group(group).size() if kind is RedOpType.AVG else float(factor or 1.0)


def _times(grad: torch.Tensor, scale: float) -> torch.Tensor:
    return grad if scale == 1.0 else grad * scale


def _all_reduce(ctx: Any, grad: torch.Tensor, op: str, group: str) -> torch.Tensor:
    _scale(op, "all_reduce", group)
    return _call("all_reduce", grad, op, group)


def _reduce(ctx: Any, grad: torch.Tensor, dst: int, op: str, group: str) -> torch.Tensor:
    """The other ranks' results are their own tensors."""
    back = _times(_call("broadcast", grad, dst, group), _scale(op, "reduce", group))
    return back if get_group(group).rank() == dst else back + grad


def _reduce_scatter(ctx: Any, grad: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _times(_call("all_gather", grad, group), _scale(op, "reduce_scatter", group))


def _broadcast(ctx: Any, grad: torch.Tensor, src: int, group: str) -> torch.Tensor:
    total = _call("all_reduce", grad, "sum", group)
    return total if get_group(group).rank() == src else torch.zeros_like(total)


def _gather(ctx: Any, grad: torch.Tensor, dst: int, group: str) -> torch.Tensor:
    parts = list(grad.reshape(-1, *ctx.shape)) if get_group(group).rank() == dst else []
    return _call("scatter", grad.new_empty(ctx.shape), parts, dst, group)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.shape = inputs[0].shape
    ctx.arguments = inputs[1:]


# Operator -> the gradient of its input, from the result's and the other arguments.
_OF_INPUT: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": lambda ctx, grad, group: _call("reduce_scatter", grad, "sum", group),
    "all_to_all": lambda ctx, grad, outs, ins, group: _call("all_to_all", grad, ins, outs, group),
    "gather": _gather,
    # what comes back from the receiver, and what this rank's own use of the copy gives
    "send": lambda ctx, grad, dst, tag, group: _call("recv", grad, dst, tag, group) + grad,
    "recv": lambda ctx, grad, src, tag, group: torch.zeros_like(_call("send", grad, src, tag, group)),
    "barrier": lambda ctx, grad, group: _call("barrier", grad, group),
    "wait": lambda ctx, grad: grad,
}


def _backward(name: str, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _OF_INPUT[name](ctx, grad, *ctx.arguments), *[None] * len(ctx.arguments)


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.parts, ctx.src, ctx.group = len(inputs[1]), *inputs[2:]


def _scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    found = _call("gather", grad.reshape(1, *grad.shape), ctx.src, ctx.group)
    return torch.zeros_like(grad), list(found) if ctx.parts else [], None, None


# Operator -> its gradient, and what that keeps of the call.
RULES: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "scatter": (_scatter, _keep_scatter),
    **{name: (functools.partial(_backward, name), _keep) for name in _OF_INPUT},
}
