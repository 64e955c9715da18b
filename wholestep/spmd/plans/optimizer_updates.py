"""Which calls of a step update one parameter element by element, so that each rank can update some rows alone.

From the new value of a parameter back: a call belongs to its update when it is elementwise over the parameter's shape
and nothing else reads its result but calls of the same update, or the step's end where it is the new content of the
parameter or of a state tensor. What such calls read from elsewhere (the gradient, a coefficient) is only cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, StepGraph, info, is_effectful
from wholestep.torch_compat import OpOverload

_COLUMNS = ("_foreach_", "_fused_")  # operators on lists, whose results at i depend on the operands at i


@dataclass
class Update:
    """The update of one parameter.

    Attributes:
        parameter: its placeholder.
        new: its new value.
        calls: all elementwise calls, in order, ``new`` among them; of operators on lists, the results.
        states: placeholders of state that nothing else reads.
    """

    parameter: fx.Node
    new: fx.Node
    calls: list[fx.Node] = field(default_factory=list)
    states: list[fx.Node] = field(default_factory=list)


def column_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """For a result of an operator on lists: the call, and the result's place in the lists."""
    if node.target is not GETITEM:
        return None
    index, owner = node.args[1], node.args[0]
    while isinstance(owner, fx.Node) and owner.target is GETITEM:
        owner = owner.args[0]
    assert isinstance(owner, fx.Node) and isinstance(index, int)
    named = isinstance(owner.target, OpOverload) and owner.target._schema.name.split("::")[-1].startswith(_COLUMNS)
    return (owner, index) if named and isinstance(info(node).value, torch.Tensor) else None


def find_updates(step: StepGraph) -> list[Update]:
    """The updates of a step's parameters, where they are elementwise."""
    return _Search(step).run()


class _Search:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.nodes = list(step.graph.nodes)
        self.inputs, outputs = step.placeholders, step.outputs
        self.kind = {node: item.kind for node, item in zip(self.inputs, step.signature.inputs, strict=True)}
        self.ends: dict[fx.Node, list[fx.Node | None]] = defaultdict(list)  # value -> inputs that it becomes, or None
        for index, value in enumerate(outputs):
            into = step.signature.mutations.get(index)
            if isinstance(value, fx.Node):
                self.ends[value].append(None if into is None else self.inputs[into])
        self.columns: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            column = column_of(node) if node.op == "call_function" else None
            if column is not None:
                self.columns[column].append(node)
        self.of: dict[fx.Node, fx.Node] = {}  # call -> parameter

    def run(self) -> list[Update]:
        news = {into: node for node, ends in self.ends.items() for into in ends if into is not None}
        parameters = {p: news[p] for p in self.inputs if self.kind[p] == "parameter" and p in news}
        banned: set[fx.Node] = set()
        while True:
            self.of = {new: p for p, new in parameters.items() if p not in banned and self._elementwise(new, p)}
            self._grow(news)
            conflicts = self._conflicts(news)
            if not conflicts:
                return [self._update(p, new) for p, new in parameters.items() if self.of.get(new) is p]
            banned |= conflicts

    def _grow(self, news: dict[fx.Node, fx.Node]) -> None:
        """Adds calls until there are no more: from readers to what they read, then new states by their old ones."""
        count = -1
        while count != len(self.of):
            count = len(self.of)
            for node in reversed(self.nodes):
                if node not in self.of and node.op == "call_function":
                    owner = self._owner(node, news)
                    if owner is not None and self._elementwise(node, owner):
                        self.of[node] = owner

    def _owner(self, node: fx.Node, news: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """The one parameter whose update all readers of a call belong to."""
        ends = self.ends.get(node, [])
        if info(node).phase == "backward":  # the sum of a gradient of two uses: it is reduced before it is cut
            return None
        if any(into is None or self.kind[into] != "state" for into in ends):
            return None
        found = {self.of.get(reader) for reader in self._readers(node)}
        if not found:  # read by nobody: the new value of a state that the update reads, or one of its columns
            beside = [self.of.get(other) for into in ends if into is not None for other in self._readers(into)]
            column = column_of(node)
            beside += [self.of.get(other) for other in self.columns[column]] if column is not None else []
            found = set(beside) - {None}
        return found.pop() if len(found) == 1 else None

    def _elementwise(self, node: fx.Node, parameter: fx.Node) -> bool:
        value, like = info(node).value, info(parameter).value
        if not isinstance(value, torch.Tensor) or value.shape != like.shape or not value.is_contiguous():
            return False
        if column_of(node) is None:
            target = node.target
            if is_effectful(node):  # random numbers of a part are not the part of random numbers
                return False
            if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or target.is_view:
                return False
        operands = [info(o).value for o in self._operands(node)]
        return all(not isinstance(v, (torch.Tensor, list, tuple)) or _fits(v, like) for v in operands)

    def _operands(self, node: fx.Node) -> Iterator[fx.Node]:
        column = column_of(node)
        if column is None:
            yield from node.all_input_nodes
            return
        call, index = column
        for argument in (*call.args, *call.kwargs.values()):
            if isinstance(argument, fx.Node):
                yield argument
            elif isinstance(argument, (list, tuple)) and index < len(argument):
                if isinstance(argument[index], fx.Node):
                    yield argument[index]

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The calls that read a value; of operators on lists, the results at its places. Not the step's end."""
        for user in node.users:
            if user.op == "output":
                continue
            places = [
                index
                for argument in (*user.args, *user.kwargs.values())
                if isinstance(argument, (list, tuple))
                for index, one in enumerate(argument)
                if one is node
            ]
            results = [leaf for index in places for leaf in self.columns.get((user, index), [])]
            yield from results or [user]

    def _conflicts(self, news: dict[fx.Node, fx.Node]) -> set[fx.Node]:
        """Parameters whose update gives rows of a state that somebody else needs whole."""
        found = set()
        for state, new in news.items():
            if self.kind[state] == "state" and new in self.of:
                if any(self.of.get(reader) is not self.of[new] for reader in self._readers(state)):
                    found.add(self.of[new])
        return found

    def _update(self, parameter: fx.Node, new: fx.Node) -> Update:
        calls = [node for node in self.nodes if self.of.get(node) is parameter]
        states = [
            state
            for state in self.inputs
            if self.kind[state] == "state" and _same_shape(state, parameter) and self._is_own(state, parameter)
        ]
        return Update(parameter, new, calls, states)

    def _is_own(self, state: fx.Node, parameter: fx.Node) -> bool:
        readers = list(self._readers(state))
        ends = [node for node, into in self.ends.items() if state in into]
        inside = all(self.of.get(node) is parameter for node in (*readers, *ends))
        return bool(readers) and inside and not self.ends.get(state)


def _fits(value: Any, like: torch.Tensor) -> bool:
    """True for what can be cut along with a tensor, or is one number for all its elements."""
    return isinstance(value, torch.Tensor) and (value.shape == like.shape or value.dim() == 0)


def _same_shape(one: fx.Node, two: fx.Node) -> bool:
    a, b = info(one).value, info(two).value
    return isinstance(a, torch.Tensor) and a.shape == b.shape and a.is_contiguous()
