"""Writes the calls of one rank: the same operators on local operands, with this rank's sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, NodeInfo, add_call, copy_node, info, set_info
from wholestep.nested import tensors_of
from wholestep.spmd.expand.calls import Call, exchanged, with_arguments
from wholestep.spmd.expand.fake_evaluate import evaluate
from wholestep.spmd.expand.strategy import Strategy
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Shard, local_shape
from wholestep.torch_compat import OpOverload

aten = torch.ops.aten

_SIZES = ("size", "input_sizes", "input_size", "self_size")  # arguments that give the result's shape
VIEWS = (aten.view.default, aten._unsafe_view.default)


class Writer:
    """Adds calls to the graph of one rank.

    Args:
        graph: in which calls are added at the end.
        group: the ranks of the axis.
        node_of: this rank's node for a node of the whole step that gives a number.
    """

    def __init__(self, graph: fx.Graph, group: AxisGroup, node_of: Callable[[fx.Node], fx.Node]) -> None:
        self.graph, self.group, self.node_of = graph, group, node_of

    def copy(self, node: fx.Node) -> fx.Node:
        """A node with its record, whose operands are numbers."""
        return set_info(copy_node(self.graph, node, self.node_of), replace(info(node)))

    def pick(self, node: fx.Node, index: int) -> fx.Node:
        """One item of a call's results."""
        picked = add_call(self.graph, GETITEM, (node, index))
        return set_info(picked, replace(info(node), value=info(node).value[index], ends=None))

    def call(self, node: fx.Node, strategy: Strategy, local: Sequence[fx.Node]) -> fx.Node:
        """The same call on local operands."""
        args, kwargs = exchanged(node.args, node.kwargs, local, self.node_of)
        args, kwargs = self._with_sizes(node, strategy, args, kwargs)
        if node.target in VIEWS:
            args = (self.viewable(local[0], args[1], info(node)), *args[1:])
        whole = not any(isinstance(placement, Shard) for placement in (*strategy.ins, *strategy.outs))
        return self._add(node.target, args, kwargs, info(node) if whole else replace(info(node), ends=None))

    def lists(
        self, node: fx.Node, places: Sequence[int], calls: Sequence[Call], local: Sequence[Sequence[fx.Node]]
    ) -> list[list[fx.Node]]:
        """An operator on lists, on some of its columns.

        Args:
            places: of the columns in the lists.
            calls, local: of each of these columns, and its local operands.

        Returns:
            The results of each column.
        """
        if not places:
            return []
        columns = [exchanged(c.args, c.kwargs, nodes, self.node_of) for c, nodes in zip(calls, local, strict=True)]

        def gather(old: Any, pick: Callable[[tuple[tuple[Any, ...], dict[str, Any]]], Any]) -> Any:
            if not isinstance(old, (list, tuple)):
                return pick(columns[0])
            return [pick(column) for column in columns] if old else []

        args = tuple(gather(old, lambda c, i=i: c[0][i]) for i, old in enumerate(node.args))  # type: ignore[misc]
        kwargs = {k: gather(old, lambda c, k=k: c[1][k]) for k, old in node.kwargs.items()}  # type: ignore[misc]
        made = self._add(node.target, args, kwargs, info(node))
        value = info(made).value
        if value and isinstance(value[0], (list, tuple)):
            rows = [self.pick(made, i) for i, one in enumerate(value) if one]
            return [[self.pick(strategy, place) for strategy in rows] for place in range(len(places))]
        return [[self.pick(made, place)] for place in range(len(places))] if value is not None else [[] for _ in places]

    def _with_sizes(self, node: fx.Node, strategy: Strategy, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments that say the result's shape say that of this rank's."""
        if not isinstance(node.target, OpOverload) or not strategy.outs or not isinstance(strategy.outs[0], Shard):
            return args, kwargs
        value = next(tensors_of(info(node).value))
        for one in node.target._schema.arguments:
            if one.name in _SIZES and str(one.type) == "List[int]":
                shape = list(local_shape(value.shape, strategy.outs[:1], [self.group]))
                args, kwargs = with_arguments(node.target, args, kwargs, **{one.name: shape})
        return args, kwargs

    def viewable(self, node: fx.Node, shape: Sequence[int], record: NodeInfo) -> fx.Node:
        """A value that can be seen in another shape, copied where its strides do not allow it."""
        try:
            evaluate(aten.view.default, (node, list(shape)), {})
        except (RuntimeError, ValueError):  # operators of torch written in Python raise the second
            return self._add(aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, record)
        return node

    def _add(self, target: Any, args: Any, kwargs: Any, record: NodeInfo) -> fx.Node:
        node = add_call(self.graph, target, args, kwargs)
        return set_info(node, replace(record, value=_value(node, record)))


def _value(node: fx.Node, record: NodeInfo) -> Any:
    """What a call gives on its operands' fake values."""
    tensor = next((t for one in node.all_input_nodes for t in tensors_of(info(one).value)), None)
    if tensor is None or next(tensors_of(record.value), None) is None:  # a factory, or a number read from a tensor
        return record.value
    return evaluate(node.target, node.args, node.kwargs)
