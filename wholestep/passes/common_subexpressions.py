"""Common sub-expressions: equal values are computed once. Keeps every bit, since no node of a graph writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from wholestep.ir import GETITEM, StepGraph, dead_code, info, is_effectful
from wholestep.torch_compat import OpOverload


def same_values(step: StepGraph) -> StepGraph:
    """Computes equal values once: same operator, same arguments, no effect. Uninitialised memory is never shared."""
    return dead_code(_merge(step, lambda node: not isinstance(node.target, OpOverload) or _is_shared(node.target)))


def same_host_numbers(step: StepGraph) -> StepGraph:
    """Computes equal host numbers once (forty parameters have one ``1 - lr * weight_decay``), equal getitems too."""
    return _merge(step, lambda node: node.target is GETITEM or isinstance(info(node).value, (int, float)))


def _is_shared(op: OpOverload) -> bool:
    """False for memory without contents, and for collectives: every rank must issue the same ones."""
    return op.namespace == "aten" and "empty" not in str(op)


def _merge(step: StepGraph, may: Callable[[fx.Node], bool]) -> StepGraph:
    known: dict[Any, fx.Node] = {}
    for node in list(step.graph.nodes):
        if node.op == "call_function" and not is_effectful(node) and may(node):
            first = known.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                step.graph.erase_node(node)
    return step


def _frozen(value: Any) -> Any:
    """A hashable stand-in for arguments that tells 1 from 1.0 and from True."""
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))
