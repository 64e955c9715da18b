"""Decisions that Python takes on host numbers: `if weight_decay != 0`, `if rho_t > 5`.

Such a decision is part of the captured program. It is allowed when the number follows from lifted numbers
and single-element CPU tensors that the step is given, so that it can be computed before the step runs: it
becomes a guard. A decision on anything that the step computes from data is an error, unless the caller asked for
such guards too (`guard_data`): then whatever the number or shape follows from is computed once more before each call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from wholestep.errors import DataDependentError
from wholestep.ir import is_effectful
from wholestep.torch_compat import no_modes

aten = torch.ops.aten

MAX_NODES = 200

# Where an offset stands that an operator counts from the start of the memory, and a graph from the operand's first
# element.
OFFSETS = {aten.as_strided.default: 3, aten.as_strided_copy.default: 3, aten.as_strided_scatter.default: 4}


class LiftedLike(Protocol):
    """What a decision needs of an input: its node, where it comes from and its value now."""

    node: fx.Node
    source: Any
    value: Any


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

    def holds(self, values: Sequence[Any]) -> bool:
        with torch.no_grad():
            return _same(self.module(*(values[i] for i in self.inputs)), self.expected)

    @property
    def reason(self) -> str:
        found = not self.expected if isinstance(self.expected, bool) else "another"
        return f"{self.text}: expected {self.expected}, found {found} (decided at {self.line})"


def _same(found: Any, expected: Any) -> bool:
    """Equality, with each NaN like any other and the two zeros apart, as code that divides by them sees them."""
    return type(found) is type(expected) and repr(found) == repr(expected)


def geometry(result: Any) -> list[tuple[Any, ...]]:
    """Size, strides, dtype and device of each tensor in an operator's result."""
    found = [result] if isinstance(result, torch.Tensor) else result
    return [((*tensor.shape,), tensor.stride(), tensor.dtype, tensor.device) for tensor in found]


def decide(
    node: fx.Node, lifted: Sequence[LiftedLike], constants: dict[str, torch.Tensor], line: str, guard_data: bool = False
) -> Predicate:
    """Computes a decision now, from the real inputs, and makes it a guard.

    Args:
        node: gives the number, or the sizes, on which Python decides.
        guard_data: it may follow from any tensor; else from single-element inputs alone.

    Raises:
        DataDependentError: it needs more than that, or random numbers.
    """
    needed = _slice(node, line, guard_data)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    positions = {item.node: index for index, item in enumerate(lifted)}
    inputs: list[int] = []
    for old in needed:
        copies[old] = graph.node_copy(old, lambda n: copies[n])
        if old.target in OFFSETS:
            _count_from_first(graph, copies[old], OFFSETS[old.target])
        if old.op == "placeholder":
            inputs.append(positions[old])
    graph.output(copies[node])
    module = fx.GraphModule(constants, graph)
    with no_modes():
        expected = module(*(lifted[i].value for i in inputs))
    names = {item.node: str(item.source) for item in lifted}
    return Predicate(module, tuple(inputs), expected, _text(node, names), line)


def _count_from_first(graph: fx.Graph, node: fx.Node, place: int) -> None:
    with graph.inserting_before(node):
        start = graph.call_function(torch.Tensor.storage_offset, (node.args[0],))
        offset = graph.call_function(operator.add, (start, node.args[place]))
    node.update_arg(place, offset)


def _slice(node: fx.Node, line: str, guard_data: bool) -> list[fx.Node]:
    """All nodes that a number follows from, in order."""
    needed: set[fx.Node] = set()
    queue = [node]
    while queue:
        current = queue.pop()
        if current in needed:
            continue
        needed.add(current)
        value = current.meta["info"].value
        large = len(needed) > MAX_NODES or any(t.numel() != 1 or t.device.type != "cpu" for t in _tensors(value))
        if current.op == "call_function" and is_effectful(current) or large and not guard_data:
            raise DataDependentError(
                "Python decides on a value that is only known when the step runs",
                line,
                "use torch.where, or take the decision outside of the step",
            )
        queue.extend(current.all_input_nodes)
    return [n for n in node.graph.nodes if n in needed]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "lt": "<", "le": "<=", "gt": ">",
           "ge": ">=", "eq": "==", "ne": "!="}  # fmt: skip


def _text(node: Any, names: dict[fx.Node, str]) -> str:
    if not isinstance(node, fx.Node):
        return repr(node)
    if node in names:
        return names[node]
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    args = [_text(a, names) for a in node.args]
    if name in SYMBOLS and len(args) == 2:
        return f"{args[0]} {SYMBOLS[name]} {args[1]}" if name in ("lt", "le", "gt", "ge", "eq", "ne") else (
            f"({args[0]} {SYMBOLS[name]} {args[1]})"
        )  # fmt: skip
    if name == "_local_scalar_dense":
        return f"{args[0]}.item()"
    return f"{name}({', '.join(args)})"
