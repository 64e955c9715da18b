"""Call expansion: each call of a step's graph, in order, becomes the calls of one rank.

A call runs on parts in the way that moves the fewest bytes, given where its operands are by then: `choose_strategy`
says which. An operand of another placement is redistributed, once for all who want it there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.comm.ops.functional_collectives import piece
from wholestep.errors import UnsupportedError
from wholestep.functional import OFFSETS, is_wait
from wholestep.ir import GETITEM, NodeInfo, info, is_dense
from wholestep.nested import map_leaves
from wholestep.spmd.expand.calls import Call, R, decomposition
from wholestep.spmd.expand.choose_strategy import (
    Choices,
    ShardedValue,
    is_cheap,
    is_factory,
    replicated,
    slice_strategy,
)
from wholestep.spmd.expand.graph_edits import Writer, sharding_constraint
from wholestep.spmd.expand.redistribute import redistribute
from wholestep.spmd.expand.strategy import Build, Decomposed, Strategy
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Shard, is_unequal, normal, splits
from wholestep.spmd.rules import reads_flat_memory
from wholestep.spmd.rules.pointwise import columns_of, is_on_lists, of_columns

aten = torch.ops.aten


def built(build: Build, call: Call, strategy: Strategy, local: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """The local results of a strategy that makes other calls than the same one."""
    assert strategy.emit is not None
    if not isinstance(strategy.emit, Decomposed):
        return strategy.emit(build, call, local)
    inner, found = CallExpansion(build.graph, build.group), decomposition(call, build.record, strategy.emit.function)
    for operand, placement, node in zip(found.operands, strategy.ins, local, strict=True):
        inner.keep(operand, node, [placement])
    for one in found.calls:
        inner.call(one)
    return [inner.at(inner.sharded[r], p, build.record) for r, p in zip(found.results, strategy.outs, strict=True)]


class CallExpansion:
    """Expands calls, one after the other, into a graph of one rank."""

    def __init__(self, graph: fx.Graph, group: AxisGroup, pending: float = 1.0, local: bool = False) -> None:
        self.graph, self.group, self.local = graph, group, local
        self.updated: dict[fx.Node, tuple[fx.Node, str]] = {}  # new value of an input -> the input, and its source
        self.sharded: dict[fx.Node, Any] = {}  # node of the step -> `ShardedValue`, a tree of them, or this rank's node
        # Of a forward's values, for their gradients: by autograd sequence number and shape.
        self.preferred_placements: dict[tuple[int | None, torch.Size], Placement] = {}
        self.choices = Choices(pending)
        self.light: set[fx.Node] = set()  # what cheap calls make of the step's inputs, and those

    # Calls

    def call(self, node: fx.Node) -> None:
        source = self.sharded.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if node.target is GETITEM and isinstance(source, (list, tuple)):
            self.sharded[node] = source[node.args[1]]  # type: ignore[index]
        elif node.target is sharding_constraint:
            self._constrain(node)
        elif is_on_lists(node.target):
            self._run_on_lists(node)
        else:
            self._run(node)
        if self.local and node in self.updated:
            self._share(node)

    def _constrain(self, node: fx.Node) -> None:
        """Brings a value where its constraint wants it: anew, so that it is let go of alone."""
        record, source = info(node), self.sharded[node.all_input_nodes[0]]
        constraint, value = record.placement, record.value
        wanted = normal(constraint.to, value.shape)
        wanted = wanted if splits(wanted, value.shape, self.group) else R
        fresh = ShardedValue(source.value, constraint.addends or source.first, source.node)
        local = self.at(fresh, wanted, record, constraint.names)
        unequal = is_unequal(wanted, value.shape, self.group)  # ranks do alike
        alone = value.is_contiguous() and (unequal or not info(local).value.is_contiguous())
        if alone and constraint.addends is None:  # a gradient has its own memory
            local = Writer(self.graph, NodeInfo(None, record.phase)).clone(local)
        self.sharded[node] = ShardedValue(value, wanted, local)

    def _share(self, node: fx.Node) -> None:
        """A parameter of which each rank has new rows gets the others' in its own memory."""
        sharded, (parameter, source) = self.sharded[node], self.updated[node]
        if not isinstance(sharded, ShardedValue) or sharded.first != Shard(0) or self.sharded[parameter].first != R:
            return
        start, stop = piece(sharded.value.shape[0], self.group.size, self.group.rank)
        write, ops = Writer(self.graph, NodeInfo(None, info(node).phase, where=info(node).where)), torch.ops
        made = write.call(ops.aten.slice_scatter.default, self.sharded[parameter].node, sharded.node, 0, start, stop)
        made = write.call(ops.wholestep.share_rows.default, made, self.group.name, names=(source,))
        made = write.call(ops.wholestep.wait.default, made)
        sharded.versions[R] = made

    def _run(self, node: fx.Node) -> None:
        """Runs one call in the way that is best now."""
        call = Call.of(node, self.group)
        strategy = self._choose(call, info(node))
        local = self._operands(call, strategy, info(node))
        if strategy.emit is None:
            self.keep(node, self._build(info(node)).local(call, strategy, local), strategy.outs)
        else:
            values = iter(_sharded_values(call, strategy, built(self._build(info(node)), call, strategy, local)))
            self.sharded[node] = _filled(call.result, values)
        if strategy.outs == (R,) and is_cheap(node) and (is_factory(node) or self.light.issuperset(call.operands)):
            self.light.add(node)
            self.sharded[node].source = node

    def _run_on_lists(self, node: fx.Node) -> None:
        """Each column goes its own way; those that take other calls leave the lists."""
        record, whole = info(node), Call.of(node, self.group)
        columns = list(columns_of(whole))
        chosen = [self._choose(column, record) for column in columns]
        locals_ = [self._operands(column, each, record) for column, each in zip(columns, chosen, strict=True)]
        together = [i for i, strategy in enumerate(chosen) if strategy.emit is None]
        made = iter(of_columns(self._build(record), whole, [columns[i] for i in together],
                               [locals_[i] for i in together]))  # fmt: skip
        found = []
        for each in zip(columns, chosen, locals_, strict=True):
            nodes = next(made) if each[1].emit is None else built(self._build(record), *each)
            found.append(_sharded_values(*each[:2], nodes))
        rows = itertools.chain.from_iterable(zip(*found, strict=True))  # as the operator gives them
        self.sharded[node] = _filled(record.value, rows)

    def _choose(self, call: Call, record: NodeInfo) -> Strategy:
        if not call.operands or not call.results:
            return replicated(call)
        sharded = [self.sharded[operand] for operand in call.operands]
        if is_wait(call.target):  # what is on its way is not there to be placed otherwise
            return Strategy((sharded[0].first,), (sharded[0].first,))
        if self.local and all(one.versions.keys() == {R} for one in sharded):
            return replicated(call)
        preferred = None
        if record.phase == "backward" and all(one.versions.keys() == {R} for one in sharded):
            preferred = self.preferred_placements.get((record.seq, call.results[0].shape))
        strategy = self.choices.best(call, sharded, preferred)
        # what one tensor is reduced to gives back a gradient that nothing but the tensor itself tells where to be
        alone = len(call.values) == 1 and not getattr(call.target, "is_view", False)
        if alone and record.phase == "forward" and record.seq is not None and isinstance(strategy.ins[0], Shard):
            self.preferred_placements.setdefault((record.seq, call.values[0].shape), strategy.ins[0])
        return strategy

    def _operands(self, call: Call, strategy: Strategy, record: NodeInfo) -> list[fx.Node]:
        """Where a strategy wants them, without gaps for kernels that read flat memory, as planned for `as_strided`.

        Columns of what is whole are copied then, on all ranks alike where pieces are unequal.
        """
        found = [self.at(self.sharded[o], p, record) for o, p in zip(call.operands, strategy.ins, strict=True)]
        if call.target in OFFSETS:
            found[0] = self._as_it_lay(found[0], call.values[0], record)
        if not reads_flat_memory(call.target):
            return found
        for index, (value, placement) in enumerate(zip(call.values, strategy.ins, strict=True)):
            local = info(found[index]).value
            gaps = isinstance(placement, Shard) and math.prod(value.shape[: placement.dim]) > 1
            if gaps and (is_unequal(placement, value.shape, self.group) or not is_dense(local.shape, local.stride())):
                found[index] = self._build(record).call(aten.clone.default, found[index])
        return found

    def _as_it_lay(self, local: fx.Node, value: torch.Tensor, record: NodeInfo) -> fx.Node:
        """A tensor in the order of memory that it has on one device: what collectives give is in that of reading.

        Raises:
            UnsupportedError: it has gaps there.
        """
        if info(local).value.stride() == value.stride():
            return local
        if not is_dense(value.shape, value.stride()):
            raise UnsupportedError(
                f"as_strided of a tensor {list(value.shape)} with strides {list(value.stride())}, of which each rank "
                "has a part", "take it of a contiguous() tensor, or use another view", where=record.where)  # fmt: skip
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        build = self._build(record)
        copy = build.clone(build.call(aten.permute.default, local, order))
        return build.call(aten.permute.default, copy, [order.index(dim) for dim in range(value.dim())])

    def _build(self, record: NodeInfo) -> Build:
        return Build(self.graph, record, self.group, self._node_of)

    # Values

    def at(self, sharded: ShardedValue, wanted: Placement, record: NodeInfo, names: tuple[str, ...] = ()) -> fx.Node:
        """This rank's node for a value in a placement; made where it is not at hand."""
        if wanted not in sharded.versions:
            start, found = sharded.nearest(wanted, self.group.size)[1], None
            if start == R and isinstance(wanted, Shard) and sharded.source is not None:
                found = self._slice(sharded.source, wanted, record)
            made = NodeInfo(None, record.phase, record.seq, record.where, record.module)
            sharded.versions[wanted] = found or redistribute(
                self.graph, sharded.versions[start], sharded.value.shape, start, wanted, self.group, made, names
            )
        return sharded.versions[wanted]

    def _slice(self, node: fx.Node, wanted: Shard, reader: NodeInfo) -> fx.Node | None:
        """This rank's slice of a light value, computed as such; None where no rule says how."""
        call = Call.of(node, self.group)
        strategy = slice_strategy(node, call, wanted)
        if strategy is None:
            return None
        local = [self.sharded[o].node if is_factory(node) else self.at(self.sharded[o], p, reader)
                 for o, p in zip(call.operands, strategy.ins, strict=True)]  # fmt: skip
        build = self._build(replace(info(node), phase=reader.phase))
        return build.local(call, strategy, local) if strategy.emit is None else built(build, call, strategy, local)[0]

    def keep(self, node: fx.Node, local: fx.Node, placements: Sequence[Placement]) -> None:
        """Remembers what a call of this rank stands for."""
        self.sharded[node] = self._split(info(node).value, local, iter(placements))

    def _split(self, value: Any, local: fx.Node, placements: Iterator[Placement]) -> Any:
        if isinstance(value, torch.Tensor):
            return ShardedValue(value, next(placements), local)
        if not isinstance(value, (list, tuple)):
            return local
        return [self._split(one, self._build(info(local)).pick(local, i), placements) for i, one in enumerate(value)]

    def _node_of(self, node: fx.Node) -> fx.Node:
        """This rank's node for a number."""
        found = self.sharded[node]
        assert isinstance(found, fx.Node), f"{node} gives tensors"
        return found


def _sharded_values(call: Call, strategy: Strategy, nodes: Sequence[fx.Node]) -> list[ShardedValue]:
    """What a call gives, each with this rank's node of it."""
    return [ShardedValue(*each) for each in zip(call.results, strategy.outs, nodes, strict=True)]


def _filled(result: Any, values: Iterator[ShardedValue]) -> Any:
    """What a call gives, with the next of some values for each tensor."""
    return map_leaves(lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf, result)
