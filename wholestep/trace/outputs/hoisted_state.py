"""State made in the first step, hoisted: its creation leaves the graph, which then serves later steps too.

An optimizer makes `exp_avg = zeros_like(p)` for each parameter in its first step and updates it at once. The
captured graph of that step differs from the next one's only in that creation. Where a tensor that the step
leaves behind began as a value made from nothing (factories and numbers), it becomes an input, and a small
graph of its own makes its initial value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import Input, info, is_effectful
from wholestep.nested import map_leaves
from wholestep.torch_compat import FakeTensor, lazy_graph_module
from wholestep.trace.numbers.symbolic_sizes import held
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.recorder import Recorder

aten = torch.ops.aten

# Factories that read a tensor's shape, dtype and device, never its content.
LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
UNSET = {aten.empty.memory_format, aten.empty_like.default}


@dataclass
class HoistedState:
    """The state that a step makes, and its initial values.

    Attributes:
        module: gives the tensors, from the numbers at `inputs`.
        inputs: the numbers among the inputs that it reads.
        state: the placeholders that take them.
    """

    module: fx.GraphModule
    inputs: list[TracedInput] = field(default_factory=list)
    state: list[TracedInput] = field(default_factory=list)

    def initial_values(self) -> tuple[torch.Tensor, ...]:
        """The initial values as they are in the traced call."""
        if not self.state:
            return ()
        with torch.no_grad():
            return self.module(*(item.value for item in self.inputs))  # type: ignore[no-any-return]


def hoist(recorder: Recorder, tensors: list[torch.Tensor], state_outputs: Mapping[int, Input]) -> HoistedState:
    """Hoists those of the given tensors, which the step leaves behind, that were made from nothing.

    Args:
        state_outputs: place in the list -> where the step leaves a tensor.
    """
    nodes = list(recorder.builder.graph.nodes)
    made = set[fx.Node]()  # what follows from factories, constants and Python numbers alone
    for node in nodes:
        if made.issuperset(_operands(node)) and not _is_given(node):
            made.add(node)
    storages: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        dense = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided  # no memory that stays, of others
        ref = recorder.inputs.ref(tensor) if dense else None
        if ref is not None and ref.parent is None and ref.storage.input is None and ref.storage.first in made:
            storages.setdefault(id(ref.storage), index)
    firsts = [recorder.inputs.ref(tensors[index]).storage.first for index in storages.values()]
    needed = set(firsts)
    for node in reversed(nodes):
        needed.update(_operands(node) if node in needed else ())
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node in needed:
            copies[node] = _copy(graph, node, copies)
    graph.output(tuple(copies[first] for first in firsts))
    for copied in graph.nodes:
        copied.meta.clear()  # records hold fake tensors, and are of no use here
    numbers = [item for item in recorder.inputs.items if item.node in needed]
    order = [node for node in nodes if node.op == "placeholder" and node in needed]
    state = [_as_input(recorder, tensors[index], state_outputs.get(index)) for index in storages.values()]
    return HoistedState(
        lazy_graph_module(recorder.builder.constants, graph),
        sorted(numbers, key=lambda item: order.index(item.node)),
        state,
    )


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a value follows from, given that some factories read the shape alone of a tensor."""
    if node.target in LIKE:
        return [operand for operand in node.all_input_nodes if not isinstance(info(operand).value, torch.Tensor)]
    return node.all_input_nodes


def _is_given(node: fx.Node) -> bool:
    """Whether a value is a tensor from outside, the outcome of an effect, or uninitialised memory."""
    if node.op == "placeholder":
        return not isinstance(info(node).value, (int, float))
    return node.op != "get_attr" and (is_effectful(node) or node.target in UNSET)


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    def operand(old: fx.Node) -> fx.Node:
        value = info(old).value
        if node.target not in LIKE or not isinstance(value, torch.Tensor):
            return copies[old]
        # a factory reads nothing but the shape
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        args = map_leaves(held, (list(value.shape), list(value.stride())))
        return graph.call_function(aten.empty_strided.default, args, options)

    copied = graph.node_copy(node, operand)
    # each step begins with its own copy of a constant
    return graph.call_function(aten.clone.default, (copied,)) if node.op == "get_attr" else copied


def _as_input(recorder: Recorder, tensor: torch.Tensor, place: Input | None) -> TracedInput:
    ref, builder = recorder.inputs.ref(tensor), recorder.builder
    first = ref.storage.first
    source = place.source if place is not None else f"state {len(recorder.inputs.items)}"
    node = builder.placeholder(source, "state", info(first).value)
    first.replace_all_uses_with(node)
    builder.gradients = [replace(g, after=node.name) if g.after == first.name else g for g in builder.gradients]
    if ref.storage.value is first:
        ref.storage.value = node
    ref.storage.first = node
    ref.node = node if ref.node is first else ref.node
    return recorder.inputs.add(TracedInput(node, None, tensor, ref))
