"""A compiled forward and backward as one node of PyTorch's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from wholestep.lower.naive import run_nodes
from wholestep.runtime.program import Backward
from wholestep.torch_compat import dispatch_modes_active, free_saved_tensors
from wholestep.trace.results import Derivative

NO_DOUBLE_BACKWARD = (
    "torch.compile with aot_autograd does not currently support double backward: neither does wholestep outside of a "
    "compiled function. Call torch.autograd.grad(…, create_graph=True) and the second backward inside of it."
)

# How a tangent must lie in memory: shape and strides of the value that the backward was traced with.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


# The forward of one call: what autograd sees as results, the values to save, and the inputs that the backward writes.
Forward = Callable[[], tuple[tuple[torch.Tensor, ...], list[Any], list[torch.Tensor]]]


@dataclass(frozen=True, eq=False)
class Plan:
    """What all calls of one differentiable program have in common.

    Attributes:
        layouts: how each tangent must lie in memory.
        apart: positions among the saved values of host numbers, and of inputs that the backward writes.
        guard_identity: a captured backward serves nodes of this very plan.
    """

    guard_identity: ClassVar[bool] = True
    derivative: Derivative
    backward: Backward
    layouts: tuple[Layout, ...]
    apart: frozenset[int]


class CompiledFunction(torch.autograd.Function):
    """Runs a program's forward, saves exactly what its partition says, and runs its backward.

    Each node has, as attributes of its ``ctx``: ``plan`` (whose ``backward.halves`` are the graphs), ``numbers`` (the
    host numbers among the saved values, by position), ``saved_tensors`` (the others, in order) and ``late`` (the
    inputs that hooks write in the backward; hooks read what is there when it runs, so ``numbers`` holds them too).
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, run: Forward, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved, late = run()
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.late = plan, late
        ctx.numbers = {i: saved[i] for i in plan.apart}
        ctx.save_for_backward(*[v for i, v in enumerate(saved) if i not in plan.apart] if plan.apart else saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        backward = plan.backward
        values = all_saved(ctx) + [_laid_out(tangents[i], plan.layouts[i]) for i in backward.halves.tangents]
        behind = list(values) if torch.is_grad_enabled() else ()
        if dispatch_modes_active():  # part of another trace, which sees each operator
            gradients: Sequence[Any] = run_nodes(backward.halves.backward, values)
        else:
            free_saved_tensors(ctx)
            gradients = backward.consume(values)
        count, made = plan.derivative.n_given, len(plan.derivative.made)
        if ctx.late:
            with torch.no_grad():
                for tensor, value in zip(ctx.late, gradients[count + made :], strict=True):
                    tensor.copy_(value)
            gradients = gradients[: count + made]
        if behind:
            gradients = _refusing(gradients, behind)
        silent = [None] * (len(plan.derivative.inputs) - count)
        gradients = [*gradients[:count], *silent, *gradients[count:]]
        present = [i for i, t in enumerate(tangents) if t is not None]
        if len(present) == len(tangents):
            return (None, None, *gradients)
        reached = frozenset().union(*(plan.derivative.reaches[i] for i in present))
        return (None, None, *(g if i in reached else None for i, g in enumerate(gradients)))


def all_saved(ctx: Any) -> list[Any]:
    """The saved values of one node, tensors and host numbers, in the order in which its backward takes them.

    Raises:
        RuntimeError: they are freed: autograd's own error on a second backward.
    """
    numbers = ctx.numbers
    if not numbers:
        return list(ctx.saved_tensors)
    tensors = iter(ctx.saved_tensors)
    return [numbers[i] if i in numbers else next(tensors) for i in range(len(ctx.plan.backward.saved))]


def _laid_out(tangent: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    size, stride, dtype, device = layout
    if tangent is None:
        return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()
    if tangent.stride() == stride and not tangent.is_conj() and not tangent.is_neg():
        return tangent
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(tangent)


class _DoubleBackward(torch.autograd.Function):
    """Gradients that require grad, as those of `create_graph=True` do, and refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(NO_DOUBLE_BACKWARD)


def _refusing(gradients: Sequence[Any], behind: Sequence[Any]) -> list[Any]:
    sources = [t for t in behind if isinstance(t, torch.Tensor) and t.requires_grad]
    if not sources:
        return list(gradients)
    kept = [g.detach() for g in gradients]
    return list(_DoubleBackward.apply(len(kept), *kept, *sources))  # type: ignore[no-untyped-call]


SECOND_TIME = "Trying to backward"


class Spent(torch.autograd.Function):
    """Gives a result the `requires_grad` that it has in eager; it cannot be differentiated, as it says when tried."""

    @staticmethod
    def forward(ctx: Any, why: str, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.why = why
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.why.startswith(SECOND_TIME):
            raise RuntimeError(
                "Trying to backward through the graph a second time: this tensor is the result of a compiled step, "
                "whose graph is not kept. Call backward() inside of the step."
            )
        raise RuntimeError(ctx.why)
