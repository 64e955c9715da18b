"""Operators in terms of others, by a table that the user brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.errors import UnsupportedError
from wholestep.ir import NodeInfo, StepGraph, dead_code, fake_tensors, info, set_info
from wholestep.passes.cleanup import Pass
from wholestep.torch_compat import FakeTensor, OpOverload, make_fx

Table = Mapping[Any, Callable[..., Any]]


def decompose(table: Table) -> Pass:
    """A pass that replaces each operator of a table by what its function does.

    Args:
        table: operator overload -> a function of the same arguments, as in `torch._decomp`; it may change rounding.
    """
    return partial(_decompose, table)


def _decompose(table: Table, step: StepGraph) -> StepGraph:
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in table:
            _inline(step, node, _expanded(node, table))
    return dead_code(step)


def _expanded(node: fx.Node, table: Table) -> fx.GraphModule:
    """A node's operator as a graph over the tensors among its arguments."""
    operands = node.all_input_nodes
    values = [info(n).value for n in operands]

    def call(*tensors: Any) -> Any:
        given = dict(zip(operands, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return table[node.target](*args, **kwargs)

    mode = next((t.fake_mode for v in values for t in fake_tensors(v) if isinstance(t, FakeTensor)), None)
    if mode is None:
        raise UnsupportedError(f"{node.target} reads no tensor, and is in the decomposition table", info(node).where)
    with torch.no_grad(), mode:
        return make_fx(call, decomposition_table=dict(table), tracing_mode="real")(*values)


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
