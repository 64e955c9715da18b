"""What outlives a traced step, and what makes it differentiable, as records that a replay goes by.

Every tensor that outlives the step is an `OutputAlias`: an output of the graph, or a view of one or of an input.
Results and effects refer to them by index, so that one tensor that is both a result and a parameter's gradient is one
object again after a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from wholestep.torch_compat import is_one_of_several, set_versions
from wholestep.trace.record.inputs import TracedInput


@dataclass(frozen=True)
class TensorState:
    """Autograd's flags of one tensor, as eager leaves them.

    Attributes:
        leaf: whether it has no `grad_fn`; None for a tensor whose use autograd forbids.
        version: in-place writes that its version counter counts.
        is_view: whether autograd knows it as a view of another tensor.
        inference: whether it is an inference tensor, which has no counter.
        several: whether it is one of several views that one call made, as `split` does: autograd forbids writes.
        retains: whether it keeps its gradient, as `retain_grad()` asks for.
        parameter: whether it is a `torch.nn.Parameter`.
    """

    requires_grad: bool = False
    leaf: bool | None = True
    version: int = 0
    is_view: bool = False
    inference: bool = False
    several: bool = False
    retains: bool = False
    parameter: bool = False

    @property
    def outdated(self) -> bool:
        """Whether the base of one of several views was written since: autograd forbids to use the view."""
        return self.leaf is None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorState:
        """A tensor's state."""
        inference = tensor.is_inference()
        return cls(
            tensor.requires_grad,
            is_leaf(tensor),
            0 if inference else tensor._version,
            tensor._is_view(),
            inference,
            is_one_of_several(tensor),
            tensor.retains_grad,
            isinstance(tensor, torch.nn.Parameter),
        )


def is_leaf(tensor: torch.Tensor) -> bool | None:
    """As ``tensor.is_leaf``; None for a tensor whose use autograd forbids.

    Of several views that one call made, as `split` does, it forbids each one once their base was written by a value
    that requires grad.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None


def counts_alone(tensor: torch.Tensor, real: object) -> bool:
    """Whether writes to another tensor leave a tensor's version counter alone, as for ``.data``."""
    if tensor.is_inference():
        return True
    before = tensor._version
    if not isinstance(real, torch.Tensor) or real is tensor or real.is_inference():
        return True
    count = real._version
    torch.autograd.graph.increment_version(real)
    alone = tensor._version == before
    set_versions((real,), (count,))  # autograd refuses views of a tensor whose count has moved
    return alone

# An operator, its arguments after the first, and which of several results the view is.
View = tuple[Any, tuple[Any, ...], int | None]
Counter = Literal["memory", "shared", "own"]
# The refusal that is none: of a result whose history leads to leaves that the step made and did not keep.
NO_GRADIENT = "no gradient"
SECOND_TIME = "Trying to backward"  # through a graph that was freed: how autograd's error begins


@dataclass(frozen=True)
class OutputAlias:
    """How a replay makes one tensor that outlives the step.

    Attributes:
        state: what autograd knows of it.
        output: index of the graph's output that holds its memory, or None.
        input: index of the input whose memory it shares, or None.
        counter: whose version counter it has: that of its output or input, which is set for it
            ("memory"); the same, set for another one ("shared"); or one of its own.
        base: index of the alias that autograd knows it as a view of.
        views: the operators that lead there from that alias, or from the output or input, as autograd knows them: one
            `as_strided` where it knows of none; None for the whole of it.
        grad: index of the alias of its gradient.
        refusal: what a later `backward()` through it is told, for a result that cannot be differentiated.
        moved: whether it lies in the memory that the step gives its input; see `Traced.moved`.
    """

    state: TensorState
    output: int | None = None
    input: int | None = None
    counter: Counter = "memory"
    base: int | None = None
    views: tuple[View, ...] | None = None
    grad: int | None = None
    refusal: str = ""
    moved: bool = False

    @property
    def by_strides(self) -> bool:
        """Whether strides say how it is found."""
        return self.views is not None and self.views[-1][0] is torch.ops.aten.as_strided.default


@dataclass(frozen=True)
class NewValue:
    """Where a replay finds something that the step made: an alias's tensor, or a number at an output."""

    alias: int | None = None
    output: int | None = None


@dataclass(frozen=True)
class Derivative:
    """What makes a step's results differentiable outside of it.

    The graph's outputs are then the forward's, followed by the gradients of `inputs` and of `made`, then by
    the new values of `late`; its last placeholders are tangents, one for each entry of `outputs`.

    Attributes:
        outputs: what autograd is to see as results: an alias's index, or None for the new value of an input.
        reaches: for each entry of `outputs`, the positions in `inputs`, then `made`, of those that it depends on.
        between: aliases, or (None) the input at a position in `outputs`, of which a backward outside sees a part of
            the gradient: the positions of the results that are made of it, its own where it has a hook.
        names: for each entry of `outputs`, which result of which node it is in eager, as autograd's errors say it.
        made: aliases of leaves that the step makes; their gradients follow those of `inputs`.
        n_given: how many of `inputs`, the first ones, get a gradient; the others are only known to be depended on.
        n_forward: how many outputs belong to the forward.
        inputs: indices of those that gradients flow to.
        rewritten: (input index, output index, position in `outputs`) of each input to which autograd gives a new
            history: its new value is copied into it.
        late: inputs that hooks write in the backward; their new values follow the gradients.
        runs_once: whether eager's backward needs what it frees.
    """

    outputs: tuple[int | None, ...]
    reaches: tuple[frozenset[int], ...]
    names: tuple[str, ...]
    made: tuple[int, ...]
    n_given: int
    n_forward: int = 0
    inputs: tuple[int, ...] = ()
    rewritten: tuple[tuple[int, int, int], ...] = ()
    late: tuple[int, ...] = ()
    runs_once: bool = True
    between: tuple[tuple[int | None, int, frozenset[int]], ...] = ()


@dataclass
class Differentiated:
    """What differentiating a step adds to its trace.

    Attributes:
        derivative: without what the order of inputs decides; `inputs`, `rewritten` and `late` are here.
        gradients: the nodes of the gradients.
        tangents: the placeholders.
        last: the last node of the forward.
        late: inputs that hooks write in the backward, and the nodes of their new values.
    """

    derivative: Derivative
    inputs: list[TracedInput]
    gradients: list[fx.Node]
    tangents: list[fx.Node]
    last: fx.Node
    rewritten: list[tuple[TracedInput, int, int]]
    late: list[tuple[TracedInput, fx.Node]]

    @property
    def items(self) -> list[TracedInput]:
        """All inputs that are named."""
        groups = self.inputs, *([item for item, *_ in group] for group in (self.rewritten, self.late))
        return [item for group in groups for item in group]
