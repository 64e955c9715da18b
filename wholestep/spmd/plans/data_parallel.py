"""Data parallelism in the local view: gradients are reduced before anybody but their backward reads them.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), and, where
optimizer states are sharded, Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), stage 1. Each rank runs the step as written; a gradient is its local value inside of `backward()`, and for all
later readers a sharding constraint: `Partial -> Replicate`, or `Partial -> Shard(0)` for an update that is sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from wholestep.errors import PlanError
from wholestep.ir import Gradient, Input, NodeInfo, StepGraph, ancestors, info, is_communication, is_dense, nbytes
from wholestep.spmd.expand.calls import R
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.expand.graph_edits import (
    Constraint,
    Writer,
    constrain,
    copy_step,
    in_memory,
    is_view,
    readers,
    reroute,
    sharding_constraint,
)
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Partial, Placement, Shard, fills, splits
from wholestep.spmd.plans.divided_parameters import DividedParameters, divided_by
from wholestep.spmd.plans.elementwise_updates import ElementwiseUpdates
from wholestep.spmd.plans.global_view import owner_of, state_placements

aten = torch.ops.aten


def data_parallel(
    step: StepGraph, *, group: AxisGroup, reduce: str, min_bytes: int | None = None, own: bool = False
) -> StepGraph:  # fmt: skip
    """The step of one rank of an axis, with the reductions of its gradients.

    Args:
        step: left as it is.
        group: the ranks of the axis.
        reduce: "mean" or "sum".
        min_bytes: of the parameters whose updates and optimizer states are sharded by rows, where they are elementwise;
            None: no parameter's.
        own: reduces the gradients of which the step itself wants the mean over this group, and no others; parameters
            that a wrapper divides over it are gathered in each forward and backward, and so reduced.

    Raises:
        PlanError: a gradient that cannot be reduced, or a parameter that changes by one that never is.
        UnsupportedError: what divided parameters are for, and is not served; see `divided_parameters.py`.
    """
    step = copy_step(step, "data_parallel")
    if group.size == 1:
        return step
    divided = divided_by(step, group) if own else None
    sharded = _Reductions(step, group, reduce, divided).constrain(min_bytes, own)
    if divided is not None:
        return expand(divided.gathered(), group=group, placements=divided.placements, local=True)

    def placement_of(item: Input, value: torch.Tensor) -> Placement:
        shape = sharded.get(owner_of(item)) if item.kind == "state" else None
        return Shard(0) if shape is not None and value.shape == shape else R

    return expand(step, group=group, placements=state_placements(step, placement_of, group), local=True)


def backward_passes(step: StepGraph) -> dict[fx.Node, int]:
    """Numbers the backward passes of a step, stretches of nodes of phase "backward"; other nodes are in none."""
    stretches = itertools.groupby(step.graph.nodes, lambda n: n.op == "call_function" and info(n).phase == "backward")
    return {node: number for number, (inside, nodes) in enumerate(stretches) if inside for node in nodes}


class _Reductions:
    """Adds the constraints to one step, in place."""

    def __init__(self, step: StepGraph, group: AxisGroup, reduce: str, divided: DividedParameters | None) -> None:
        self.step, self.group, self.divided = step, group, divided
        self.addends = Partial("avg" if reduce == "mean" else "sum")
        self.passes = backward_passes(step)
        self.nodes = {node.name: node for node in step.graph.nodes}
        self.gradients = step.signature.gradients

    def constrain(self, min_bytes: int | None, own: bool) -> dict[str, torch.Size]:
        """Gives the shapes of the parameters whose updates are sharded, by their sources."""
        if own:
            wanted = [gradient for gradient in self.gradients if gradient.group == self.group.name]
            for node, gradients in self._by_memory(wanted).items():
                self._reduce(node, gradients, self.divided.place(gradients) if self.divided else R)
            return {}
        pending = self._pending()
        late = [gradient for gradients in pending.values() for gradient in gradients]
        if self.addends.op == "sum":
            for gradient in self.gradients:
                self._count_once(gradient, late)
        updates = ElementwiseUpdates(self.step)
        parameters = {item.source: node for node, item in zip(self.step.placeholders, self.step.signature.inputs,
                                                              strict=True) if item.kind == "parameter"}  # fmt: skip
        trained = {gradient.parameter for gradient in late}  # an average of weights is no such
        found = {source: node for source, node in parameters.items()
                 if source in trained and min_bytes is not None and self._is_worth_it(node, min_bytes)}  # fmt: skip
        to = {node: self._to(node, gradients, found, updates) for node, gradients in pending.items()}
        by_rows = {gradient.parameter for node in to if to[node] != R for gradient in pending[node]}
        sharded = {s: info(p).value.shape for s, p in found.items() if s in by_rows or updates.of_states(s, p)}
        for node, gradients in pending.items():
            self._reduce(node, gradients, to[node])
        last = {gradient.parameter: gradient for gradient in self.gradients}
        self.step.signature.unreduced = tuple(p for p, gradient in last.items() if gradient not in late)
        if not self.step.signature.of_part:  # whose plans along other axes leave the same gradients
            self.step.signature.gradients = late
        _check_updates(self.step)
        return sharded

    def _is_worth_it(self, parameter: fx.Node, min_bytes: int) -> bool:
        value = info(parameter).value
        everybody = value.dim() > 0 and all(of(Shard(0), value.shape, self.group) for of in (fills, splits))
        return value.is_contiguous() and nbytes(value) >= min_bytes and everybody

    def _to(
        self, node: fx.Node, gradients: Sequence[Gradient], found: dict[str, fx.Node], updates: ElementwiseUpdates
    ) -> Placement:
        """By rows, when an elementwise update alone reads a gradient that fills its memory as the parameter does."""
        source, parameter = gradients[0].parameter, found.get(gradients[0].parameter)
        if parameter is None or len({g.parameter for g in gradients}) > 1:
            return R
        value, wanted = info(node).value, in_memory(Shard(0), gradients[0])
        if not isinstance(wanted, Shard) or not value.is_contiguous() or any(n > 1 for n in value.shape[: wanted.dim]):
            return R
        later = [user for user in node.users if not self._inside(node, user)]
        return wanted if updates.of(source, parameter, {node: later}) else R

    def _inside(self, node: fx.Node, reader: fx.Node) -> bool:
        """True when the backward that made a gradient reads it."""
        mine, other = self.passes.get(node), self.passes.get(reader)
        return other is not None and mine in (other, None)

    # Which gradients

    def _pending(self) -> dict[fx.Node, list[Gradient]]:
        """The gradients that somebody reads other than a later backward which adds to them, by their memory."""
        return {node: gradients for node, gradients in self._by_memory(self.gradients).items()
                if self._is_read_outside(node)}  # fmt: skip

    def _by_memory(self, several: Sequence[Gradient]) -> dict[fx.Node, list[Gradient]]:
        by_node: dict[fx.Node, list[Gradient]] = {}
        for gradient in several:
            by_node.setdefault(self.nodes[gradient.after], []).append(gradient)
        return by_node

    def _is_read_outside(self, node: fx.Node) -> bool:
        adds = {self.passes.get(self.nodes[g.after]) for g in self.gradients if g.before == node.name} - {None}
        others = [r for r in readers(node) if r.op != "output" or not self.step.signature.of_part]
        return any(not self._inside(node, r) and self.passes.get(r) not in adds for r in others)

    def _count_once(self, gradient: Gradient, reduced: Sequence[Gradient]) -> None:
        """Summing: a gradient from before the backward is the same on all ranks, so each adds its part of it."""
        before = self.nodes.get(gradient.before or "")
        if before is None:
            return
        makers = [g for g in self.gradients if g.after == gradient.before]
        if any(g not in reduced for g in makers) or (not makers and before in self.passes):
            return  # local: another backward of this step made it
        number = self._pass_that_adds(before, self.nodes[gradient.after])
        if number is None:  # done for another parameter whose gradient lies there
            return
        first = min(reader for reader in readers(before) if self.passes.get(reader) == number)
        with self.step.graph.inserting_before(first):
            write = Writer(self.step.graph, NodeInfo(None, "backward"))
            part = write.call(aten.mul.Tensor, before, 1 / self.group.size)
        reroute(before, part, lambda r: r is not part and self.passes.get(r) == number, "backward")

    def _pass_that_adds(self, before: fx.Node, after: fx.Node) -> int | None:
        """The backward that adds to a gradient; plans along other axes may have reduced the sum since."""
        adding = {reader for reader in readers(before) if reader in self.passes}
        first = min(adding, default=before)  # nodes compare by their place in the graph
        reached = adding & ancestors([after], until=lambda node: node < first)
        return self.passes[max(reached)] if reached else None

    # How

    def _reduce(self, node: fx.Node, gradients: Sequence[Gradient], to: Placement) -> None:
        """Everybody who reads a gradient after its backward reads the reduced one."""
        _check_memory(info(node).value, gradients)
        names = tuple(gradient.parameter for gradient in gradients)
        constrain(node, Constraint(to, self.addends, names), "backward", lambda r: not self._inside(node, r))


def refuse_sparse(step: StepGraph, plans: str) -> None:
    """Refuses gradients that no plan can reduce: the number of their values is in the data, and differs among ranks.

    Raises:
        PlanError: naming the parameter and the line.
    """
    nodes = {node.name: node for node in step.graph.nodes}
    for gradient in step.signature.gradients:
        node = nodes.get(gradient.after)
        if node is not None and info(node).value.layout != torch.strided:
            raise sparse_gradient(plans, gradient.parameter, info(node).where)


def sparse_gradient(plans: str, parameter: str, where: str) -> PlanError:
    """The error that says so."""
    return PlanError(
        f"{plans}: the gradient of {parameter} is sparse\n  at: {where}\n"
        "  to do: make it dense, by nn.Embedding(…, sparse=False)"
    )


def _check_memory(memory: torch.Tensor, gradients: Sequence[Gradient]) -> None:
    for gradient in gradients:
        if not is_dense(memory.shape, memory.stride()) or not is_dense(*gradient.place[:2]):
            raise PlanError(
                f"DataParallel: the gradient of {gradient.parameter} lies scattered in its memory, of shape "
                f"{list(gradient.place[0])} at strides {gradient.place[1]}: leave it to backward() to make it"
            )


def _check_updates(step: StepGraph) -> None:
    """Refuses a step that changes a parameter by values of a backward that are never reduced."""
    local: dict[fx.Node, str] = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or is_communication(node) or node.target is sharding_constraint:
            continue
        source = next((local[operand] for operand in node.all_input_nodes if operand in local), None)
        if source is None and info(node).phase == "backward" and not is_view(node):
            source = info(node).where
        if source is not None:
            local[node] = source
    for output, index in step.signature.mutations.items():
        changed = step.signature.inputs[index]
        if changed.kind == "parameter" and step.outputs[output] in local:
            where = local[step.outputs[output]]
            raise PlanError(
                f"DataParallel: {changed.source} changes by a gradient that is not reduced, so that it would differ "
                f"from rank to rank\n  at: {where}\n  to do: let backward() leave the gradient in .grad, and let the "
                "optimizer step after it; torch.autograd.grad and optimizers in hooks are not reduced"
            )
