"""Passes that keep every bit: equal values computed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from wholestep.ir import Pass, StepGraph, check, dead_code, is_effectful
from wholestep.torch_compat import OpOverload


def run_passes(step: StepGraph, passes: Iterable[Pass]) -> StepGraph:
    """Runs passes one after another and checks the graph after each.

    Raises:
        GraphError: a pass broke an invariant; names the pass.
    """
    for one in passes:
        name = getattr(one, "__name__", getattr(getattr(one, "func", one), "__name__", repr(one)))
        step = one(step)
        step.stage = name
        check(step, name)
    return step


def same_values(step: StepGraph) -> StepGraph:
    """Computes equal values once (common sub-expressions): same operator, same arguments, no effect.

    Uninitialised memory is never shared. Sharing is safe since no node of the graph writes.
    """
    known: dict[Any, fx.Node] = {}
    for node in list(step.graph.nodes):
        if node.op != "call_function" or is_effectful(node) or "empty" in str(node.target):
            continue
        if isinstance(node.target, OpOverload) and node.target.namespace != "aten":
            continue  # collectives: every rank must issue the same ones
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            step.graph.erase_node(node)
    return dead_code(step)


def _frozen(value: Any) -> Any:
    """A hashable stand-in for arguments that tells 1 from 1.0 and from True."""
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    if isinstance(value, fx.Node):
        return value
    return (type(value).__name__, repr(value))
