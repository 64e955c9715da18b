"""Graph edits: adds calls with their records, and reroutes the users of a value to another one.

Sharding constraints are calls in a whole step's graph that say how a value shall be placed for its readers: plans write
them; the expansion brings the value there by the collective that this takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep.fake_evaluate import evaluate
from wholestep.ir import GETITEM, Gradient, NodeInfo, Phase, StepGraph, add_call, copy_graph, info, set_info
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Partial, Placement, Replicate, Shard, cut
from wholestep.tensor_parts import Part
from wholestep.torch_compat import OpOverload, below_autograd, lazy_graph_module

aten = torch.ops.aten

Choice = Callable[[fx.Node], bool]

# What one rank makes of a value where another one copies it, or takes it as it is.
COPIES = (aten.clone.default, aten.constant_pad_nd.default, aten.full_like.default, aten.new_zeros.default)


def locate_gradients(step: StepGraph) -> None:
    """Finds the dimensions of gradients in the memories in which they lie, once, by sizes that all ranks see alike."""
    memories = {node.name: info(node).value for node in step.graph.nodes if node.op != "output"}
    for index, gradient in enumerate(step.signature.gradients):
        memory, (size, stride, offset) = memories.get(gradient.after), gradient.place
        if memory is not None and not gradient.dims:
            fills = memory.layout is torch.strided and offset == 0 and memory.numel() == math.prod(size)
            there = [*zip(memory.shape, memory.stride(), strict=True)] if fills else []
            dims = [there.index(one) if one in there else None for one in zip(size, stride, strict=True)]
            step.signature.gradients[index] = replace(gradient, dims=tuple(dims))


def copy_step(step: StepGraph, stage: str) -> StepGraph:
    """A copy that may be rewritten: a graph and a signature of its own."""
    graph, copies = copy_graph(step.graph.nodes)
    names = {old.name: new.name for old, new in copies.items()}
    old = step.signature
    signature = replace(
        old, same_order=True, mutations=dict(old.mutations), state_outputs=dict(old.state_outputs),
        gradients=[replace(g, before=g.before and names.get(g.before, ""), after=names[g.after])
                   for g in old.gradients if g.after in names],
    )  # fmt: skip
    copied = StepGraph(lazy_graph_module(step.gm, graph), signature, stage)
    locate_gradients(copied)
    return copied


@dataclass
class Writer:
    """Adds calls to a graph.

    Attributes:
        graph: new calls go to its insertion point.
        record: for the calls, but for their values.
    """

    graph: fx.Graph
    record: NodeInfo

    def call(self, target: Any, *args: Any, names: tuple[str, ...] = (), **keywords: Any) -> fx.Node:
        """Adds a call; its value comes from running it on its arguments' fake values.

        Args:
            names: of what a collective sends, for its record.
        """
        node, value = add_call(self.graph, target, args, keywords), evaluate(None, target, args, keywords)
        return set_info(node, replace(self.record, value=value, placement=names or None))

    def clone(self, node: fx.Node) -> fx.Node:
        """A copy whose elements are in the order in which they are read."""
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def pick(self, node: fx.Node, index: int) -> fx.Node:
        """One item of a call's results."""
        picked = add_call(self.graph, GETITEM, (node, index))
        return set_info(picked, replace(info(node), value=info(node).value[index]))


def is_view(node: fx.Node) -> bool:
    """True for a call whose result is another way into its first argument's memory."""
    if node.target is GETITEM:
        return is_view(node.all_input_nodes[0])
    return isinstance(node.target, OpOverload) and bool(node.target.is_view)


def views_of(node: fx.Node) -> list[fx.Node]:
    """A value and its views."""
    found = [node]
    for one in found:
        found += filter(is_view, one.users)
    return found


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value: its users, and those of its views."""
    return (user for one in views_of(node) for user in one.users if not is_view(user))


def reroute(old: fx.Node, new: fx.Node, chosen: Choice, phase: Phase) -> None:
    """Makes the chosen readers of one value read another one; views between them are made anew."""
    pairs = [(old, new)]
    for old, new in pairs:
        for user in list(old.users):
            if user is new:
                continue
            if not is_view(user):
                if chosen(user):
                    user.replace_input_with(old, new)
            elif any(chosen(reader) for reader in readers(user)):
                with old.graph.inserting_after(new):
                    twin = old.graph.node_copy(user, lambda n, old=old, new=new: new if n is old else n)  # type: ignore[misc]
                seq = info(user).seq if info(user).phase == phase else None  # a twin elsewhere is nobody's backward
                set_info(twin, replace(info(user), phase=phase, seq=seq))
                pairs.append((user, twin))


def part_of_whole(record: NodeInfo, placement: Shard, group: AxisGroup) -> NodeInfo:
    """The record of what one rank holds of a value; what other axes have cut before stays cut."""
    whole, mine = record.value, cut(record.value.shape, [placement], [group])
    outer = record.placement if isinstance(record.placement, Part) else Part.whole(whole.shape)
    spans = [(start + first, start + last) for (start, _), (first, last) in zip(outer.spans, mine.spans, strict=True)]
    return replace(record, value=_cut(whole, mine), placement=Part.of(outer.shape, spans))


def _cut(value: torch.Tensor, part: Part) -> torch.Tensor:
    """A fake of a part of a fake, in the same order of dimensions, with the same gaps."""
    strides = list(value.stride())
    if value.is_contiguous():
        strides = [math.prod(part.size[dim + 1 :]) for dim in range(value.dim())]
    else:
        for dim, (own, whole) in enumerate(zip(part.size, part.shape, strict=True)):
            for other, stride in enumerate(value.stride()):
                if own != whole and 0 < value.stride(dim) < stride:
                    strides[other] = strides[other] * own // whole
    with value.fake_mode, torch.no_grad(), below_autograd():  # type: ignore[attr-defined]
        return torch.empty_strided(part.size, strides, dtype=value.dtype, device=value.device)


def kept(node: fx.Node, whole: NodeInfo, placement: Placement, group: AxisGroup, beside_part: bool) -> fx.Node:
    """What a step makes and leaves behind for later ones: this rank's part, in memory of its own, with its mark.

    Args:
        node: gives what this rank holds, the graph's insertion point being after it.
        whole: the record of the whole value.
        beside_part: whether it is state of a parameter that is split, and says also that it is whole.
    """
    if beside_part and placement == Replicate() and whole.value.dim():
        whole = replace(whole, placement=whole.placement or Part.whole(whole.value.shape))
    if not isinstance(placement, Shard) and not isinstance(whole.placement, Part):
        return node
    if node.op == "placeholder" or is_view(node):
        node = Writer(node.graph, NodeInfo(None, "optimizer")).clone(node)
    part = part_of_whole(whole, placement, group).placement if isinstance(placement, Shard) else whole.placement
    return set_info(node, replace(info(node), placement=part))


@dataclass(frozen=True)
class Constraint:
    """What the record of a constraint's node says.

    Attributes:
        to: the placement for the readers.
        addends: in the local view: what the ranks' own values are to one another; they are reduced.
        names: of the parameters whose gradients are reduced, for buckets and reports.
    """

    to: Placement
    addends: Partial | None = None
    names: tuple[str, ...] = ()


def sharding_constraint(value: Any) -> Any:
    """Its argument: the record of the node that calls it has the `Constraint`."""
    return value


def constrain(node: fx.Node, constraint: Constraint, phase: Phase, chosen: Choice) -> fx.Node | None:
    """Has the chosen readers of a value, and of its views, read it as constrained; None when there are none.

    Args:
        phase: for the records of the constraint and of views that are made anew.
    """
    if not node.users:
        return None
    # a placeholder's constraint comes after all placeholders; nodes compare by their place in the graph
    following = node.next if node.op == "call_function" else min(node.users)
    with node.graph.inserting_before(following):
        made = node.graph.call_function(sharding_constraint, (node,))
    set_info(made, replace(info(node), phase=phase, placement=constraint))
    reroute(node, made, lambda reader: reader is not made and chosen(reader), phase)
    if made.users:
        return made
    node.graph.erase_node(made)
    return None


def in_memory(placement: Placement, gradient: Gradient) -> Placement | None:
    """A gradient's placement for the memory in which it lies, perhaps with its dimensions in another order."""
    if not isinstance(placement, Shard):
        return placement
    dim = gradient.dims[placement.dim]
    return None if dim is None else Shard(dim)
