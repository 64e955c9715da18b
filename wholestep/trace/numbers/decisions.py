"""Decisions on data: values that Python needs while a step is captured, and that are compared when its program runs.

The graph so far is run on the real inputs. What is found becomes part of the program: a `Decided` call, as early as the
value is known, ends the program where it is another. The call is then served by a program captured with that one
(`runtime/entry.py`). The graph is pure, so that until its last decision a program leaves no trace but in generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from wholestep.errors import DataDependentError
from wholestep.functional import OFFSETS, Decided, operator_of
from wholestep.ir import ancestors, info, set_info
from wholestep.patches import suspended
from wholestep.torch_compat import FakeTensor, OpOverload, below_autograd, no_modes
from wholestep.trace.numbers.predicates import MAX_NODES, Predicate, draws, in_words, predicate
from wholestep.trace.numbers.symbolic_sizes import hinted
from wholestep.trace.record.inputs import Inputs

# What a program may decide on: nothing, what is true or false, or any value and shape.
Decisions = Literal["none", "bools", "all"]


# How many bools a program decides on: the outcomes of more, as of each layer's drop, seldom come again together.
MOST = 8


class RealValues:
    """The values of a graph under construction on the real inputs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.builder = inputs, inputs.builder
        self._values: dict[fx.Node, Any] = {}
        self._decided: list[fx.Node] = []
        self._states: dict[torch.Generator, torch.Tensor] = {}  # where the draws so far have moved generators to

    @property
    def count(self) -> int:
        """How many decisions there are so far."""
        return len(self._decided)

    def of(self, node: fx.Node, line: str) -> Any:
        """The value of a node, which runs what it follows from, and all draws so far in their order.

        Raises:
            DataDependentError: it follows from what is only known when the step runs.
        """
        nodes = node.graph.nodes
        needed = ancestors([node], until=self._values.__contains__)
        drawn = any(map(draws, needed))
        needed |= ancestors(filter(draws, nodes), until=self._values.__contains__) if drawn else set()
        real = self.given()
        with suspended(), no_modes(), below_autograd(), self._generators() if drawn else nullcontext():
            for each in nodes:
                if each in needed and each not in self._values:
                    self._values[each] = self._run(each, real, line)
        return self._values[node]

    def given(self) -> dict[fx.Node, Any]:
        """What inputs are in the call, those of symbolic sizes, too."""
        found = {found.source.path: found.tensor for found in self.inputs.world.tensors.values()}
        fakes = [item for item in self.inputs.items if isinstance(item.value, FakeTensor)]
        real: dict[fx.Node, Any] = {item.node: item.value for item in self.inputs.items}
        return real | {item.node: found[item.source.path] for item in fakes if item.source.path in found}

    def _run(self, node: fx.Node, real: dict[fx.Node, Any], line: str) -> Any:
        if node.op == "get_attr":
            return self.builder.constants[str(node.target)]
        if node.op == "placeholder":
            if node not in real or isinstance(real[node], FakeTensor):
                what = "Python decides on a value that the step has not made yet, or on a gradient to come"
                raise DataDependentError(what, line, "use torch.where")
            return real[node]
        assert callable(node.target)
        args, kwargs = fx.map_arg(hinted((node.args, dict(node.kwargs))), self._values.__getitem__)
        place = OFFSETS.get(node.target)  # type: ignore[call-overload]
        if place is not None and len(args) > place:
            args = (*args[:place], args[0].storage_offset() + args[place], *args[place + 1 :])
        return node.target(*args, **kwargs)

    @contextmanager
    def _generators(self) -> Iterator[None]:
        """Inside, generators are where the draws so far have moved them to."""
        given = [item.value for item in self.inputs.items if isinstance(item.value, torch.Generator)]
        before = {generator: generator.get_state() for generator in (torch.default_generator, *given)}
        for generator, state in self._states.items():
            generator.set_state(state)
        try:
            yield
        finally:
            self._states = {generator: generator.get_state() for generator in before}
            for generator, state in before.items():
                generator.set_state(state)

    def guard(self, node: fx.Node, nodes: set[fx.Node], found: Any, line: str) -> Predicate:
        """A guard on a value that was found, which follows from some nodes.

        Raises:
            DataDependentError: it follows from tensors of which this rank holds a part.
        """
        for item in (item for item in self.inputs.items if item.node in nodes):
            if id(item.value) in self.inputs.world.substitutes.parts:
                raise DataDependentError(
                    f"Python decides on the values of {item.source}, of which each rank holds a part",
                    line,
                    "use torch.where, decide outside of the step, or give every rank the whole batch: "
                    "batch=ws.Replicate()",
                )
        items = self.inputs.items
        return predicate(node, nodes, items, self.builder.constants, found, in_words(node, nodes, items), line)

    def expect(self, operand: Any, found: Any, line: str, read: Any = None) -> None:
        """Ends the program where an operand has another value than was found."""
        nodes = operand if isinstance(operand, list) else [operand]
        order = {n: i for i, n in enumerate(nodes[0].graph.nodes)}
        text = in_words(nodes[0], ancestors(nodes, MAX_NODES), self.inputs.items)
        latest = max([*nodes, *self._decided[-1:]], key=order.__getitem__)
        target = Decided(found, len(self._decided), text, line, read)
        with nodes[0].graph.inserting_after(latest):
            node = nodes[0].graph.call_function(target, (operand,))
        self._decided.append(set_info(node, replace(info(latest), value=None)))

    def forget(self) -> None:
        """Lets go of all values."""
        self._values.clear()
        self._decided.clear()


def refuse_repeated(nodes: Any, line: str) -> None:
    """Refuses a decision after what a program may not do twice: it may end there, and another one begin.

    Raises:
        DataDependentError: operators of the user's own, or messages to other ranks, come before it.
    """
    for node in nodes:
        op = operator_of(node.target)
        if isinstance(op, OpOverload) and op.namespace not in REPEATABLE:
            what = f"Python decides on a value after {op}, which would run twice if it decided otherwise"
            raise DataDependentError(what, line, "use torch.where, or take the decision before it")



def outcomes_of(graph: fx.Graph) -> tuple[str, ...]:
    """What Python went on with at each decision of a graph."""
    return tuple([repr(node.target.expected) for node in graph.nodes if isinstance(node.target, Decided)])


# Namespaces of operators that do nothing but compute.
REPEATABLE = ("aten", "prims", "quantized", "torchvision")


def geometry(result: Any) -> list[tuple[Any, ...]]:
    """Size, strides, dtype and device of each tensor in an operator's result."""
    found = [result] if isinstance(result, torch.Tensor) else result
    return [((*tensor.shape,), tensor.stride(), tensor.dtype, tensor.device) for tensor in found]
