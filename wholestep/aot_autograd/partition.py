"""The joint graph (forward and backward of a function as one), and its partition into a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep.errors import GraphError
from wholestep.functional import clone_as_it_lies, is_view
from wholestep.ir import (
    GETITEM,
    Input,
    Signature,
    StepGraph,
    ancestors,
    check,
    copy_graph,
    info,
    is_effectful,
    is_host,
    set_info,
)
from wholestep.torch_compat import lazy_graph_module
from wholestep.trace.functionalize.aliases import Geometry


@dataclass
class Joint:
    """Forward and backward of a function as one graph.

    Attributes:
        step: the placeholders are primals (tensors and host numbers), then one tangent for each differentiable output.
            The outputs are those of the forward (results, new values of mutated inputs), then the gradients of those
            primals that have one. A node's phase is "forward" or "backward"; all forward nodes come first. The
            signature's mutations are the forward's.
        n_primals: how many placeholders are primals.
        n_forward: how many outputs belong to the forward.
        rewritten: indices of primals that are overwritten when the forward has run, besides those that the
            signature names: their new values, with a history, are among the outputs.
        gradient_of: for each gradient, the index of its primal.
    """

    step: StepGraph
    n_primals: int
    n_forward: int
    rewritten: tuple[int, ...] = ()
    gradient_of: tuple[int, ...] = ()

    @property
    def primals(self) -> list[fx.Node]:
        return self.step.placeholders[: self.n_primals]

    @property
    def tangents(self) -> list[fx.Node]:
        return self.step.placeholders[self.n_primals :]

    @property
    def forward_outputs(self) -> list[fx.Node]:
        return self.step.outputs[: self.n_forward]

    @property
    def gradients(self) -> list[fx.Node]:
        return [node for node in self.step.outputs[self.n_forward :] if node is not None]

    @property
    def overwritten(self) -> set[fx.Node]:
        """The primals whose old value is gone when the forward has run."""
        return {self.primals[i] for i in (*self.step.signature.mutations.values(), *self.rewritten)}


@dataclass
class Partitioned:
    """The two halves of a joint graph.

    Attributes:
        forward: primals -> the forward's outputs, then those saved values that are neither a primal nor one of the
            forward's outputs, in the order of `saved`.
        backward: all saved values in the order of `saved`, then the tangents that it reads -> the gradients.
        saved: names of the saved nodes, tensors and host numbers. A primal that the forward overwrites is never saved
            under its own name: the backward needs its old value, so a clone of it is.
        tangents: positions of the tangents that the backward reads.
    """

    forward: StepGraph
    backward: StepGraph
    saved: list[str]
    tangents: list[int]

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where each saved value is found once the forward has run: ("input" | "output", index)."""
        there = {node.name: ("output", i) for i, node in reversed([*enumerate(self.forward.outputs)])}
        there |= {node.name: ("input", i) for i, node in enumerate(self.forward.placeholders)}
        return [there[name] for name in self.saved]


Partition = Callable[[Joint], Partitioned]


aten = torch.ops.aten


def default_partition(joint: Joint) -> Partitioned:
    """Saves everything that the backward reads of the forward; computes nothing twice but views, which cost nothing.

    A view is made again in the backward when what it is a view of is saved or at hand: so a linear layer saves its
    weight itself, not a copy of its transpose.
    """
    return split(joint, read_by_backward(joint))


def forward_nodes(joint: Joint) -> list[fx.Node]:
    """The nodes that the forward computes: those its outputs need, and all effects of its phase."""
    nodes = joint.step.graph.nodes
    needed = ancestors([*joint.forward_outputs, *(n for n in nodes if is_effect(n, "forward"))])
    for node in nodes:  # one of several results of a call that the forward makes anyway
        if node.target is GETITEM and node.args[0] in needed:
            needed.add(node)
    return [n for n in nodes if n in needed and n.op != "placeholder"]


def is_effect(node: fx.Node, phase: str) -> bool:
    """Whether a call of a phase has an effect."""
    return node.op == "call_function" and is_effectful(node) and info(node).phase == phase


def backward_roots(joint: Joint) -> list[fx.Node]:
    """What the backward is for: gradients, and effects of its own."""
    return [*joint.gradients, *(n for n in joint.step.graph.nodes if is_effect(n, "backward"))]


def backward_nodes(joint: Joint, saved: set[fx.Node]) -> list[fx.Node]:
    """The nodes that the backward computes when these values are saved, in the graph's order.

    Raises:
        GraphError: a value is neither saved nor can be computed in the backward: an effect of the forward, or an
            input that it overwrites.
    """
    given = saved | set(joint.tangents)
    needed = [n for n in ancestors(backward_roots(joint), until=given.__contains__) if n not in given]
    for node in needed:
        if node.op == "placeholder" or is_effect(node, "forward"):
            why = "an input that the forward overwrites" if node in joint.overwritten else "of the forward"
            raise GraphError(f"the backward needs {node.name}, {why}, and it is not saved")
    found = set(needed)
    return _just_in_time([n for n in joint.step.graph.nodes if n in found])


def _just_in_time(nodes: list[fx.Node]) -> list[fx.Node]:
    """Moves what the forward ran to just before its first reader: made again sooner, it would only take memory."""
    places = {node: place for place, node in enumerate(nodes)}
    when = dict(places)
    for node in reversed(nodes):
        if info(node).phase == "forward":  # without a reader, a gradient that only the forward's values make
            when[node] = min((when[user] for user in node.users if user in places), default=len(nodes))
    return sorted(nodes, key=lambda node: (when[node], places[node]))


def read_by_backward(joint: Joint) -> list[fx.Node]:
    """The forward's values that the backward reads, views replaced by what they are views of where that is free."""
    forward = {n for n in (*forward_nodes(joint), *joint.primals) if n.op != "get_attr"}
    given = forward | set(joint.tangents)
    wanted = ancestors(backward_roots(joint), until=given.__contains__) & forward
    return free_views(joint, [n for n in joint.step.graph.nodes if n in wanted])


def free_views(joint: Joint, wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """Replaces views by what they are views of, where nothing more is then held than before, or than in eager.

    Eager holds all of what a saved view is a view of. A copy without gaps between its elements holds less, and serves
    where the view has none: kernels round by strides.
    """
    wanted = list(wanted)
    overwritten = joint.overwritten
    at_hand = (set(joint.primals) - overwritten) | set(joint.forward_outputs)
    kept = set(wanted)
    for node in reversed(wanted):  # a view of a view comes down to the first
        base = view_base(node)
        if node in at_hand or base is None:
            continue
        root, free = base, base in at_hand or base in kept
        while not free and (above := view_base(root)) is not None:
            root = above
            free = root in at_hand or root in kept
        whole = info(base).value.numel() <= info(node).value.numel() or not Geometry.of(info(node).value).is_dense
        if free or (whole and base not in overwritten):
            kept.discard(node)
            kept.add(root if free else base)
    wider = [n for n in joint.step.graph.nodes if n in kept]
    return wider if wider == wanted else free_views(joint, wider)


def view_base(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, one of several (`chunk`) included; None when it is not one."""
    call: Any = node.args[0] if node.target is GETITEM else node
    views = is_view(call.target) and isinstance(info(node).value, torch.Tensor) and isinstance(call.args[0], fx.Node)
    return call.args[0] if views else None


def split(joint: Joint, saved: Iterable[fx.Node]) -> Partitioned:
    """Cuts a joint graph in two, given which values the forward saves; the backward computes again what it lacks.

    Args:
        saved: nodes of the forward, primals included, that give a tensor or a host number.

    Raises:
        GraphError: the backward needs a value of the forward that is neither saved nor can be computed again.
    """
    saved = list(dict.fromkeys(saved))
    overwritten = joint.overwritten
    outputs = joint.forward_outputs
    primals = {node: i for i, node in enumerate(joint.primals) if node not in overwritten}
    own = [n for n in saved if n not in primals and (n in overwritten or n not in outputs)]
    forward = _forward_graph(joint, own, overwritten)
    backward, tangents = _backward_graph(joint, saved, overwritten)
    backward.signature.donated = frozenset(i for i, node in enumerate(saved) if node not in primals)
    return Partitioned(forward, backward, [_saved_name(n, overwritten) for n in saved], tangents)


def _saved_name(node: fx.Node, overwritten: set[fx.Node]) -> str:
    return f"{node.name}_before" if node in overwritten else node.name


def _forward_graph(joint: Joint, own: list[fx.Node], overwritten: set[fx.Node]) -> StepGraph:
    needed = {*forward_nodes(joint), *ancestors(own)} - {*joint.primals}
    graph, copied = copy_graph([*joint.primals, *(n for n in joint.step.graph.nodes if n in needed)])
    saved = []
    for node in own:
        value = copied[node]
        if node in overwritten and isinstance(info(node).value, torch.Tensor):
            gaps = not Geometry.of(info(node).value).is_dense
            target = clone_as_it_lies if gaps else aten.clone.default
            value = graph.create_node("call_function", target, (value,), {}, f"{node.name}_before")
            set_info(value, replace(info(node), phase="forward"))
        saved.append(value)
    outputs: list[Any] = [copied[n] for n in joint.forward_outputs]
    graph.output((*outputs, *saved))
    old = joint.step.signature
    signature = Signature(old.inputs[: joint.n_primals], len(outputs) + len(saved), dict(old.mutations), old.gradients)
    signature.saved = len(saved)
    return check(StepGraph(lazy_graph_module(joint.step.gm, graph), signature, "forward"), "partition")


def _backward_graph(joint: Joint, saved: list[fx.Node], overwritten: set[fx.Node]) -> tuple[StepGraph, list[int]]:
    nodes = backward_nodes(joint, set(saved))
    gradients = joint.gradients
    read = {used for node in nodes for used in node.all_input_nodes} | set(gradients)
    tangents = [i for i, t in enumerate(joint.tangents) if t in read]
    given = [(node, _saved_name(node, overwritten)) for node in (*saved, *(joint.tangents[i] for i in tangents))]
    graph, copied = copy_graph(nodes, given)
    inputs = [Input(str(copied[n].target), name, "number" if is_host(n) else "tensor") for n, name in given]
    graph.output(tuple(copied[g] for g in gradients))
    step = StepGraph(lazy_graph_module(joint.step.gm, graph), Signature(inputs, len(gradients)), "backward")
    return check(step, "partition"), tangents
