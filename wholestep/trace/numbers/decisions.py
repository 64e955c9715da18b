"""Decisions on data: values that Python needs while a step is captured, and that are compared when its program runs.

The graph so far is run on the real inputs. What is found becomes part of the program: a `Decided` call, as early as the
value is known, ends the program where it is another. The call is then served by a program captured with that one
(`runtime/entry.py`). The graph is pure, so that until its last decision a program leaves no trace but in generators.
Where ranks hold parts of a batch none can tell what all find: capture goes on with what is likely, and is done again
where the program finds another value.

Some are known before the step, as `if weight_decay != 0` and `if (mask == causal).all()`: what these follow from is
cheap, numbers among the inputs, single-element CPU tensors, constants, and comparisons and reductions of small tensors
that the step is given. Such a decision becomes a guard, a `Predicate`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.graph import magic_methods

from wholestep.errors import DataDependentError
from wholestep.functional import OFFSETS, Decided, base_name, operator_of, same_value
from wholestep.ir import ancestors, copy_graph, info, is_effectful, set_info
from wholestep.nested import tensors_of
from wholestep.patches import suspended
from wholestep.torch_compat import FakeTensor, OpOverload, below_autograd, lazy_graph_module, no_modes
from wholestep.trace.numbers.symbolic_sizes import decided, hinted
from wholestep.trace.record.inputs import Inputs, TracedInput
from wholestep.trace.record.user_line import user_line

aten = torch.ops.aten

OTHERWISE = "compile without fullgraph=True"
REMEDY = (
    f"use torch.where, take the decision outside of the step, {OTHERWISE}; one that a library takes is switched off in "
    "its settings (layer drop: a rate of 0; GradScaler: an optimizer with fused=True), or the parts beside it compiled"
)

MAX_NODES = 200
MAX_ELEMENTS = 1 << 16  # of all tensors together: tens of microseconds at each call
MAX_TEXT = 100  # characters
MAX_CONSTANT_ELEMENTS = 1 << 22  # computed once, while tracing

# Operators in a decision on tensors, besides pointwise ones: about what users and torch.nn ask of a mask.
CHEAP = {
    *(op for packet in (aten.all, aten.any, aten.sum, aten.max, aten.min, aten.amax, aten.amin, aten.triu, aten.tril)
      for op in (getattr(packet, name) for name in packet.overloads())),
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.ones.default,
    aten.zeros.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten._to_copy.default,
    aten.fill.Scalar, aten.scalar_tensor.default, aten._local_scalar_dense.default, aten.sort.default, operator.getitem,
}  # fmt: skip


@dataclass(frozen=True)
class Predicate:
    """A guard on a number computed from the step's inputs.

    Attributes:
        module: computes the number from the inputs at `inputs`.
        inputs: indices into the step's inputs.
        expected: what it was when the step was captured.
        text: the decision in words, with sources.
        line: the user's line that took it.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    expected: Any
    text: str
    line: str

    def holds(self, values: Sequence[Any] | Mapping[int, Any]) -> bool:
        given = [values[i] for i in self.inputs]
        with torch.no_grad() if any(isinstance(value, torch.Tensor) for value in given) else nullcontext():
            return same_value(self.module.forward(*given), self.expected)  # past hooks

    @property
    def reason(self) -> str:
        found = not self.expected if isinstance(self.expected, bool) else "another"
        return f"{self.text}: expected {self.expected}, found {found} (decided at {self.line})"


def follows_from_numbers(nodes: Iterable[fx.Node]) -> bool:
    """Whether the values of nodes follow from Python's numbers alone, so that they are the same at each call."""
    needed = ancestors(nodes, MAX_NODES)
    return len(needed) <= MAX_NODES and _is_constant(needed)


def can_be_known(nodes: set[fx.Node], is_data: Callable[[fx.Node], bool]) -> bool:
    """Whether the value that follows from the nodes may be computed before each call."""
    if len(nodes) > MAX_NODES:
        return False
    return _is_constant(nodes) or (all(_is_known(n, is_data) for n in nodes) and _is_small(nodes, MAX_ELEMENTS))


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers, or has another effect."""
    return node.op == "call_function" and is_effectful(node)


def _is_constant(nodes: set[fx.Node]) -> bool:
    """Whether a value follows from Python's numbers alone."""
    pure = all(n.op != "placeholder" and not draws(n) and n.target not in UNDEFINED for n in nodes)
    return pure and _is_small(nodes, MAX_CONSTANT_ELEMENTS)


def _is_known(node: fx.Node, is_data: Callable[[fx.Node], bool]) -> bool:
    """Whether one step of a decision is cheap to repeat before each call."""
    tensors = [*tensors_of(info(node).value)]
    if any(t.device.type != "cpu" for t in tensors) or node.target in UNDEFINED or node.target in OFFSETS:
        return False
    if node.op == "placeholder":
        return is_data(node) or all(t.numel() == 1 for t in tensors)
    if draws(node):
        return False
    view = isinstance(node.target, OpOverload) and node.target.is_view
    cheap = view or node.target in CHEAP or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return cheap or node.op == "get_attr" or all(t.numel() == 1 for t in tensors)


def _is_small(nodes: set[fx.Node], limit: int) -> bool:
    return sum(t.numel() for n in nodes for t in tensors_of(info(n).value)) <= limit


UNDEFINED = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}


def in_words(node: fx.Node, nodes: set[fx.Node], inputs: Iterable[TracedInput]) -> str:
    """What a node computes, which follows from some nodes, in words, cut where they are long."""
    texts = {item.node: str(item.source) for item in inputs if item.node in nodes}
    for one in (one for one in node.graph.nodes if one in nodes):
        texts.setdefault(one, _text(one, texts)[: MAX_TEXT + 1])
    return texts[node] if len(texts[node]) <= MAX_TEXT else f"{texts[node][:MAX_TEXT]}…"


def _text(node: fx.Node, texts: dict[fx.Node, str]) -> str:
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    args = [texts.get(a, "…") if isinstance(a, fx.Node) else repr(a) for a in node.args]
    if name in magic_methods and len(args) == magic_methods[name].count("{}"):
        text = magic_methods[name].format(*args)
        return text if name in ("lt", "le", "gt", "ge", "eq", "ne", "getitem") else f"({text})"
    if name == "_local_scalar_dense":
        return f"({args[0]}).item()" if " " in args[0] else f"{args[0]}.item()"
    return f"{name}({', '.join(args)})"


# How many bools a program decides on: the outcomes of more, as of each layer's drop, seldom come again together.
MOST = 8


# Operators that hand on what is decided, by base name; those that turn it round; those that look for the unusual.
HANDING_ON = ("_local_scalar_dense", "view", "_to_copy", "clone", "detach", "squeeze")
NEGATIONS = ("logical_not", "bitwise_not")
UNUSUAL = ("any", "isnan", "isinf")


def likely(node: fx.Node) -> bool:
    """What a bool may well be that no rank alone can tell: checks pass, and what is looked for is not there."""
    name = base_name(node.target) if isinstance(node.target, OpOverload) else ""
    if name in (*HANDING_ON, *NEGATIONS):
        return likely(node.all_input_nodes[0]) is not (name in NEGATIONS)
    return name not in UNUSUAL


class RealValues:
    """The values of a graph under construction on the real inputs.

    Args:
        outcomes: of bools that the ranks decide on together, what is known of this call, in order; None where each rank
            decides alone.
    """

    def __init__(self, inputs: Inputs, outcomes: Sequence[str] | None = None) -> None:
        self.inputs, self.builder, self.outcomes = inputs, inputs.builder, outcomes
        self._values: dict[fx.Node, Any] = {}
        self.decided: list[fx.Node] = []
        self._states: dict[torch.Generator, torch.Tensor] = {}  # where the draws so far have moved generators to

    def of(self, node: fx.Node) -> Any:
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
                    self._values[each] = self._run(each, real)
        return self._values[node]

    def assumed(self, node: fx.Node) -> bool:
        """What the ranks may find together: as the program did that ended here, as here before, or what is likely."""
        known = (self.outcomes or ())[len(self.decided) :]
        alike = [one.target for one in self.decided if one.target.text == self._text(node)]  # type: ignore[union-attr]
        return known[0] == repr(True) if known else alike[-1].expected if alike else likely(node)  # type: ignore[union-attr]

    def _text(self, node: fx.Node) -> str:
        return in_words(node, ancestors([node], MAX_NODES), self.inputs.items)

    def parts(self, nodes: set[fx.Node]) -> list[str]:
        """What some nodes follow from and each rank holds a part of."""
        parts = self.inputs.world.substitutes.parts
        return [str(item.source) for item in self.inputs.items if item.node in nodes and id(item.value) in parts]

    def given(self) -> dict[fx.Node, Any]:
        """What inputs are in the call, those of symbolic sizes, too."""
        found = {found.source.path: found.tensor for found in self.inputs.world.tensors.values()}
        fakes = [item for item in self.inputs.items if isinstance(item.value, FakeTensor)]
        real: dict[fx.Node, Any] = {item.node: item.value for item in self.inputs.items}
        return real | {item.node: found[item.source.path] for item in fakes if item.source.path in found}

    def _run(self, node: fx.Node, real: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return self.builder.constants[str(node.target)]
        if node.op == "placeholder":
            if node not in real or isinstance(real[node], FakeTensor):
                what = "Python decides on a value that the step has not made yet, or on a gradient to come"
                raise DataDependentError(what, "use torch.where")
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

    def guard(self, node: fx.Node, nodes: set[fx.Node], found: Any) -> Predicate:
        """A guard on a value that was found, which follows from some nodes.

        Raises:
            DataDependentError: it follows from tensors of which this rank holds a part.
        """
        for source in self.parts(nodes):
            what = f"Python decides on the values of {source}, of which each rank holds a part"
            ways = "use torch.where, decide outside of the step, or give every rank the whole batch: "
            raise DataDependentError(what, f"{ways}batch=ws.Replicate()")
        graph, copies = copy_graph([old for old in node.graph.nodes if old in nodes])
        for copied in graph.nodes:
            copied.args = decided(copied.args)
            copied.meta.clear()  # records hold fake tensors, and are of no use here
        graph.output(copies[node])
        places = {item.node: index for index, item in enumerate(self.inputs.items)}
        positions = tuple(places[old] for old in copies if old.op == "placeholder")
        text = in_words(node, nodes, self.inputs.items)
        return Predicate(lazy_graph_module(self.builder.constants, graph), positions, found, text, user_line())

    def expect(self, operand: fx.Node, found: Any) -> None:
        """Ends the program where a value is another than was found."""
        order = {n: i for i, n in enumerate(operand.graph.nodes)}
        latest = max([operand, *self.decided[-1:]], key=order.__getitem__)
        target = Decided(found, len(self.decided), self._text(operand), user_line())
        with operand.graph.inserting_after(latest):
            node = operand.graph.call_function(target, (operand,))
        self.decided.append(set_info(node, replace(info(latest), value=None)))

    def forget(self) -> None:
        """Lets go of all values."""
        self._values.clear()
        self.decided.clear()


def refuse_repeated(nodes: Any) -> None:
    """Refuses a decision after what a program may not do twice: it may end there, and another one begin.

    Raises:
        DataDependentError: operators of the user's own, or messages to other ranks, come before it.
    """
    for node in nodes:
        op = operator_of(node.target)
        if isinstance(op, OpOverload) and op.namespace not in REPEATABLE:
            what = f"Python decides on a value after {op}, which would run twice if it decided otherwise"
            raise DataDependentError(what, "use torch.where, or take the decision before it")


def outcomes_of(graph: fx.Graph) -> tuple[str, ...]:
    """What Python went on with at each decision of a graph."""
    return tuple([repr(node.target.expected) for node in graph.nodes if isinstance(node.target, Decided)])


# Namespaces of operators that do nothing but compute.
REPEATABLE = ("aten", "prims", "quantized", "torchvision")


def geometry(result: Any) -> list[tuple[Any, ...]]:
    """Size, strides, dtype and device of each tensor in an operator's result."""
    found = [result] if isinstance(result, torch.Tensor) else result
    return [((*tensor.shape,), tensor.stride(), tensor.dtype, tensor.device) for tensor in found]
