"""Canonical form: rewrites before lowering that change neither bits nor effects.

A plain and a foreach optimizer, a list and its items, `add.Scalar` and `add.Tensor` are the same graph afterwards.
Common sub-expressions: equal values are computed once, since no node of a graph writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.ir import GETITEM, StepGraph, add_call, arguments, copy_graph, dead_code, info, is_effectful, set_info
from wholestep.torch_compat import OpOverload, lazy_graph_module

aten = torch.ops.aten

# Overloads that only wrap their number into a tensor and call another one.
PLAINER: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}


def copy_step(step: StepGraph) -> StepGraph:
    """A copy whose graph may be rewritten; records are shared."""
    return StepGraph(lazy_graph_module(step.gm, copy_graph(step.graph.nodes)[0]), step.signature, step.stage)


def list_items(step: StepGraph) -> StepGraph:
    """Replaces an operand that is a whole list of results by the list of its items; plain overloads throughout."""
    for node in list(step.graph.nodes):
        if node.op != "call_function" or node.target is GETITEM:
            continue
        node.target = PLAINER.get(node.target, node.target)
        for operand in node.all_input_nodes:
            values = info(operand).value
            if not isinstance(values, (list, tuple)):
                continue
            with step.graph.inserting_before(node):
                picked = [add_call(step.graph, GETITEM, (operand, i)) for i in range(len(values))]
            for one, value in zip(picked, values, strict=True):
                set_info(one, replace(info(operand), value=value))
            items: Any = {operand: picked}
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: items.get(n, n))  # noqa: B023
    return step


def expand_foreach(step: StepGraph) -> StepGraph:
    """Replaces ``_foreach_*`` nodes by one node per tensor, as the CPU kernels do inside.

    Afterwards chains see the same nodes for a plain and for a foreach optimizer.
    """
    for node in list(step.graph.nodes):
        if not isinstance(node.target, OpOverload) or node.target.name() not in _SINGLE:
            continue
        values = info(node).value
        simple = isinstance(values, (list, tuple)) and all(u.target is GETITEM for u in node.users)
        if not simple or any(v.device.type != "cpu" for v in values):
            continue
        target, columns, keyword = _columns(node, len(values))
        for index, value in enumerate(values):
            with step.graph.inserting_before(node):
                args = tuple(c[index] for c in columns)
                keywords = {name: column[index] for name, column in keyword.items()}
                one = add_call(step.graph, target, args, keywords)
            set_info(one, replace(info(node), value=value))
            for user in [u for u in node.users if u.args[1] == index]:
                user.replace_all_uses_with(one)
                step.graph.erase_node(user)
        step.graph.erase_node(node)
    return step


def plain_views(step: StepGraph) -> StepGraph:
    """Drops views that undo each other, as autograd leaves behind a linear layer's gradients.

    ``t(t(x))`` is ``x``; a sum that keeps its dimensions for a view to drop them need not keep them.
    """
    for node in list(step.graph.nodes):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_function":
            continue
        if node.target is aten.t.default and source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])  # type: ignore[arg-type]
            step.graph.erase_node(node)
        elif node.target is aten.view.default and _drops_kept(source, info(node).value):
            source.args = (*source.args[:2], False)
            set_info(source, replace(info(source), value=info(node).value))
            node.replace_all_uses_with(source)
            step.graph.erase_node(node)
    return step


def _drops_kept(source: fx.Node, viewed: torch.Tensor) -> bool:
    """True for a sum of kept dimensions that only a view without them reads."""
    if source.target is not aten.sum.dim_IntList or source.args[2:] != (True,) or len(source.users) != 1:
        return False
    summed, dims = info(source).value, source.args[1]
    if not isinstance(dims, (list, tuple)) or not dims:
        return False
    gone = {int(d) % max(1, summed.dim()) for d in dims}  # type: ignore[arg-type]
    return tuple(viewed.shape) == tuple(size for dim, size in enumerate(summed.shape) if dim not in gone)


# foreach overload -> the overload for one tensor.
_SINGLE: dict[str, Any] = {
    f"aten::_foreach_{name}{kind}": getattr(getattr(aten, name), single)
    for names, kinds, single in (
        (("add", "sub", "mul", "div"), (".List", ".Scalar", ".ScalarList", ".Tensor"), "Tensor"),
        (("lerp",), (".List",), "Tensor"),
        (("lerp",), (".Scalar", ".ScalarList"), "Scalar"),
        (("sqrt", "neg"), ("",), "default"),
        (("maximum",), (".List",), "default"),
        (("addcmul", "addcdiv"), (".Scalar", ".ScalarList"), "default"),
    )
    for name in names
    for kind in kinds
}


def _columns(node: fx.Node, count: int) -> tuple[Any, list[list[Any]], dict[str, list[Any]]]:
    """The overload for one tensor, and its positional and keyword arguments by column."""
    assert isinstance(node.target, OpOverload)
    target = _SINGLE[node.target.name()]
    given = arguments(node)
    columns = {k: list(a) if isinstance(a, (list, tuple)) else [a] * count for k, a in given.items()}
    keywords = {}
    alpha = columns.pop("alpha", [1] * count)
    if any(isinstance(a, fx.Node) or a != 1 for a in alpha):
        keywords["alpha"] = alpha
    if target in (aten.addcmul.default, aten.addcdiv.default):
        keywords["value"] = columns.pop("value", columns.pop("scalars", [1] * count))
    return target, list(columns.values()), keywords


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
        if node.op == "call_function" and may(node) and not is_effectful(node):
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
