"""A graph that is compiled part by part, and run as one: what a part reads of another goes from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.functional import is_collective, is_view
from wholestep.ir import GETITEM, Input, Signature, StepGraph, copy_graph, info, is_host
from wholestep.lower.backends.interpreter import write_back
from wholestep.torch_compat import lazy_graph_module

Run = Callable[..., Sequence[Any]]


def part_numbers(step: StepGraph, in_flight: bool) -> dict[fx.Node, int]:
    """The part of each call, counted up along the graph; those between which something else than a tensor or a number
    would have to go are one.

    Args:
        in_flight: whether a collective may go on from one part to the next.
    """
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    own = [info(n).part for n in calls if info(n).phase == "backward" or step.stage != "backward"]
    part = min(own, default=0)  # a forward's calls, made again by a backward, belong to what comes next
    numbers: dict[fx.Node, int] = {}
    for node in calls:
        part = max(part, info(node).part)
        numbers[node] = numbers.get(node.args[0], part) if node.target is GETITEM else part  # type: ignore[arg-type]
    joined: set[int] = set()
    for node, number in numbers.items():
        if not isinstance(info(node).value, torch.Tensor | int | float) or (
            is_collective(node.target) and not in_flight
        ):
            joined.update(*(range(number + 1, numbers[user] + 1) for user in node.users if user in numbers))
    order = {number: i for i, number in enumerate(sorted(set(numbers.values()) - joined))}
    kept = sorted(order)
    return {node: max(order[k] for k in kept if k <= number or k == kept[0]) for node, number in numbers.items()}


class Parts:
    """The callables that a backend made of a graph's parts, as one for the whole.

    Args:
        step: the graph.
        numbers: the part of each call.
        lower: makes a callable of a part.
    """

    def __init__(self, step: StepGraph, numbers: dict[fx.Node, int], lower: Callable[[StepGraph], Run]) -> None:
        inputs = dict(zip(step.placeholders, step.signature.inputs, strict=True))
        self._mutations, self._given = step.signature.mutations, [node.name for node in inputs]
        self._outputs = [node.name if isinstance(node, fx.Node) else None for node in step.outputs]
        graphs: list[tuple[StepGraph, list[str]]] = []
        last = dict.fromkeys(filter(None, self._outputs), -1)  # results of the step stay until its end
        left = {node for node in step.outputs if isinstance(node, fx.Node)}
        for part in reversed(range(max(numbers.values()) + 1)):
            mine = _with_views([node for node, number in numbers.items() if number == part])
            reads = [n for n in dict.fromkeys(o for m in mine for o in m.all_input_nodes) if n not in mine]
            reads = [node for node in reads if node.op != "get_attr"]
            gives = [node for node in mine if node in left and numbers[node] == part]
            left |= {node for node in reads if node in numbers}
            dead = [node.name for node in reads if last.setdefault(node.name, part) == part]
            graphs.append((_graph_of(step, mine, reads, gives, inputs), dead))
        self._parts = [(lower(one), _names(one.placeholders), _names(one.outputs), dead) for one, dead in graphs[::-1]]

    @property
    def code(self) -> str:
        """The programs of all parts, as far as the backend has text of them."""
        return "\n\n".join(str(getattr(run, "code", "")) for run, *_ in self._parts).strip()

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.consume(list(inputs))

    def consume(self, inputs: list[Any]) -> list[Any]:
        """Runs the parts; a value is let go of when no later one reads it."""
        values = dict(zip(self._given, inputs, strict=True))
        for run, reads, gives, dead in self._parts:
            values.update(zip(gives, run(*(values[name] for name in reads)), strict=True))
            for name in dead:
                del values[name]
        results = [None if name is None else values[name] for name in self._outputs]
        with torch.no_grad():
            return write_back(results, inputs, self._mutations)


def _names(nodes: list[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def _with_views(nodes: list[fx.Node]) -> dict[fx.Node, None]:
    """Some calls in order, with the views and constants made anew that they read of other parts: they cost nothing."""
    found = dict.fromkeys(nodes)
    more = {operand for node in nodes for operand in node.all_input_nodes} - found.keys()
    while more:
        node = more.pop()
        tensor_view = is_view(node.target) and isinstance(info(node).value, torch.Tensor)
        if node.op == "get_attr" or (node.op == "call_function" and tensor_view):
            found[node] = None
            more |= {*node.all_input_nodes} - found.keys()
    return dict.fromkeys(sorted(found))


def _graph_of(
    step: StepGraph, mine: dict[fx.Node, None], reads: list[fx.Node], gives: list[fx.Node], inputs: dict[fx.Node, Input]
) -> StepGraph:
    graph, copies = copy_graph(mine, [(node, node.name) for node in reads])
    graph.output(tuple(copies[node] for node in gives))
    made = [inputs.get(n) or Input("", f"value {n.name}", "number" if is_host(n) else "tensor") for n in reads]
    named = [replace(one, name=str(copies[node].target)) for one, node in zip(made, reads, strict=True)]
    return StepGraph(lazy_graph_module(step.gm, graph), Signature(named, len(gives)), step.stage)
