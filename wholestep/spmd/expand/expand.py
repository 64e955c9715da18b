"""Expansion: the graph of a step on one device -> the graph of one rank along one mesh axis.

The graph is walked once, in order (`call_expansion.py`). What comes out is a step like any other, so that the next
axis's expansion takes it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from wholestep.ir import Gradient, Input, StepGraph, copy_node, dead_code, info, set_info
from wholestep.spmd.expand.call_expansion import CallExpansion
from wholestep.spmd.expand.calls import R
from wholestep.spmd.expand.choose_strategy import ShardedValue
from wholestep.spmd.expand.graph_edits import in_memory, kept, locate_gradients, part_of_whole, sharding_constraint
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Shard, is_unequal
from wholestep.spmd.plans.global_view import StatePlacements, owner_of
from wholestep.torch_compat import lazy_graph_module


def expand(
    step: StepGraph, *, group: AxisGroup, placements: StatePlacements, pending: float = 1.0, local: bool = False
) -> StepGraph:
    """The step of one rank of an axis, which holds parts of some inputs.

    Args:
        step: left as it is; sharding constraints in it are obeyed.
        group: the ranks of the axis.
        placements: of inputs, and of what the step leaves behind. What it gives back is whole on every rank.
        pending: of the bytes that reducing addends takes, how many count where a call makes them. With 0 a product
            over split dimensions makes addends however large, and no operand is moved to avoid it.
        local: whether the step is in the local view: what is not split is each rank's own, and calls on nothing else
            run as written.

    Raises:
        PlanError: a placement names a dimension that its tensor does not have.
    """
    locate_gradients(step)
    return _StepExpansion(step, group, placements, pending, local).run()


class _StepExpansion(CallExpansion):
    """Expands a whole step."""

    def __init__(
        self, step: StepGraph, group: AxisGroup, placements: StatePlacements, pending: float, local: bool
    ) -> None:
        super().__init__(fx.Graph(), group, pending, local)
        self.step, self.placements, self.left = step, placements, dict(step.signature.state_outputs)
        inputs = list(zip(step.placeholders, (item.source for item in step.signature.inputs), strict=True))
        self.updated = {step.outputs[index]: inputs[into] for index, into in step.signature.mutations.items()}

    def run(self) -> StepGraph:
        old = self.step.signature
        placements = iter(self.placements.inputs)
        for node in self.step.graph.nodes:
            if node.op == "placeholder":
                self._input(node, next(placements))
            elif node.op == "get_attr":
                self.keep(node, self._copy(node), [R])
            elif node.op == "call_function":
                self.call(node)
        self.graph.output(tuple(self._outputs()))
        gm = lazy_graph_module(self.step.gm, self.graph)
        signature = replace(old, mutations=dict(old.mutations), gradients=list(self._gradients()),
                            inputs=[_for_next_axis(item) for item in old.inputs], state_outputs=self.left)  # fmt: skip
        return dead_code(StepGraph(gm, signature, "expand"))

    # Inputs and outputs

    def _copy(self, node: fx.Node) -> fx.Node:
        return set_info(copy_node(self.graph, node, self._node_of), replace(info(node)))

    def _input(self, node: fx.Node, placement: Placement) -> None:
        local = self._copy(node)
        if placement == R:
            self.light.add(node)
        if isinstance(placement, Shard):
            set_info(local, part_of_whole(info(node), placement, self.group))
        self.keep(node, local, [placement])

    def _outputs(self) -> Iterator[Any]:
        pairs = zip(self.step.signature.inputs, self.placements.inputs, strict=True)
        split = {item.source for item, placement in pairs if placement != R}
        for index, value in enumerate(self.step.outputs):
            sharded = self.sharded[value] if isinstance(value, fx.Node) else value
            if not isinstance(sharded, ShardedValue):
                yield sharded
                continue
            wanted = self.placements.outputs.get(index, R)
            if wanted is None:
                wanted = self._as_it_is(sharded)
                item = self.left[index]
                self.left[index] = replace(item, placements=(*(item.placements or ()), wanted))
            record = replace(info(_unconstrained(value)), phase="optimizer")  # a constraint's own
            local = self.at(sharded, wanted, record)
            left = self.step.signature.state_outputs.get(index)
            yield local if left is None else kept(local, record, wanted, self.group, owner_of(left) in split)

    def _as_it_is(self, sharded: ShardedValue) -> Placement:
        """The placement in which a value can be left; whole on every rank where that is none."""
        shape, split = sharded.value.shape, [one for one in sharded.versions if isinstance(one, Shard)]
        return next((one for one in split if not is_unequal(one, shape, self.group)), R)

    def _gradients(self) -> Iterator[Gradient]:
        """The gradients of the step, where they are when it ends, for plans along other axes."""
        sources = {item.source: p for item, p in zip(self.step.signature.inputs, self.placements.inputs, strict=True)}
        nodes = {node.name: node for node in self.step.graph.nodes}
        for gradient in self.step.signature.gradients:
            memory, before = nodes[gradient.after], nodes.get(gradient.before or "")
            wanted = in_memory(sources.get(gradient.parameter, R), gradient)
            wanted = next((info(c).placement.to for c in _constraints(memory) if info(c).placement.addends), wanted)
            after = self._version(memory, wanted)
            if after is None:
                continue
            old = self._version(before, wanted) if before is not None else None
            name = None if old is None else old.name
            yield replace(gradient, before=name, after=after.name)

    def _version(self, node: fx.Node, wanted: Placement | None) -> fx.Node | None:
        """This rank's node for a value in a placement, where there is one; as constrained, if it is."""
        sharded = self.sharded.get(next(iter(_constraints(node)), node))
        return sharded.versions.get(wanted) if isinstance(sharded, ShardedValue) and wanted is not None else None


def _for_next_axis(item: Input) -> Input:
    return item if item.placements is None else replace(item, placements=item.placements[1:])


def _unconstrained(node: fx.Node) -> fx.Node:
    """What a constraint is of: its record says which part the axes before hold."""
    while node.target is sharding_constraint:
        node = node.all_input_nodes[0]
    return node


def _constraints(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is sharding_constraint]
