"""Gradients of the operators, each by the collectives that carry it back.

They follow the local view: the loss is the sum of the ranks' losses. All ranks of the group must run a backward pass
through an operator alike, so a tensor that only gives a shape (that of ``recv``, and of ``scatter`` off its source)
must require a gradient where the operator is to have one.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep.comm.api.groups import get_group
from wholestep.comm.reduce_op import RedOpType, as_op


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]


def _call(name: str, *args: Any) -> torch.Tensor:
    """Operator, then wait."""
    return torch.ops.wholestep.wait(getattr(torch.ops.wholestep, name)(*args))


def _scale(op: str, what: str, group: str) -> float:
    """What a reduction multiplies each rank's tensor by.

    Raises:
        RuntimeError: it is not a sum.
    """
    kind, factor = as_op(op)
    if kind is RedOpType.AVG:
        return 1 / get_group(group).size()
    if kind is RedOpType.PREMUL_SUM:
        return float(factor or 1.0)
    if kind is not RedOpType.SUM:
        raise RuntimeError(f"wholestep::{what} with {op!r} has no gradient: sum, avg, mean or premul_sum is required")
    return 1.0


def _times(grad: torch.Tensor, scale: float) -> torch.Tensor:
    return grad if scale == 1.0 else grad * scale


def _all_reduce(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    op, group = ctx.arguments
    _scale(op, "all_reduce", group)
    return _call("all_reduce", grad, op, group), None, None


def _reduce(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The other ranks' results are their own tensors."""
    dst, op, group = ctx.arguments
    back = _times(_call("broadcast", grad, dst, group), _scale(op, "reduce", group))
    return back if get_group(group).rank() == dst else back + grad, None, None, None


def _broadcast(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    src, group = ctx.arguments
    total = _call("all_reduce", grad, "sum", group)
    return total if get_group(group).rank() == src else torch.zeros_like(total), None, None


def _all_gather(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (group,) = ctx.arguments
    return _call("reduce_scatter", grad, "sum", group), None


def _reduce_scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    op, group = ctx.arguments
    return _times(_call("all_gather", grad, group), _scale(op, "reduce_scatter", group)), None, None


def _all_to_all(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    out_splits, in_splits, group = ctx.arguments
    return _call("all_to_all", grad, in_splits, out_splits, group), None, None, None


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments, ctx.shape = inputs[1:], inputs[0].shape


def _gather(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dst, group = ctx.arguments
    here = get_group(group).rank() == dst
    parts = list(grad.reshape(-1, *ctx.shape)) if here else []
    return _call("scatter", grad.new_empty(ctx.shape), parts, dst, group), None, None


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.src, ctx.group, ctx.parts = inputs[2], inputs[3], len(inputs[1])


def _scatter(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    came = _call("gather", grad.reshape(1, *grad.shape), ctx.src, ctx.group)
    return torch.zeros_like(grad), list(came) if ctx.parts else [], None, None


def _send(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """What comes back from the receiver, and what this rank's own use of the copy gives."""
    dst, tag, group = ctx.arguments
    return _call("recv", grad, dst, tag, group) + grad, None, None, None


def _recv(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    src, tag, group = ctx.arguments
    return torch.zeros_like(_call("send", grad, src, tag, group)), None, None, None


def _barrier(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (group,) = ctx.arguments
    return _call("barrier", grad, group), None


def _wait(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


# Operator -> its gradient, and what that keeps of the call.
RULES = {
    "all_reduce": (_all_reduce, _keep),
    "reduce": (_reduce, _keep),
    "broadcast": (_broadcast, _keep),
    "all_gather": (_all_gather, _keep),
    "reduce_scatter": (_reduce_scatter, _keep),
    "all_to_all": (_all_to_all, _keep),
    "gather": (_gather, _keep_gather),
    "scatter": (_scatter, _keep_scatter),
    "send": (_send, _keep),
    "recv": (_recv, _keep),
    "barrier": (_barrier, _keep),
    "wait": (_wait, _keep),
}
