"""Second derivatives outside of a compiled function: which gradients would have one in eager, and refuse it here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.aot_autograd import Partitioned
from wholestep.ir import StepGraph, info
from wholestep.nested import tensors_of
from wholestep.torch_compat import behind
from wholestep.trace.outputs.output_records import NO_GRADIENT, SECOND_TIME

NO_DOUBLE_BACKWARD = (
    "torch.compile with aot_autograd does not currently support double backward: neither does wholestep outside of a "
    "compiled function. Call torch.autograd.grad(…, create_graph=True) and the second backward inside of it."
)
NOT_KEPT = (
    f"{SECOND_TIME} through the graph a second time: this tensor is the result of a compiled step, whose graph is not "
    "kept. Call backward() inside of the step."
)
NOT_OUTSIDE = (
    "this is the result of a step that is compiled under a plan: its backward outside of the step would leave "
    "gradients that no plan has reduced. Compile a function that calls the model and backward()."
)


class Sources:
    """What the gradients of a program follow from: sets of positions among the values that its backward takes, as bits.

    Args:
        inputs: positions of the forward's inputs that get gradients.

    Attributes:
        saved: saved values that the forward has computed from these.
        of_gradients: for each gradient, the saved values and tangents that it follows from.
    """

    def __init__(self, halves: Partitioned, inputs: Sequence[int]) -> None:
        given, results = halves.forward.placeholders, halves.forward.outputs
        made = _followed(halves.forward, {given[i]: 1 for i in inputs})
        computed = [kind == "output" and results[i] in made for kind, i in halves.places]
        self.saved = sum(1 << place for place, follows in enumerate(computed) if follows)
        taken = {node: 1 << place for place, node in enumerate(halves.backward.placeholders)}
        found = _followed(halves.backward, taken)
        self.of_gradients = [found.get(node, 0) for node in halves.backward.outputs]


def _followed(graph: StepGraph, starts: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """What each value of a graph that can be differentiated follows from."""
    found = dict(starts)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            sources = 0
            for argument in node.all_input_nodes:
                sources |= found.get(argument, 0)
            if sources and any(t.is_floating_point() or t.is_complex() for t in tensors_of([info(node).value])):
                found[node] = sources
    return found


class SecondDerivative:
    """What the gradients of one call with `create_graph=True` are told of when it is known what they follow from.

    Args:
        node: that of the call in the autograd graph.
        values: the saved values, then the tangents that are read (None for one that is not there).
    """

    def __init__(self, node: Any, sources: Sources, values: Sequence[Any]) -> None:
        self._of_gradients = sources.of_gradients
        there = [(place, t) for place, t in enumerate(values) if isinstance(t, torch.Tensor) and t.requires_grad]
        self._differentiable = sources.saved | sum(1 << place for place, _ in there)
        leaves = [above.variable for above in behind([node]) if hasattr(above, "variable")]
        self._tensors = [*(t for _, t in there), *leaves] if self._differentiable else []

    def refuse(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients; those that would require grad in eager do, and refuse to be differentiated."""
        follow = [sources & self._differentiable for sources in self._of_gradients]
        places = [i for i, gradient in enumerate(gradients) if gradient is not None and follow[i]]
        if not places or not self._tensors:
            return list(gradients)
        detached = [gradients[i].detach() for i in places]
        found = dict(zip(places, NotDifferentiable.of(detached, self._tensors, NO_DOUBLE_BACKWARD), strict=True))
        return [found.get(place, gradient) for place, gradient in enumerate(gradients)]


class NotDifferentiable(torch.autograd.Function):
    """Gives tensors the `requires_grad` that they have in eager; their backward raises, or reaches nobody's leaf."""

    @staticmethod
    def forward(ctx: Any, why: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.why = why
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        if ctx.why == NO_GRADIENT:
            return (None,) * len(ctx.needs_input_grad)
        raise RuntimeError(NOT_KEPT if ctx.why.startswith(SECOND_TIME) else ctx.why or NOT_OUTSIDE)

    @classmethod
    def of(cls, values: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], why: str) -> Sequence[torch.Tensor]:
        """Tensors like some, which follow from sources as far as the engine knows."""
        return cls.apply(why, len(values), *values, *sources)  # type: ignore[no-any-return, no-untyped-call]
