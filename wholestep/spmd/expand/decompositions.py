"""Decompositions: a call in terms of others, torch's own or a rule's, which are expanded in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep.functional import Functionalized
from wholestep.inline import Inliner, run_on_fakes
from wholestep.ir import NodeInfo, info, set_info
from wholestep.nested import tensors_of
from wholestep.spmd.expand.calls import Call, exchanged
from wholestep.torch_compat import decomposition_of, lazy_graph_module


class Decomposition(NamedTuple):
    """What a call comes down to.

    Attributes:
        operands: a node for each of the call's.
        calls: in order.
        results: the nodes that give the call's tensors.
    """

    operands: list[fx.Node]
    calls: list[fx.Node]
    results: list[fx.Node]


def can_decompose(call: Call) -> bool:
    """False for a number that the step computes, and where a rank may hold nothing: it would have other calls."""
    arguments = (*call.args, *call.kwargs.values())
    tensors = all(isinstance(info(a).value, torch.Tensor) for a in arguments if isinstance(a, fx.Node))
    return tensors and all(value.numel() for value in call.values)


def decomposition(call: Call, record: NodeInfo, function: Callable[..., Any] | None = None) -> Decomposition:
    """The calls that one comes down to.

    Args:
        record: for the calls, but for their values.
        function: see `Decomposed`.
    """
    graph, record = fx.Graph(), replace(record, value=None)
    operands = [set_info(graph.placeholder(f"x{i}"), NodeInfo(v)) for i, v in enumerate(call.values)]
    args, kwargs = exchanged(call.args, call.kwargs, operands, lambda number: number)
    node = set_info(graph.call_function(call.target, args, kwargs), replace(record, value=call.result))
    inliner = Inliner(lazy_graph_module(torch.nn.Module(), graph), node, record)
    results = list(tensors_of(run_on_fakes(node, partial(function, call) if function else _torchs(call), inliner)))
    found = Decomposition(operands, [], [inliner.nodes[id(result)] for result in results])
    for one in reversed(graph.nodes):
        if one.op == "call_function" and one is not node:
            if one.users or one in found.results:
                found.calls.insert(0, one)
            else:
                graph.erase_node(one)
    return found


def _torchs(call: Call) -> Callable[..., Any]:
    if not isinstance(call.target, Functionalized):
        return decomposition_of(call.target)
    # batch norm, the one such operator with a rule: with running statistics, or without
    aten, tracks = torch.ops.aten, call.argument("running_mean") is not None
    return decomposition_of((aten._native_batch_norm_legit_functional if tracks else aten.native_batch_norm).default)
