"""Initial state: what a step makes at its first call, as an optimizer does, made before its program runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.tensor_parts import Part, mark_part
from wholestep.torch_compat import lazy_graph_module
from wholestep.trace import Traced

# Factories whose result has the shape of their argument.
_LIKE = {
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
}


class StateInitializer:
    """The creation of a program's state.

    Args:
        placements: of each input of the program; a `Part` of state that the step makes is what this rank keeps of it.

    Attributes:
        hoisted: input that is state -> position among the state that is made.
    """

    def __init__(self, traced: Traced, placements: Sequence[Any]) -> None:
        state = {id(item): index for index, item in enumerate(traced.hoisted.state)}
        self.hoisted = {i: state[id(item)] for i, item in enumerate(traced.inputs) if id(item) in state}
        self._parts = {i: p for i, p in enumerate(placements) if i in self.hoisted and isinstance(p, Part)}
        self._make = _in_parts(traced.hoisted.module, {self.hoisted[i]: p for i, p in self._parts.items()})
        self._bound = [i for i in range(len(traced.inputs)) if i not in self.hoisted]
        places = {id(item): i for i, item in enumerate(traced.inputs)}
        self._inputs = [places[id(item)] for item in traced.hoisted.inputs]

    def put(self, values: list[Any]) -> None:
        """Makes the state and puts it in its places among the inputs."""
        numbers = dict(zip(self._bound, values, strict=True))
        with torch.no_grad():
            made = self._make(*(numbers[i] for i in self._inputs))
        for index in sorted(self.hoisted):
            values.insert(index, mark_part(made[self.hoisted[index]], self._parts.get(index)))


def _in_parts(module: fx.GraphModule, parts: dict[int, Part]) -> fx.GraphModule:
    """The creation of state, of parts where a rank keeps parts.

    Args:
        parts: by output.
    """
    if not parts:
        return module
    graph = fx.Graph()
    made: list[fx.Node] = list(graph.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    for index, part in parts.items():
        node, shape = made[index], list(part.size)
        like = next(iter(node.all_input_nodes), None)
        if node.target in _LIKE and like is not None and like.target is torch.ops.aten.empty_strided.default:
            like.args = (shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))])
        else:
            for dim, span in enumerate(part.spans):
                with graph.inserting_after(node):
                    node = graph.call_function(torch.ops.aten.slice.Tensor, (node, dim, *span))
            with graph.inserting_after(node):
                made[index] = graph.call_function(
                    torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
    graph.output(tuple(made))
    return lazy_graph_module(module, graph)
