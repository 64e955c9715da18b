"""Expansion: the graph of a step on one device -> the graph of one rank along one mesh axis.

The graph is walked once, in order. Each call runs on parts in the way that moves the fewest bytes, given where its
operands are by then: `choose.choose` says which `Row`. An operand that is elsewhere is brought there, once for all who
want it there. What comes out is a step like any other, so that the next axis's expansion takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, Gradient, NodeInfo, StepGraph, dead_code, info, nbytes, set_info
from wholestep.spmd.expand.calls import Call, R
from wholestep.spmd.expand.choose_strategy import Choices, Held, replicated
from wholestep.spmd.expand.graph_edits import call, is_view, kept, part_of_whole
from wholestep.spmd.expand.local_calls import Writer
from wholestep.spmd.expand.redistribute import redistribute
from wholestep.spmd.expand.strategy import Build, Row
from wholestep.spmd.expand.uneven_shards import most
from wholestep.spmd.mesh import Line
from wholestep.spmd.placements import Placement, Shard, is_unequal, normal
from wholestep.spmd.plans.constraint_ops import in_memory, moved, place
from wholestep.spmd.plans.state_placements import Rest
from wholestep.spmd.rules import rows
from wholestep.spmd.rules.foreach import columns_of, is_on_lists
from wholestep.spmd.schedule.slice_propagation import raise_cuts
from wholestep.torch_compat import lazy_graph_module


def expand(step: StepGraph, *, line: Line, rest: Rest, pending: float = 1.0) -> StepGraph:
    """The step of one rank of a line, which holds parts of some inputs.

    Args:
        step: left as it is; `place` marks in it are obeyed.
        line: the ranks.
        rest: where inputs are, and what the step leaves behind. What it gives back is whole on every rank.
        pending: of the bytes that reducing addends takes, how many count where a call makes them. With 0 a product
            over split dimensions makes addends however large, and no operand is moved to avoid it.

    Raises:
        PlanError: a placement names a dimension that its tensor does not have.
    """
    return _Expansion(step, line, rest, pending).run()


class _Expansion:
    def __init__(self, step: StepGraph, line: Line, rest: Rest, pending: float) -> None:
        line = replace(line, uneven=step.signature.uneven)
        self.step, self.line, self.rest, self.pending = step, line, rest, pending
        self.graph = fx.Graph()
        self.held: dict[fx.Node, Any] = {}  # node of the step -> `Held`, a tree of them, or this rank's node
        self.lives: dict[tuple[int | None, torch.Size], Placement] = {}  # by autograd sequence number and shape
        self.choices = Choices(pending)
        self.cuts: dict[fx.Node, int] = {}  # pieces that are taken of whole values, and of which dimension
        self.gone: dict[fx.Node, fx.Node | None] = {}
        self.write = Writer(self.graph, line, self._node_of)

    def run(self) -> StepGraph:
        old = self.step.signature
        rest = iter(self.rest.inputs)
        for node in self.step.graph.nodes:
            if node.op == "placeholder":
                self._input(node, next(rest))
            elif node.op == "get_attr":
                self._keep(node, self.write.copy(node), [R])
            elif node.op == "call_function":
                self._call(node)
        self.graph.output(tuple(self._outputs()))
        self.gone = raise_cuts(self.graph, self.cuts, self.line)
        gm = lazy_graph_module(self.step.gm, self.graph)
        uneven = old.uneven or self._is_uneven()
        signature = replace(old, mutations=dict(old.mutations), gradients=list(self._gradients()), uneven=uneven)
        return dead_code(StepGraph(gm, signature, "expand"))

    # Inputs and outputs

    def _input(self, node: fx.Node, placement: Placement) -> None:
        local = self.write.copy(node)
        if isinstance(placement, Shard):
            set_info(local, part_of_whole(info(node), placement, self.line))
        self._keep(node, local, [placement])

    def _outputs(self) -> Iterator[Any]:
        for index, value in enumerate(self.step.outputs):
            held = self.held[value] if isinstance(value, fx.Node) else value
            if not isinstance(held, Held):
                yield held
                continue
            wanted = self.rest.outputs.get(index, R)
            record = replace(info(_unmarked(value)), phase="optimizer")  # a mark's own placement is the wanted one
            local = self._at(held, wanted, record)
            yield kept(local, record, wanted, self.line) if index in self.step.signature.homes else local

    def _gradients(self) -> Iterator[Gradient]:
        """The gradients of the step, where they are when it ends, for plans along other axes."""
        sources = {item.source: p for item, p in zip(self.step.signature.inputs, self.rest.inputs, strict=True)}
        nodes = {node.name: node for node in self.step.graph.nodes}
        for gradient in self.step.signature.gradients:
            memory, before = nodes[gradient.after], nodes.get(gradient.before or "")
            wanted = in_memory(sources.get(gradient.parameter, R), info(memory).value, gradient.place)
            after = self._version(memory, wanted)
            if after is None:
                continue
            old = self._version(before, wanted) if before is not None else None
            name = None if old is None else old.name
            place_of = moved(gradient.place, info(memory).value, info(after).value)
            yield replace(gradient, before=name, after=after.name, place=place_of)

    def _version(self, node: fx.Node, wanted: Placement | None) -> fx.Node | None:
        """This rank's node for a value in a placement, where there is one; of its mark, if it has one."""
        marks = [user for user in node.users if user.target is place]
        held = self.held.get(marks[0] if marks else node)
        found = held.versions.get(wanted) if isinstance(held, Held) and wanted is not None else None
        return self.gone.get(found, found) if found is not None else None

    def _is_uneven(self) -> bool:
        """True when a dimension was split into pieces of several sizes."""
        leaves = [leaf for tree in self.held.values() for leaf in _leaves(tree) if isinstance(leaf, Held)]
        split = [(held.value, placement) for held in leaves for placement in held.versions]
        return any(is_unequal(placement, value.shape, self.line) for value, placement in split)

    # Calls

    def _call(self, node: fx.Node) -> None:
        record = info(node)
        source = self.held.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if node.target is GETITEM and isinstance(source, (list, tuple)):
            self.held[node] = source[node.args[1]]  # type: ignore[index]
        elif node.target is place:
            assert isinstance(source, Held)
            wanted = normal(record.placement, record.value.shape)
            # a mark is brought there anew, and let go of alone
            fresh = Held(source.value, source.first, source.node, source.most)
            local = self._at(fresh, wanted, record)
            unequal = self.line.uneven or is_unequal(wanted, record.value.shape, self.line)  # ranks do alike
            if most(node).is_contiguous() and (unequal or not info(local).value.is_contiguous()):
                # a gradient has its own memory
                layout = {"memory_format": torch.contiguous_format}
                local = call(self.graph, torch.ops.aten.clone.default, local, phase=record.phase, keywords=layout)
            self.held[node] = Held(record.value, wanted, local, source.most)
        elif is_on_lists(node.target):
            self._run_on_lists(node)
        else:
            self._run(node)

    def _run(self, node: fx.Node) -> None:
        """Runs one call in the way that is best now."""
        call = Call.of(node, self.line)
        row = self._choose(call, info(node))
        local = self._operands(call, row, info(node))
        if row.emit is None:
            self._keep(node, self.write.call(node, row, local), list(row.outs))
            if is_view(node) and len(call.operands) == 1:
                self._look_again(node, call)
        else:
            self.held[node] = self._built(call, row, local, info(node))

    def _look_again(self, node: fx.Node, call: Call) -> None:
        """A view of what is at hand in several placements is at hand in several, too; what nobody reads is dropped."""
        source, made = self.held[call.operands[0]], self.held[node]
        if not isinstance(made, Held) or len(source.versions) == 1:
            return
        for other in (replicated(call), *rows(call)):
            have = source.versions.get(other.ins[0])
            if have is not None and other.emit is None and other.outs[0] not in made.versions:
                made.versions[other.outs[0]] = self.write.call(node, other, [have])

    def _run_on_lists(self, node: fx.Node) -> None:
        """Each column goes its own way; those that take other calls leave the lists."""
        record = info(node)
        columns = list(columns_of(Call.of(node, self.line)))
        chosen = [self._choose(column.call, record) for column in columns]
        locals_ = [self._operands(c.call, row, record) for c, row in zip(columns, chosen, strict=True)]
        together = [i for i, row in enumerate(chosen) if row.emit is None]
        made = self.write.lists(node, together, [columns[i].call for i in together], [locals_[i] for i in together])
        found: list[Any] = []
        for index, (column, row) in enumerate(zip(columns, chosen, strict=True)):
            if row.emit is None:
                nodes = made[together.index(index)]
                found.append(_held(column.call, row, nodes))
            else:
                found.append(_leaves(self._built(column.call, row, locals_[index], record)))
        self.held[node] = _by_list(record.value, found)

    def _choose(self, call: Call, record: NodeInfo) -> Row:
        if not call.operands or not call.results:
            return replicated(call)
        held = [self.held[operand] for operand in call.operands]
        wish = None
        if record.phase == "backward" and all(one.versions.keys() == {R} for one in held):
            wish = self.lives.get((record.seq, call.most.results[0].shape))  # a gradient is where its value is
        row = self.choices.best(call, held, wish)
        # what one tensor is reduced to gives back a gradient that nothing but the tensor itself tells where to be
        alone = len(call.values) == 1 and not getattr(call.target, "is_view", False)
        if alone and record.phase == "forward" and record.seq is not None and isinstance(row.ins[0], Shard):
            self.lives.setdefault((record.seq, call.most.values[0].shape), row.ins[0])
        return row

    def _operands(self, call: Call, row: Row, record: NodeInfo) -> list[fx.Node]:
        return [self._at(self.held[o], p, record) for o, p in zip(call.operands, row.ins, strict=True)]

    def _built(self, call: Call, row: Row, local: Sequence[fx.Node], record: NodeInfo) -> Any:
        assert row.emit is not None
        nodes = row.emit(Build(self.graph, record, self.line, self._node_of), call, local)
        leaves = iter(_held(call, row, nodes))
        return _tree(call.result, lambda value: next(leaves))

    # Values

    def _at(self, held: Held, wanted: Placement, record: NodeInfo) -> fx.Node:
        """This rank's node for a value in a placement; made where it is not at hand."""
        if wanted not in held.versions:
            start = held.nearest(wanted, self.line.size)[1]
            found = redistribute(
                self.graph, held.versions[start], held.value.shape, [start], [wanted], [self.line],
                phase=record.phase, seq=record.seq, where=record.where, module=record.module,
            )  # fmt: skip
            if start == R and isinstance(wanted, Shard) and found is not held.versions[start]:
                self.cuts[found] = wanted.dim
            held.versions[wanted] = found
        return held.versions[wanted]

    def _keep(self, node: fx.Node, local: fx.Node, placements: Sequence[Placement]) -> None:
        """Remembers what a call of this rank stands for."""
        self.held[node] = self._split(info(node).value, most(node), local, iter(placements))

    def _split(self, value: Any, largest: Any, local: fx.Node, placements: Iterator[Placement]) -> Any:
        if isinstance(value, torch.Tensor):
            return Held(value, next(placements), local, nbytes(largest))
        if not isinstance(value, (list, tuple)):
            return local
        both = zip(value, largest, strict=True)
        return [self._split(*each, self.write.pick(local, i), placements) for i, each in enumerate(both)]

    def _node_of(self, node: fx.Node) -> fx.Node:
        """This rank's node for a number."""
        found = self.held[node]
        assert isinstance(found, fx.Node), f"{node} gives tensors"
        return found


def _unmarked(node: fx.Node) -> fx.Node:
    """What a mark stands for: its record says which part the axes before hold."""
    while node.target is place:
        node = node.all_input_nodes[0]
    return node


def _held(call: Call, row: Row, nodes: Sequence[fx.Node]) -> list[Held]:
    """What a call gives, each with this rank's node of it."""
    sizes = map(nbytes, call.most.results)
    return [Held(*each) for each in zip(call.results, row.outs, nodes, sizes, strict=True)]


def _tree(result: Any, leaf: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(result, torch.Tensor):
        return leaf(result)
    return [_tree(one, leaf) for one in result] if isinstance(result, (list, tuple)) else result


def _leaves(tree: Any) -> list[Held]:
    return [leaf for one in tree for leaf in _leaves(one)] if isinstance(tree, list) else [tree]


def _by_list(result: Any, columns: Sequence[Sequence[Held]]) -> list[Any]:
    """Columns of results as the operator gives them: one list, or several."""
    if result and isinstance(result[0], (list, tuple)):
        filled = iter(range(len(result)))
        rows = {i: k for k, i in enumerate(i for i in filled if result[i])}
        return [[column[rows[i]] for column in columns] if i in rows else [] for i in range(len(result))]
    return [column[0] for column in columns]
