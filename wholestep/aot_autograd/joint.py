"""The joint graph: forward and backward of a function as one graph, and what a partition makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from wholestep.ir import StepGraph


@dataclass
class Joint:
    """Forward and backward of a function as one graph.

    Attributes:
        step: the placeholders are primals (tensors and host numbers), then one tangent for each differentiable output.
            The outputs are those of the forward (results, new values of mutated inputs), then the gradients of those
            primals that have one. A node's phase is "forward" or "backward"; all forward nodes come first. The
            signature's mutations are the forward's.
        n_primals: how many placeholders are primals.
        n_forward: how many outputs belong to the forward.
        rewritten: indices of primals that are overwritten when the forward has run, besides those that the
            signature names: their new values, with a history, are among the outputs.
        gradient_of: for each gradient, the index of its primal.
    """

    step: StepGraph
    n_primals: int
    n_forward: int
    rewritten: tuple[int, ...] = ()
    gradient_of: tuple[int, ...] = ()

    @property
    def primals(self) -> list[fx.Node]:
        return self.step.placeholders[: self.n_primals]

    @property
    def tangents(self) -> list[fx.Node]:
        return self.step.placeholders[self.n_primals :]

    @property
    def forward_outputs(self) -> list[fx.Node]:
        return self.step.outputs[: self.n_forward]

    @property
    def gradients(self) -> list[fx.Node]:
        return [node for node in self.step.outputs[self.n_forward :] if node is not None]

    @property
    def overwritten(self) -> set[fx.Node]:
        """The primals whose old value is gone when the forward has run."""
        return {self.primals[i] for i in (*self.step.signature.mutations.values(), *self.rewritten)}


@dataclass
class Partitioned:
    """The two halves of a joint graph.

    Attributes:
        forward: primals -> the forward's outputs, then those saved values that are neither a primal nor one of the
            forward's outputs, in the order of `saved`.
        backward: all saved values in the order of `saved`, then the tangents that it reads -> the gradients.
        saved: names of the saved nodes, tensors and host numbers. A primal that the forward overwrites is never saved
            under its own name: the backward needs its old value, so a clone of it is.
        tangents: positions of the tangents that the backward reads.
    """

    forward: StepGraph
    backward: StepGraph
    saved: list[str]
    tangents: list[int]


Partition = Callable[[Joint], Partitioned]
