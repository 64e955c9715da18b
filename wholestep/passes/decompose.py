"""Operators in terms of others, by a table that the user brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.errors import UnsupportedError
from wholestep.ir import NodeInfo, Pass, StepGraph, dead_code, fake_tensors, info, set_info
from wholestep.torch_compat import FakeTensor, FakeTensorMode, OpOverload, make_fx

Table = Mapping[Any, Callable[..., Any]]


def decompose(table: Table) -> Pass:
    """A pass that replaces each operator of a table by what its function does.

    Args:
        table: operator overload -> a function of the same arguments, as torch's own tables are; it may change
            rounding, and where it returns NotImplemented the operator stays.
    """
    return partial(_decompose, table)


def _decompose(table: Table, step: StepGraph) -> StepGraph:
    fakes = (fake for node in step.graph.nodes if node.op != "output" for fake in fake_tensors(info(node).value))
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in table and mode is not None:
            inside = _expanded(node, table, mode)
            if inside is not None:
                _inline(step, node, inside)
    return dead_code(step)


def _expanded(node: fx.Node, table: Table, mode: FakeTensorMode) -> fx.GraphModule | None:
    """A node's operator as a graph over the tensors among its arguments; None where the table leaves it as it is."""
    operands = node.all_input_nodes
    declined = False

    def call(*tensors: Any) -> Any:
        nonlocal declined
        given = dict(zip(operands, tensors, strict=True))
        args, kwargs = _filled((node.args, node.kwargs), given)
        result = table[node.target](*args, **kwargs)
        declined = result is NotImplemented
        return () if declined else tuple(result) if isinstance(result, tuple) else result

    with torch.no_grad(), mode:
        values = [info(n).value for n in operands]
        inside = make_fx(call, decomposition_table=dict(table), tracing_mode="real")(*values)
    return None if declined else inside


def _filled(value: Any, given: dict[fx.Node, Any]) -> Any:
    """Arguments with values in the place of nodes, in containers that a function may change."""
    if isinstance(value, (list, tuple)):
        items = [_filled(v, given) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: _filled(v, given) for k, v in value.items()}
    return given[value] if isinstance(value, fx.Node) else value


def _inline(step: StepGraph, node: fx.Node, inside: fx.GraphModule) -> None:
    old = info(node)
    copied: dict[fx.Node, Any] = dict(
        zip((n for n in inside.graph.nodes if n.op == "placeholder"), node.all_input_nodes, strict=True)
    )
    for inner in inside.graph.nodes:
        if inner.op in ("placeholder", "output"):
            continue
        if isinstance(inner.target, OpOverload) and inner.target._schema.is_mutable:
            raise UnsupportedError(f"the decomposition of {node.target} writes in place, by {inner.target}", old.where)
        with step.graph.inserting_before(node):
            if inner.op == "get_attr":
                name = f"{node.name}_{inner.target}"
                setattr(step.gm, name, getattr(inside, str(inner.target)))
                copied[inner] = step.graph.get_attr(name)
            else:
                copied[inner] = step.graph.node_copy(inner, copied.__getitem__)
        copied[inner].meta = {}
        set_info(copied[inner], NodeInfo(inner.meta.get("val"), old.phase, old.seq, old.where, old.module))
    (out,) = (n for n in inside.graph.nodes if n.op == "output")
    results = fx.map_arg(out.args[0], copied.__getitem__)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            step.graph.erase_node(user)
    step.graph.erase_node(node)
