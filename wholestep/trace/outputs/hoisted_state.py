"""State made in the first step, hoisted: its creation leaves the graph, which then serves later steps too.

An optimizer makes `exp_avg = zeros_like(p)` when it first meets a parameter and updates it at once. The
captured graph of that step differs from the next one's only in that creation. Where a tensor that the step
leaves behind began as a value made from nothing (factories and numbers), it becomes an input, and a small
graph of its own makes its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import Input, is_effectful
from wholestep.torch_compat import FakeTensor, lazy_graph_module
from wholestep.trace.numbers.symbolic_sizes import held
from wholestep.trace.record.inputs import Lifted
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.tape import map_leaves

aten = torch.ops.aten

# Factories that read their argument's shape, dtype and device, never its content.
LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


@dataclass
class Hoisted:
    """Beginnings of the state that a step makes.

    Attributes:
        module: gives the tensors, from the numbers at `inputs`.
        inputs: the lifted numbers that it reads.
        state: the placeholders that take them.
    """

    module: fx.GraphModule
    inputs: list[Lifted] = field(default_factory=list)
    state: list[Lifted] = field(default_factory=list)

    def begin(self) -> tuple[torch.Tensor, ...]:
        """The beginnings as they are in the traced call."""
        if not self.state:
            return ()
        with torch.no_grad():
            return self.module(*(item.value for item in self.inputs))  # type: ignore[no-any-return]


def hoist(recorder: Recorder, tensors: list[torch.Tensor], homes: Mapping[int, Input]) -> Hoisted:
    """Hoists those of the given tensors, which the step leaves behind, that were made from nothing.

    Args:
        homes: place in the list -> where the step leaves a tensor.
    """
    graph = fx.Graph()
    builder = _Builder(recorder, graph)
    firsts: list[fx.Node] = []
    state: list[Lifted] = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, FakeTensor):
            continue
        ref = recorder.ref(tensor)
        if ref.parent is not None or ref.storage.input is not None or not builder.from_nothing(ref.storage.first):
            continue
        firsts.append(builder.copy(ref.storage.first))
        state.append(_as_input(recorder, tensor, homes.get(index)))
    graph.output(tuple(firsts))
    for copied in graph.nodes:
        copied.meta.clear()  # records hold fake tensors, and are of no use here
    return Hoisted(lazy_graph_module(recorder.constants, graph), builder.numbers, state)


def _as_input(recorder: Recorder, tensor: torch.Tensor, home: Input | None) -> Lifted:
    ref = recorder.ref(tensor)
    first = ref.storage.first
    value = first.meta["info"].value
    source = home.source if home is not None else f"state {len(recorder.lifted)}"
    node = recorder.placeholder(source, "state", value)
    first.replace_all_uses_with(node)
    recorder.gradients = [replace(g, after=node.name) if g.after == first.name else g for g in recorder.gradients]
    lifted = Lifted(node, None, tensor, ref)
    if ref.storage.value is first:
        ref.storage.value = node
    ref.storage.first = node
    ref.node = node if ref.node is first else ref.node
    ref.storage.input = len(recorder.lifted)
    recorder.lifted.append(lifted)
    return lifted


class _Builder:
    """Copies creations into a graph of their own."""

    def __init__(self, recorder: Recorder, graph: fx.Graph) -> None:
        self.recorder, self.graph = recorder, graph
        self.numbers: list[Lifted] = []
        self.copies: dict[fx.Node, fx.Node] = {}
        self.from_inputs: set[fx.Node] = set()

    def from_nothing(self, node: fx.Node) -> bool:
        """True when a value follows from factories, constants and lifted numbers alone."""
        readers: dict[fx.Node, fx.Node | None] = {node: None}
        queue = [node]
        while queue:
            one: fx.Node | None = queue.pop()
            assert one is not None
            if one in self.from_inputs or _is_given(one):
                while one is not None:
                    self.from_inputs.add(one)
                    one = readers[one]
                return False
            for operand in () if one.target in LIKE else one.all_input_nodes:
                if operand not in readers:
                    readers[operand] = one
                    queue.append(operand)
        return True

    def copy(self, node: fx.Node) -> fx.Node:
        """A value's copy, after those of all that it follows from."""
        queue = [node]
        while queue:
            read = () if queue[-1].target in LIKE else queue[-1].all_input_nodes
            missing = [operand for operand in read if operand not in self.copies]
            if missing:
                queue += missing
            else:
                self._copy(queue.pop())
        return self.copies[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self.copies:
            return self.copies[node]
        if node.op == "placeholder":
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(first):
                made = self.graph.placeholder(node.name)
            self.numbers.append(next(item for item in self.recorder.lifted if item.node is node))
        elif node.target in LIKE:
            made = self.graph.node_copy(node, self._shape_of)
        else:
            made = self.graph.node_copy(node, self.copies.__getitem__)
            if node.op == "get_attr":  # each step begins with its own copy of the constant
                made = self.graph.call_function(aten.clone.default, (made,))
        self.copies[node] = made
        return made

    def _shape_of(self, node: fx.Node) -> fx.Node:
        """A tensor of a node's shape, for a factory that reads nothing else of it."""
        value = node.meta["info"].value
        if not isinstance(value, torch.Tensor):
            return self.copy(node)
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        args = map_leaves(held, (list(value.shape), list(value.stride())))
        return self.graph.call_function(aten.empty_strided.default, args, options)


def _is_given(node: fx.Node) -> bool:
    """Whether a value is a tensor from outside, the outcome of an effect, or whatever lies in memory."""
    if node.op == "placeholder":
        return not isinstance(node.meta["info"].value, (int, float))
    unset = (aten.empty.memory_format, aten.empty_like.default)
    return node.op != "get_attr" and (is_effectful(node) or node.target in unset)


