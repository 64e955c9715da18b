"""From a trace with symbolic sizes to that of given sizes: every symbol becomes a number, nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.fake_layouts import differ
from wholestep.ir import StepGraph, check, copy_graph, info, set_info
from wholestep.torch_compat import FakeTensorMode, empty_fake, evaluated, expression_of, lazy_graph_module
from wholestep.trace import Traced
from wholestep.trace.numbers.symbolic_sizes import Held, Sizes, is_size
from wholestep.trace.outputs.canonical import fingerprint
from wholestep.trace.record.graph_builder import fake_value, map_leaves
from wholestep.trace.record.inputs import TracedInput

aten = torch.ops.aten


class AtSizes:
    """One assignment of numbers to a trace's symbols."""

    def __init__(self, mode: FakeTensorMode, values: Mapping[Any, int]) -> None:
        self.mode, self.values = mode, values
        self._known: dict[Any, Any] = {}

    def number(self, leaf: Any) -> Any:
        """What a leaf of a call's arguments is at these sizes."""
        leaf = leaf.number if isinstance(leaf, Held) else leaf
        if not is_size(leaf):
            return leaf
        key = expression_of(leaf)
        if key not in self._known:
            self._known[key] = evaluated(leaf, self.values)
        return self._known[key]

    def numbers(self, tree: Any) -> Any:
        """The same for nested lists and tuples; sizes come as plain tuples."""
        tree = tuple(tree) if isinstance(tree, torch.Size) else tree
        return map_leaves(self.number, tree)

    def value(self, leaf: Any) -> Any:
        """A fake tensor, or number, of these sizes."""
        if not isinstance(leaf, torch.Tensor):
            return self.number(leaf)
        place = tuple(leaf.shape), tuple(leaf.stride())
        if not any(map(is_size, (*place[0], *place[1]))):
            return leaf
        fake: torch.Tensor = empty_fake(self.mode, leaf, self.numbers(place))
        if not leaf.is_conj() and not leaf.is_neg():
            return fake
        with self.mode, torch.no_grad():
            fake = aten._conj.default(fake) if leaf.is_conj() else fake
            return aten._neg_view.default(fake) if leaf.is_neg() else fake

    def module(self, module: fx.GraphModule) -> fx.GraphModule:
        """A graph whose calls have these sizes."""
        graph, _ = copy_graph(module.graph)
        for node in graph.nodes:
            node.args, node.kwargs = self.numbers(node.args), self.numbers(node.kwargs)
            if "info" in node.meta:
                record = info(node)
                set_info(node, replace(record, value=map_leaves(self.value, record.value)))
                self._check(node)
        return lazy_graph_module(module, graph)

    def _check(self, node: fx.Node) -> None:
        args, kwargs = map_leaves(fake_value, node.args), map_leaves(fake_value, node.kwargs)
        if node.op == "call_function" and differ(node.target, args, kwargs, info(node).value):
            raise OtherLayouts(f"{node.target} gives another layout than for symbols ({info(node).where})")


class OtherLayouts(Exception):  # noqa: N818 - an answer, not an error
    """At these sizes kernels give results of other layouts than the trace with symbols has."""


def at_sizes(traced: Traced, sizes: Sizes, values: Mapping[Any, int], inputs: Mapping[str, Any]) -> Traced:
    """The trace for sizes that meet its guards.

    Args:
        values: what each symbol is.
        inputs: by the path of their source, tensors and numbers of the call that it is made for.

    Raises:
        OtherLayouts: kernels give results of other layouts at these sizes.
    """
    at = AtSizes(sizes.mode, values)
    gm = at.module(traced.step.gm)
    old = traced.step.signature
    gradients = [replace(g, place=at.numbers(g.place)) for g in old.gradients]
    step = check(StepGraph(gm, replace(old, gradients=gradients)), "trace")
    constants = {str(n.target): getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"}
    nodes = dict(zip(traced.step.graph.nodes, gm.graph.nodes, strict=True))
    items = {id(item): _at_call(item, nodes.get(item.node, item.node), inputs) for item in traced.inputs}
    hoisted = replace(
        traced.hoisted,
        module=at.module(traced.hoisted.module),
        inputs=[items[id(i)] for i in traced.hoisted.inputs],
        state=[items[id(i)] for i in traced.hoisted.state],
    )
    return replace(
        traced,
        step=step,
        inputs=list(items.values()),
        aliases=[
            replace(a, geometry=a.geometry and at.numbers(a.geometry), views=a.views and at.numbers(a.views))
            for a in traced.aliases
        ],
        hoisted=hoisted,
        fingerprint=fingerprint(step, constants, traced.derivative),
    )


def _at_call(item: TracedInput, node: fx.Node, inputs: Mapping[str, Any]) -> TracedInput:
    if item.source is None or item.members:
        return replace(item, node=node)
    return replace(item, node=node, value=inputs.get(item.source.path, item.value))
