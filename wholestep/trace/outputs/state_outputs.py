"""Slots: what outlives a traced step, and what makes it differentiable, described.

Every tensor that outlives the step is a *slot*: an output of the graph, or a view of one, or a view of an
input. Results and effects refer to slots, so that one tensor that is both a result and a parameter's
gradient is one object again after a replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from wholestep.trace.functionalize.dtype_views import Kind
from wholestep.trace.record.inputs import Lifted

# An operator, its arguments after the first, and which of several results the view is.
View = tuple[Any, tuple[Any, ...], int | None]


@dataclass(frozen=True)
class Slot:
    """How a replay makes one tensor that outlives the step.

    Attributes:
        output: index of the graph's output that holds its memory, or None.
        input: index of the input in whose memory it lies, or None.
        geometry: (size, stride, offset from the start of that output or input) for a view, None for the
            whole of it.
        kind: what the view's elements are, where they are not that memory's own.
        requires_grad: as eager leaves it; `leaf` tells whether it then has a `grad_fn`.
        version: in-place writes that its version counter counts.
        is_view: whether autograd knows it as a view of another tensor.
        inference: whether it is an inference tensor, which has no counter.
        several: whether it is one of several views that one call made, as `split` does; autograd lets nobody write it.
        outdated: whether the base of such a view was written since; autograd lets nobody use it.
        own_counter: whether its version counter is set for it, not for another one with which it shares a counter.
        apart: whether that counter is another one than that of the output or input it lies in.
        base: index of the slot that autograd knows it as a view of.
        views: the operators that lead there from that slot, or from the input, as autograd knows them: (operator,
            arguments, which of several results); None where strides alone say how.
        parameter: whether it is a `torch.nn.Parameter`.
        retains: whether it keeps its gradient, as `retain_grad()` asks for.
        grad: index of the slot of its gradient.
        refusal: what a later `backward()` through it is told, for a result that cannot be differentiated.
    """

    output: int | None = None
    input: int | None = None
    geometry: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    kind: Kind | None = None
    requires_grad: bool = False
    leaf: bool = True
    version: int = 0
    is_view: bool = False
    inference: bool = False
    several: bool = False
    outdated: bool = False
    own_counter: bool = True
    apart: bool = False
    base: int | None = None
    views: tuple[View, ...] | None = None
    refusal: str = ""
    parameter: bool = False
    retains: bool = False
    grad: int | None = None


@dataclass(frozen=True)
class Derivative:
    """What makes a step's results differentiable outside of it.

    The graph's outputs are then the forward's, followed by the gradients of `inputs` and of `made`, then by
    the new values of `late`; its last placeholders are tangents, one for each entry of `outputs`.

    Attributes:
        n_forward: how many outputs belong to the forward.
        outputs: what autograd is to see as results: a slot's index, or None for the new value of an input.
        rewritten: (input index, output index, position in `outputs`) of each input to which autograd gives a new
            history: its new value is copied into it.
        inputs: those that gradients flow to.
        reaches: for each entry of `outputs`, the positions in `inputs`, then `made`, of those that it depends on.
        late: inputs that hooks write in the backward; their new values follow the gradients.
        made: slots of leaves that the step makes; their gradients follow those of `inputs`.
        n_given: how many of `inputs`, the first ones, get a gradient; the others are only known to be depended on.
        names: for each entry of `outputs`, which result of which node it is in eager, as autograd's errors say it.
    """

    n_forward: int
    outputs: tuple[int | None, ...]
    rewritten: tuple[tuple[int, int, int], ...]
    inputs: tuple[int, ...]
    reaches: tuple[frozenset[int], ...]
    late: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    n_given: int = 0
    names: tuple[str, ...] = ()


@dataclass
class Differentiated:
    """What differentiating a step adds to its trace, in terms of nodes and inputs; see `Derivative`.

    Attributes:
        slots: for each thing that autograd is to see as a result, its slot, None for the new value of an input.
        rewritten: input, node of its new value, and position in `slots`.
        inputs, gradients: those that gradients flow to, and the nodes that give them.
        tangents, names: for each of `slots`, its placeholder, and which result of which node it is.
        last: the last node of the forward.
        late: inputs that hooks write in the backward, and the nodes of their new values.
        made: slots of leaves that the step makes, whose gradients follow those of `inputs`.
        refused: input, node of its new value, and what autograd says of its history when that is differentiated.
    """

    slots: list[int | None]
    rewritten: list[tuple[Lifted, fx.Node, int]]
    inputs: list[Lifted]
    gradients: list[fx.Node]
    reaches: list[frozenset[int]]
    tangents: list[fx.Node]
    names: list[str]
    last: fx.Node
    late: list[tuple[Lifted, fx.Node]] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    refused: list[tuple[Lifted, fx.Node, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Made:
    """Where a replay finds something that the step made: a slot's tensor, or a number at an output."""

    slot: int | None = None
    output: int | None = None
