"""Decisions that are known before the step: `if weight_decay != 0`, `if (mask == causal).all()`.

Such a decision becomes a guard: what it follows from is cheap, numbers among the inputs, single-element CPU tensors,
constants, and comparisons and reductions of small tensors that the step is given. `decisions.py` has all others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import magic_methods

from wholestep.errors import DataDependentError
from wholestep.functional import OFFSETS, same_value
from wholestep.ir import ancestors, copy_graph, info, is_effectful
from wholestep.nested import tensors_of
from wholestep.torch_compat import OpOverload, lazy_graph_module
from wholestep.trace.numbers.symbolic_sizes import decided
from wholestep.trace.record.inputs import TracedInput

aten = torch.ops.aten

OTHERWISE = "compile without fullgraph=True, or with guard_data=True"
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
        with torch.no_grad():
            return same_value(self.module(*(values[i] for i in self.inputs)), self.expected)

    @property
    def reason(self) -> str:
        found = not self.expected if isinstance(self.expected, bool) else "another"
        return f"{self.text}: expected {self.expected}, found {found} (decided at {self.line})"


def predicate(
    node: fx.Node, nodes: set[fx.Node], inputs: Sequence[TracedInput], constants: dict[str, torch.Tensor],
    expected: Any, text: str, line: str,
) -> Predicate:  # fmt: skip
    """A guard on the value of a node, which follows from some nodes."""
    graph, copies = copy_graph([old for old in node.graph.nodes if old in nodes])
    for copied in graph.nodes:
        copied.args = decided(copied.args)
        copied.meta.clear()  # records hold fake tensors, and are of no use here
    graph.output(copies[node])
    places = {item.node: index for index, item in enumerate(inputs)}
    positions = tuple(places[old] for old in copies if old.op == "placeholder")
    return Predicate(lazy_graph_module(constants, graph), positions, expected, text, line)


def follows_from_numbers(nodes: Iterable[fx.Node]) -> bool:
    """Whether the values of nodes follow from Python's numbers alone, so that they are the same at each call."""
    needed = ancestors(nodes, MAX_NODES)
    return len(needed) <= MAX_NODES and _is_constant(needed)


def unknown(line: str) -> DataDependentError:
    """The error of a decision on what is only known when the step runs."""
    return DataDependentError("Python decides on a value that is only known when the step runs", line, REMEDY)


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
