"""Slice propagation: what every rank would compute whole and read only its slice of, it computes that slice of.

Masks, positions and other values that no plan shards are replicated until a call beside sharded operands slices them.
A value all of whose readers are the same slice is computed from slices of its operands instead, by the rule of its
call, and so on up to the factories, which make the slice alone. Nothing is sent, and every rank's graph stays alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.comm.ops.rows import piece
from wholestep.ir import GETITEM, fake_tensors, info, is_effectful, set_info
from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.fake_evaluate import evaluate, meta
from wholestep.spmd.expand.graph_edits import is_view
from wholestep.spmd.expand.local_calls import VIEWS, Writer
from wholestep.spmd.expand.strategy import Build, Strategy
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Replicate, Shard, local_shape
from wholestep.spmd.rules import strategies
from wholestep.torch_compat import OpOverload

aten = torch.ops.aten

# Operators whose result is alike everywhere: they make the piece by its sizes.
_FILLED = (aten.full, aten.zeros, aten.ones, aten.new_full, aten.new_zeros, aten.new_ones)


def propagate_slices(graph: fx.Graph, slices: dict[fx.Node, int], group: AxisGroup) -> dict[fx.Node, fx.Node | None]:
    """Moves slices up as far as rules allow.

    Args:
        graph: of one rank; is changed.
        cuts: calls that take this rank's piece of a dimension of their operand, and which dimension.

    Returns:
        What stands in the place of each cut that is gone; None for the whole values that were cut.
    """
    return _SlicePropagation(graph, dict(slices), group).run()


class _SlicePropagation:
    def __init__(self, graph: fx.Graph, slices: dict[fx.Node, int], group: AxisGroup) -> None:
        self.graph, self.slices, self.group = graph, slices, group
        self.write = Writer(graph, group, lambda number: number)
        self.made = {(sliced.args[0], dim): sliced for sliced, dim in slices.items()}
        self.replaced: dict[fx.Node, fx.Node | None] = {}
        self.changed: set[fx.Node] = set()

    def run(self) -> dict[fx.Node, fx.Node | None]:
        for node in reversed(list(self.graph.nodes)):  # readers first: a new cut is met with its operand
            dims = {self.slices.get(user) for user in node.users}
            dim = dims.pop() if len(dims) == 1 else None
            if dim is not None and node not in self.slices and _can_move(node):
                self._propagate(node, dim)
        self._follow()
        return self.replaced

    def _propagate(self, node: fx.Node, dim: int) -> None:
        call = Call.of(node, self.group)
        if self.group.uneven and call.ends is None:
            return  # what other ranks hold of it is not known
        with self.graph.inserting_before(node):
            made = self._piece(node, call, dim)
        if made is None:
            return
        for sliced in list(node.users):
            if meta(info(made).value) != meta(info(sliced).value):
                self.changed.add(made)
            sliced.replace_all_uses_with(made)
            self.replaced[sliced] = made
            del self.slices[sliced]
            self.graph.erase_node(sliced)
        self.replaced[node] = None
        self.graph.erase_node(node)

    def _piece(self, node: fx.Node, call: Call, dim: int) -> fx.Node | None:
        """This rank's piece of what a call gives; None when no rule says how."""
        if node.target is aten.arange.default or node.target in (aten.arange.start, aten.arange.start_step):
            return self._progression(node, call)
        if isinstance(node.target, OpOverload) and node.target.overloadpacket in _FILLED:
            whole = (Replicate(),) * len(call.operands)
            return self._sized(self.write.call(node, Strategy(whole, (Shard(dim),)), call.operands), node, dim)
        strategy = next((one for one in strategies(call) if call.operands and _serves(one, dim, node)), None)
        if strategy is None:
            return None
        local = [self._operand(*each, node) for each in zip(call.operands, strategy.ins, strict=True)]
        if strategy.emit is not None:
            return strategy.emit(Build(self.graph, info(node), self.group, lambda number: number), call, local)[0]
        return self.write.call(node, strategy, local)

    def _progression(self, node: fx.Node, call: Call) -> fx.Node | None:
        """Some numbers of an `arange`; of integers, which are the same however they are counted."""
        start, step = call.argument("start", 0), call.argument("step", 1)
        value = info(node).value
        if type(start) is not int or type(step) is not int or value.is_floating_point():
            return None
        first, last = piece(value.shape[0], self.group.size, self.group.rank)
        like = {"dtype": value.dtype, "device": value.device}
        bounds = (start + first * step, start + last * step, step)
        made = self.graph.call_function(aten.arange.start_step, bounds, like)
        return self._sized(made, node, 0)

    def _sized(self, made: fx.Node, node: fx.Node, dim: int) -> fx.Node:
        """A factory's piece with its record."""
        whole = info(node).value
        with whole.fake_mode:
            value = whole.new_empty(local_shape(whole.shape, [Shard(dim)], [self.group]))
        return set_info(made, replace(info(node), value=value, ends=None))

    def _operand(self, operand: fx.Node, placement: Placement, reader: fx.Node) -> fx.Node:
        """An operand as a row wants it: a cut, of which there is one for all readers."""
        if not isinstance(placement, Shard):
            return operand
        known = self.made.get((operand, placement.dim))
        if known is not None and known in self.slices:
            if reader < known:
                reader.prepend(known)
            return known
        record = replace(info(reader), value=None, placement=None, ends=None)
        sliced = Build(self.graph, record, self.group, lambda number: number).shard(operand, placement.dim)
        self.slices[sliced] = placement.dim
        self.made[operand, placement.dim] = sliced
        return sliced

    def _follow(self) -> None:
        """Readers of pieces that lie otherwise in memory than cuts of the whole would: their values, up to date."""
        for node in self.graph.nodes if self.changed else ():
            if node.op != "call_function" or self.changed.isdisjoint(node.all_input_nodes):
                continue
            old = info(node)
            if node.target in VIEWS:
                with self.graph.inserting_before(node):
                    node.update_arg(0, self.write.viewable(node.args[0], node.args[1], old))
            value = GETITEM(*_values(node)) if node.target is GETITEM else evaluate(node.target, node.args, node.kwargs)
            if _metas(value) != _metas(old.value):
                self.changed.add(node)
            set_info(node, replace(old, value=value))


def _can_move(node: fx.Node) -> bool:
    """True for a call of one result that may be made for fewer elements."""
    if node.op != "call_function" or not isinstance(info(node).value, torch.Tensor) or is_effectful(node):
        return False
    return isinstance(node.target, OpOverload) and node.target.namespace != "wholestep"


def _serves(strategy: Strategy, dim: int, node: fx.Node) -> bool:
    """True for a row that makes a piece out of pieces and wholes, and sends nothing."""
    sends = strategy.emit is not None and not is_view(node)
    return not sends and strategy.outs == (Shard(dim),) and all(isinstance(p, (Replicate, Shard)) for p in strategy.ins)


def _values(node: fx.Node) -> tuple[Any, ...]:
    return tuple(info(arg).value if isinstance(arg, fx.Node) else arg for arg in node.args)


def _metas(value: Any) -> list[Any]:
    return [meta(one) for one in fake_tensors(value)]
