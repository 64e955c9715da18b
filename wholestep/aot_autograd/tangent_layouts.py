"""Specialises the backward to the runtime strides of its tangents, any of which may be None.

Kernels choose their way, and with it their rounding, by the layouts of their operands. So a backward is not given
copies in the layouts it was traced with: it is made anew for the layouts of a call, from the same saved values. Where
autograd copies or not by layout, in `reshape`, that is decided again. What follows only from tangents that are None is
left out, as the engine leaves it out: zeros in their place would turn an infinite derivative into NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep.aot_autograd.partition import Partitioned
from wholestep.fake_evaluate import evaluate
from wholestep.functional import OFFSETS
from wholestep.ir import GETITEM, NodeInfo, StepGraph, check, copy_graph, copy_node, dead_code, info, set_info
from wholestep.nested import tensors_of
from wholestep.torch_compat import FakeTensorMode, OpOverload, lazy_graph_module, no_modes
from wholestep.trace.functionalize.aliases import Geometry

aten = torch.ops.aten

# A tangent's strides; None for one that is None.
Strides = tuple[int, ...] | None

# Operators whose gradients autograd makes contiguous before the call -> the operand that says in which format, if any.
_CONTIGUOUS: dict[Any, int | None] = {
    aten.native_group_norm_backward.default: 1,
    aten._cdist_backward.default: None,
    aten._weight_norm_interface_backward.default: None,
    aten.view_as_complex.default: None,
    aten.view_as_real.default: None,
}


@dataclass(frozen=True)
class Result:
    """Where a gradient is found once a backward has run.

    Attributes:
        place: which of the backward's gradients it is.
        output: index of the program's output that it is, or is a view of; None for a tangent, at `tangent`.
        views: the operators that lead there: (operator, arguments, which of several results).
    """

    place: int
    output: int | None
    tangent: int | None = None
    views: tuple[tuple[Any, tuple[Any, ...], int | None], ...] = ()


@dataclass(frozen=True)
class SpecializedBackward:
    """A backward graph for tangents of certain strides.

    Attributes:
        graph: the saved values, then the tangents that are given -> the gradients that follow from them.
        results: where these are found.
    """

    graph: StepGraph
    results: tuple[Result, ...]


class CannotSpecializeError(Exception):
    """The graph holds for the layouts alone that it was traced with."""


def reads_by_memory(halves: Partitioned) -> bool:
    """Whether a backward counts elements from where the memory of a tangent starts, as `as_strided_scatter`'s does."""
    tangents = set(halves.backward.placeholders[len(halves.saved) :])
    return any(_counted(node) in tangents for node in halves.backward.graph.nodes)


def _counted(node: fx.Node) -> fx.Node | None:
    """What an operator counts an offset from, views aside."""
    if node.target not in OFFSETS or len(node.args) <= OFFSETS[node.target]:
        return None
    return _base_and_views(node.args[0])[0]  # type: ignore[arg-type]


def specialized(halves: Partitioned, strides: Sequence[Strides], offsets: Sequence[int] = ()) -> SpecializedBackward:
    """The backward for tangents of certain strides.

    Args:
        strides: one for each of `Partitioned.tangents`.
        offsets: their storage offsets, where `reads_by_memory`.

    Raises:
        CannotSpecializeError: it can only be given copies in the layouts that it was traced with.
    """
    old = halves.backward
    tangents = old.placeholders[len(halves.saved) :]
    mode = info(old.placeholders[-1]).value.fake_mode
    places = dict(zip(tangents, offsets, strict=True)) if offsets else {}
    made = _Specializer(mode, dict(zip(tangents, strides, strict=True)), places)
    with no_modes(), torch.autocast("cpu", enabled=False):
        for node in old.graph.nodes:
            if node.op != "output":
                made.take(node)
    outputs = {place: made.nodes[node] for place, node in enumerate(old.outputs) if node in made.nodes}
    made.graph.output(tuple(outputs.values()))
    given = [i for node, i in zip(old.placeholders, old.signature.inputs, strict=True) if node in made.nodes]
    signature = replace(old.signature, inputs=given, n_outputs=len(outputs))
    step = StepGraph(lazy_graph_module(old.gm, made.graph), signature, old.stage)
    results = tuple(Result(place, index) for index, place in enumerate(outputs))
    return SpecializedBackward(check(dead_code(step), "partition"), results)


def without_last_views(halves: Partitioned, found: SpecializedBackward) -> SpecializedBackward:
    """A backward whose gradients with repeated elements, or gaps, are made when it has run, as views of what it gives.

    A program's outputs are dense memory of their own; to nodes of eager's before it, that is another layout.
    """
    tangents = {node: i for i, node in enumerate(found.graph.placeholders[len(halves.saved) :])}
    results: list[Result] = []
    outputs: list[fx.Node] = []
    seen: dict[fx.Node, int] = {}
    for result, node in zip(found.results, found.graph.outputs, strict=True):
        base, views = _base_and_views(node)
        value = info(node).value
        plain = value.layout != torch.strided or Geometry.of(value).is_dense
        if base not in tangents and (base.op != "call_function" or plain):
            base, views = node, ()
        if base in tangents:
            results.append(Result(result.place, None, tangents[base], views))
            continue
        if not views or base not in seen:  # two gradients of one value are two tensors, but for views of it
            seen |= {base: len(outputs)} if views else {}
            outputs.append(base)
        results.append(Result(result.place, seen[base] if views else len(outputs) - 1, None, views))
    if outputs == found.graph.outputs:
        return replace(found, results=tuple(results))
    graph, copies = copy_graph(found.graph.graph.nodes)
    graph.output_node().args = (tuple(copies[node] for node in outputs),)
    signature = replace(found.graph.signature, n_outputs=len(outputs))
    step = StepGraph(lazy_graph_module(found.graph.gm, graph), signature, found.graph.stage)
    return SpecializedBackward(check(dead_code(step), "partition"), tuple(results))


def _base_and_views(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]]:
    """What a node is a view of, and by which operators."""
    views: list[Any] = []
    while True:
        call, index = (node.args[0], node.args[1]) if node.target is GETITEM else (node, None)
        assert isinstance(call, fx.Node)
        target = call.target
        known = isinstance(target, OpOverload) and target.is_view and not call.kwargs and len(call.all_input_nodes) == 1
        if not known or not isinstance(info(node).value, torch.Tensor):
            return node, tuple(views[::-1])
        views.append((target, tuple(call.args[1:]), index))
        node = call.all_input_nodes[0]


class _Specializer:
    """The new graph under construction.

    Attributes:
        nodes: node of the old graph -> of this one; those that follow only from tangents that are None have none.
        late: nodes of the old graph that follow from tangents.
    """

    def __init__(
        self, mode: FakeTensorMode, strides: Mapping[fx.Node, Strides], offsets: Mapping[fx.Node, int]
    ) -> None:
        self.mode, self.graph, self.strides, self.offsets = mode, fx.Graph(), strides, offsets
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.late: set[fx.Node] = set(strides)

    def take(self, node: fx.Node) -> None:
        """Takes over the next node of the old graph."""
        if node in self.strides:
            self._tangent(node, self.strides[node])
            return
        late = [operand for operand in node.all_input_nodes if operand in self.late]
        self.late |= {node} if late else set()
        there = [operand for operand in late if operand in self.nodes]
        if late and not there:
            return
        if len(there) < len(late):
            if _is_sum(node):
                self.nodes[node] = self.nodes[there[0]]
                return
            for operand in late:
                if operand not in self.nodes:
                    self._zeros(operand)
        if any(not _same_strides(info(self.nodes[o]).value, info(o).value) for o in there):
            self._again(node)
        else:
            self.nodes[node] = copy_node(self.graph, node, self.nodes.__getitem__)
            base = _counted(node) if self.offsets else None
            if base in self.offsets:  # a graph counts from the operand's first element, eager from the memory's
                place = OFFSETS[node.target]  # type: ignore[index]
                args = list(self.nodes[node].args)
                args[place] -= self.offsets[base]  # type: ignore[operator,index]
                self.nodes[node].args = tuple(args)

    def _tangent(self, node: fx.Node, stride: Strides) -> None:
        if stride is not None:
            like = info(node).value
            self.nodes[node] = self.graph.node_copy(node)
            if stride != like.stride():
                with self.mode:
                    value = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)
                set_info(self.nodes[node], replace(info(node), value=value))

    def _zeros(self, node: fx.Node) -> None:
        """What a call reads of a tangent that is None, where another of its operands is none."""
        like = info(node).value
        if not isinstance(like, torch.Tensor):
            raise CannotSpecializeError
        kind = {"dtype": like.dtype, "device": like.device}
        self.nodes[node] = self._call(info(node), aten.zeros.default, (list(like.shape),), kind)

    def _again(self, node: fx.Node) -> None:
        """A call whose operands have other strides than they had."""
        args: tuple[Any, ...] = fx.map_arg(node.args, self.nodes.__getitem__)
        if node.target in OFFSETS and not _same_strides(info(args[0]).value, info(node.args[0]).value):  # type: ignore[arg-type]
            raise CannotSpecializeError
        if node.target in _CONTIGUOUS:
            args = (self._contiguous(node, args), *args[1:])
        if node.target is not aten.view.default:
            kwargs = fx.map_arg(node.kwargs, self.nodes.__getitem__)
            self.nodes[node] = self._call(info(node), node.target, args, kwargs)
            return
        target = aten.view.default
        if not _can_view(info(args[0]).value, args[1]):
            form = {"memory_format": torch.contiguous_format}
            args = (self._call(info(node), aten.clone.default, args[:1], form), *args[1:])
            target = aten._unsafe_view.default
        self.nodes[node] = self._call(info(node), target, args, {})

    def _contiguous(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """The gradient that a call reads, contiguous in its format."""
        like = _CONTIGUOUS[node.target]
        form = torch.contiguous_format if like is None else _format(info(args[like]).value)
        if info(args[0]).value.is_contiguous(memory_format=form):
            return args[0]  # type: ignore[no-any-return]
        return self._call(info(args[0]), aten.clone.default, args[:1], {"memory_format": form})  # type: ignore[arg-type]

    def _call(self, record: NodeInfo, target: Any, args: tuple[Any, ...], kwargs: Any) -> fx.Node:
        """Adds a call with a record as given, save for its value."""
        try:
            value = evaluate(self.mode, target, args, kwargs)
        except (RuntimeError, ValueError, TypeError) as error:
            raise CannotSpecializeError from error
        made = self.graph.create_node("call_function", target, args, kwargs)
        return set_info(made, replace(record, value=value))


def _same_strides(one: Any, two: Any) -> bool:
    """Whether what two nodes give has the same strides."""
    return all(a.stride() == b.stride() for a, b in zip(tensors_of(one), tensors_of(two), strict=True))


def _is_sum(node: fx.Node) -> bool:
    """Whether a call adds two gradients, as the engine does where several flow together."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    values = [info(o).value for o in (*node.all_input_nodes, node)]
    return len(values) == 3 and len({(v.shape, v.dtype) for v in values}) == 1


def _format(value: torch.Tensor) -> torch.memory_format:
    """The format that a tensor is contiguous in."""
    if value.is_contiguous() or value.dim() not in (4, 5):
        return torch.contiguous_format
    return torch.channels_last if value.dim() == 4 else torch.channels_last_3d


def _can_view(value: torch.Tensor, shape: Any) -> bool:
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(shape)
    except RuntimeError:
        return False
    return True
