"""From a trace with symbolic sizes to that of given sizes: every symbol becomes a number, nothing is run.

The numbers may know what they are at other sizes (`sizes.py`): the program made of the trace then serves these, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.fake_layouts import differ, is_asked
from wholestep.functional import operator_of
from wholestep.ir import StepGraph, check, copy_graph, info, set_info
from wholestep.nested import map_leaves, tensors_of
from wholestep.sizes import SizeDecisions, has_size, plain, sized_fake
from wholestep.torch_compat import FakeTensorMode, OpOverload, empty_fake, evaluated, expression_of, lazy_graph_module
from wholestep.trace import Traced
from wholestep.trace.numbers.many_sizes import ManySizes
from wholestep.trace.numbers.symbolic_sizes import Held, Sizes, is_size
from wholestep.trace.record.finish import fingerprint, words
from wholestep.trace.record.graph_builder import fake_value
from wholestep.trace.record.inputs import TracedInput

aten = torch.ops.aten


class AtSizes:
    """One assignment of numbers to a trace's symbols.

    Args:
        decisions: what the numbers belong to that know what they are at other sizes.

    Attributes:
        asked: the calls of whose kernels the layouts of the results were asked, by what they are.
        known: by expression, the numbers that were met.
    """

    def __init__(self, mode: FakeTensorMode, values: Mapping[Any, int], decisions: SizeDecisions | None = None) -> None:
        self.mode, self.values, self.decisions = mode, values, decisions
        self.asked: dict[str, tuple[Any, Any, Any, Any]] = {}
        self.known: dict[Any, Any] = {}

    def number(self, leaf: Any) -> Any:
        """What a leaf of a call's arguments is at these sizes."""
        leaf = leaf.number if isinstance(leaf, Held) else leaf
        if not is_size(leaf):
            return leaf
        key = expression_of(leaf)
        if key not in self.known:
            found = evaluated(leaf, self.values)
            self.known[key] = found if self.decisions is None else self.decisions.number(found, leaf)
        return self.known[key]

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
        numbers = self.numbers(place)
        fake = empty_fake(self.mode, leaf, plain(numbers))
        if self.decisions is not None:
            if leaf.is_conj() or leaf.is_neg():
                self.decisions.specialized = True
            else:
                return sized_fake(self.mode, fake, numbers)
        if not leaf.is_conj() and not leaf.is_neg():
            return fake
        with self.mode, torch.no_grad():
            view = aten._conj.default(fake) if leaf.is_conj() else fake
            return aten._neg_view.default(view) if leaf.is_neg() else view

    def module(self, module: fx.GraphModule) -> fx.GraphModule:
        """A graph whose calls have these sizes."""
        graph, _ = copy_graph(module.graph.nodes)
        for node in graph.nodes:
            node.args, node.kwargs = self.numbers(node.args), self.numbers(node.kwargs)
            if "info" in node.meta:
                record = info(node)
                set_info(node, replace(record, value=map_leaves(self.value, record.value)))
                self._check(node)
        return lazy_graph_module(module, graph)

    def _check(self, node: fx.Node) -> None:
        op = operator_of(node.target)
        if not isinstance(op, OpOverload):
            return
        args, kwargs, value = map_leaves(fake_value, node.args), map_leaves(fake_value, node.kwargs), info(node).value
        if differ(node.target, *plain((args, kwargs, value))):
            raise OtherLayouts(f"{node.target} gives another layout than for symbols ({info(node).where})")
        call = node.target, args, kwargs, value
        many = any(tensor.dim() > 1 for tensor in tensors_of(value)) and has_size(call)  # else there is one layout
        if many and is_asked(op, args, kwargs):
            self.asked[f"{node.target} {words([args, kwargs])}"] = call


class OtherLayouts(Exception):  # noqa: N818 - an answer, not an error
    """At these sizes kernels give results of other layouts than the trace with symbols has."""


def at_sizes(
    traced: Traced, sizes: Sizes, values: Mapping[Any, int], inputs: Mapping[str, Any], many: bool = False
) -> Traced:
    """The trace for sizes that meet its guards.

    Args:
        values: what each symbol is.
        inputs: by the path of their source, tensors and numbers of the call that it is made for.
        many: whether one program may be made of it for many sizes.

    Raises:
        OtherLayouts: kernels give results of other layouts at these sizes.
    """
    decisions = _decisions(traced, sizes, values) if many else None
    at = AtSizes(sizes.mode, values, decisions)
    gm = at.module(traced.step.gm)
    old = traced.step.signature
    gradients = [replace(g, place=at.numbers(g.place)) for g in old.gradients]
    step = check(StepGraph(gm, replace(old, gradients=gradients, sizes=decisions)), "trace")
    constants = {str(n.target): getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"}
    nodes = dict(zip(traced.step.graph.nodes, gm.graph.nodes, strict=True))
    items = {id(item): _at_call(item, nodes.get(item.node, item.node), inputs) for item in traced.inputs}
    aliases = [replace(a, views=a.views and at.numbers(a.views)) for a in traced.aliases]
    return replace(
        traced,
        step=step,
        inputs=list(items.values()),
        aliases=aliases,
        fingerprint=fingerprint(step, constants, decisions.hints if decisions is not None else traced.derivative),
        many=ManySizes(sizes, decisions, [*at.asked.values()], aliases, inputs) if decisions is not None else None,
    )


def _decisions(traced: Traced, sizes: Sizes, values: Mapping[Any, int]) -> SizeDecisions | None:
    """What is decided on sizes; None where the program's inputs do not show them, or the trace is for one size."""
    places = {str(i.source): index for index, i in enumerate(traced.inputs[: traced.n_inputs])}
    found = {s.symbol: (places[str(s.source)], s.dim) for s in sizes.symbols if str(s.source) in places}
    if traced.derivative is not None or len(found) < len(sizes.symbols) or len(sizes.specialized()) == len(found):
        return None
    return SizeDecisions(values, found)


def _at_call(item: TracedInput, node: fx.Node, inputs: Mapping[str, Any]) -> TracedInput:
    if item.members:
        return replace(item, node=node)
    return replace(item, node=node, value=inputs.get(item.source.path, item.value))
