"""Decisions that Python takes on host numbers: `if weight_decay != 0`, `if (mask == causal).all()`.

Such a decision is part of the captured program. It becomes a guard where the number can be computed, cheaply, before
the step runs: from numbers among the inputs, single-element CPU tensors, constants, and by comparisons and reductions
of small tensors that the step is given. `decisions.py` has those on anything else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.amp import GradScaler

from wholestep.errors import DataDependentError
from wholestep.functional import same_value
from wholestep.ir import ancestors, copy_graph, draws_nothing, info, is_effectful
from wholestep.nested import tensors_of
from wholestep.torch_compat import OpOverload, lazy_graph_module, no_modes
from wholestep.trace.numbers.symbolic_sizes import decided
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.provenance import called_from

aten = torch.ops.aten

OTHERWISE = "compile without fullgraph=True, or with guard_data=True"
REMEDY = (
    f"use torch.where, take the decision outside of the step, {OTHERWISE}; one that a library takes is switched off in "
    "its settings (layer drop: a rate of 0), or the parts beside it are compiled"
)

MAX_NODES = 200
MAX_ELEMENTS = 1 << 16  # of all tensors together: tens of microseconds at each call
MAX_TEXT = 160  # characters
MAX_CONSTANT_ELEMENTS = 1 << 22  # computed once, while tracing

# Operators in a decision on tensors, besides pointwise ones: about what users and torch.nn ask of a mask.
CHEAP = {
    *(op for packet in (aten.all, aten.any, aten.sum, aten.max, aten.min, aten.amax, aten.amin, aten.triu, aten.tril)
      for op in (getattr(packet, name) for name in packet.overloads())),
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.ones.default,
    aten.zeros.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten._to_copy.default,
    aten.fill.Scalar, aten.scalar_tensor.default, aten._local_scalar_dense.default, aten.sort.default, operator.getitem,
}  # fmt: skip


# Where an offset stands that an operator counts from the start of the memory, and a graph from the operand's first
# element.
OFFSETS = {aten.as_strided.default: 3, aten.as_strided_copy.default: 3, aten.as_strided_scatter.default: 4}


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


def decide(
    node: fx.Node,
    inputs: Sequence[TracedInput],
    constants: dict[str, torch.Tensor],
    is_data: Callable[[fx.Node], bool],
    line: str,
    given: Mapping[fx.Node, Any],
    parts: Container[int] = (),
) -> Predicate | None:
    """Computes a decision now, from the real inputs, and makes it a guard; None where that is not cheap.

    Args:
        node: gives the number, or the sizes, on which Python decides.
        is_data: tells placeholders of data from those of parameters, gradients and optimizer state.
        given: what the inputs are in the call.
        parts: ids of the tensors of which each rank holds a part, so that none knows the whole.

    Raises:
        DataDependentError: it follows from tensors that this rank does not hold, or from a gradient to come.
    """
    needed = ancestors([node], MAX_NODES)
    if not _can_be_known(needed, is_data):
        return None
    read = {item.node: index for index, item in enumerate(inputs) if item.node in needed}
    for index in read.values():
        if id(inputs[index].value) in parts:
            raise DataDependentError(
                f"Python decides on the values of {inputs[index].source}, of which each rank holds a part",
                line,
                "use torch.where, decide outside of the step, or give every rank the whole batch: batch=ws.Replicate()",
            )
    ordered = [n for n in node.graph.nodes if n in needed]
    if any(n.op == "placeholder" and n not in read for n in ordered):
        what = "the backward decides on a gradient, which is only known when it runs"
        raise DataDependentError(what, line, "use torch.where")
    graph, copies = copy_graph(ordered)
    for copied in graph.nodes:
        copied.args = decided(copied.args)
        copied.meta.clear()  # records hold fake tensors, and are of no use here
    graph.output(copies[node])
    module = lazy_graph_module(constants, graph)
    positions = tuple(read[n] for n in ordered if n.op == "placeholder")
    with no_modes():
        expected = module(*(given[inputs[i].node] for i in positions))
    text = in_words(ordered, {n: str(inputs[index].source) for n, index in read.items()})[node]
    return Predicate(module, positions, expected, text if len(text) <= MAX_TEXT else f"{text[:157]}…", line)


def follows_from_numbers(nodes: Iterable[fx.Node]) -> bool:
    """Whether the values of nodes follow from Python's numbers alone, so that they are the same at each call."""
    needed = ancestors(nodes, MAX_NODES)
    return len(needed) <= MAX_NODES and _is_constant(needed)


def unknown(line: str) -> DataDependentError:
    """The error of a decision on what is only known when the step runs."""
    what, remedy = "Python decides on a value that is only known when the step runs", REMEDY
    if called_from(GradScaler.step, GradScaler.unscale_, GradScaler.update):
        what = "GradScaler decides whether to skip the optimizer's step, by gradients only known when the step runs"
        remedy = "give the optimizer fused=True, which decides on the device, or compile without fullgraph=True"
    return DataDependentError(what, line, remedy)


def _can_be_known(nodes: set[fx.Node], is_data: Callable[[fx.Node], bool]) -> bool:
    """Whether the value that follows from the nodes may be computed before each call."""
    if len(nodes) > MAX_NODES:
        return False
    return _is_constant(nodes) or (all(_is_known(n, is_data) for n in nodes) and _is_small(nodes, MAX_ELEMENTS))


def _is_effectful(node: fx.Node) -> bool:
    return is_effectful(node) and not draws_nothing(node)


def _is_constant(nodes: set[fx.Node]) -> bool:
    """Whether a value follows from Python's numbers alone."""
    pure = all(n.op != "placeholder" and not _is_effectful(n) and n.target not in UNDEFINED for n in nodes)
    return pure and _is_small(nodes, MAX_CONSTANT_ELEMENTS)


def _is_known(node: fx.Node, is_data: Callable[[fx.Node], bool]) -> bool:
    """Whether one step of a decision is cheap to repeat before each call."""
    tensors = [*tensors_of(info(node).value)]
    if any(t.device.type != "cpu" for t in tensors) or _is_effectful(node) and node.op != "placeholder":
        return False
    if all(t.numel() == 1 for t in tensors) or node.op == "get_attr":
        return node.target not in UNDEFINED
    if node.op == "placeholder":
        return is_data(node)
    if isinstance(node.target, OpOverload) and node.target.is_view:
        return node.target not in OFFSETS
    return node.target in CHEAP or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_small(nodes: set[fx.Node], limit: int) -> bool:
    return sum(t.numel() for n in nodes for t in tensors_of(info(n).value)) <= limit


UNDEFINED = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}

COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**"}


def in_words(ordered: Sequence[fx.Node], texts: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """What nodes compute, in words, cut where they are long; ``texts`` has those of inputs, and is added to."""
    for node in ordered:
        texts.setdefault(node, _text(node, texts)[: MAX_TEXT + 1])
    return texts


def _text(node: fx.Node, texts: dict[fx.Node, str]) -> str:
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    args = [texts.get(a, "…") if isinstance(a, fx.Node) else repr(a) for a in node.args]
    if name in COMPARISONS and len(args) == 2:
        return f"{args[0]} {COMPARISONS[name]} {args[1]}"
    if name in ARITHMETIC and len(args) == 2:
        return f"({args[0]} {ARITHMETIC[name]} {args[1]})"
    if name == "_local_scalar_dense":
        return f"({args[0]}).item()" if " " in args[0] else f"{args[0]}.item()"
    return f"{name}({', '.join(args)})"
