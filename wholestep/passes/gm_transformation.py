"""A user's function on the graph as a pass: what it adds becomes calls of ATen operators with records of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from wholestep.errors import GraphError
from wholestep.ir import GETITEM, NodeInfo, Phase, StepGraph, fake_tensors, info, set_info
from wholestep.torch_compat import OpOverload, TorchDispatchMode

Transform = Callable[[fx.GraphModule], fx.GraphModule]


def transformed(step: StepGraph, transform: Transform, name: str) -> StepGraph:
    """Has a user's function change a graph.

    It may add calls of ATen operators, and of functions and tensor methods that come down to such.

    Args:
        name: of the stage; the place that added nodes are said to come from.

    Raises:
        TypeError: it gives no graph module.
        GraphError: it adds what cannot run on the values that go in there.
    """
    gm = transform(step.gm)
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(f"{name} gives a {type(gm).__name__}; the torch.fx.GraphModule to run is required")
    phase: Phase = "forward"
    for node in gm.graph.nodes:  # passes over what is erased on the way
        if "info" in node.meta:
            phase = info(node).phase
        elif node.op in ("call_function", "call_method"):
            _take_up(gm, node, NodeInfo(None, phase, where=name))
    gm.recompile()
    return StepGraph(gm, step.signature, name)


def _take_up(gm: fx.GraphModule, node: fx.Node, record: NodeInfo) -> None:
    """Gives an added call its record; one that is no operator becomes those that it runs."""
    values = [info(operand).value for operand in node.all_input_nodes]
    tensor = next(fake_tensors(values), None)
    inlined = _Inlined(gm.graph, node, record)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if tensor is not None:
            stack.enter_context(tensor.fake_mode)  # type: ignore[attr-defined]
        if tensor is not None and not isinstance(node.target, OpOverload):
            stack.enter_context(inlined)
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), inlined.value_of)
            if node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            raise GraphError(f"{record.where} adds {node.format_node()}, which fails: {error}") from error
    if inlined.nodes:
        inlined.stand_in(result)
    else:
        set_info(node, replace(record, value=result))


class _Inlined(TorchDispatchMode):
    """Adds each operator that runs to a graph, in the place of one call."""

    def __init__(self, graph: fx.Graph, call: fx.Node, record: NodeInfo) -> None:
        super().__init__()
        self.graph, self.call, self.record = graph, call, record
        self.given: dict[int, fx.Node] = {}
        self.nodes: dict[int, fx.Node] = {}
        self.keep: list[Any] = []

    def value_of(self, node: fx.Node) -> Any:
        """What goes into the call for one of its arguments."""
        value = info(node).value
        self.given |= {id(value): node}
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = self.nodes | self.given
        named: Any = map_aggregate((tuple(args), dict(kwargs or {})), lambda x: known.get(id(x), x))
        with self.graph.inserting_before(self.call):
            made = self.graph.call_function(func, tuple(named[0]), named[1])
            set_info(made, replace(self.record, value=result))
            self._note(result, made)
        return result

    def _note(self, value: Any, node: fx.Node) -> None:
        self.keep.append(value)
        self.nodes[id(value)] = node
        if isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                item = self.graph.call_function(GETITEM, (node, index))
                self._note(part, set_info(item, replace(self.record, value=part)))

    def stand_in(self, result: Any) -> None:
        """Who read the call reads what was added for it."""
        known = self.nodes | self.given
        if id(result) in known:
            self.call.replace_all_uses_with(known[id(result)])
        for user in list(self.call.users):  # it gives several tensors
            if user.target is not GETITEM or id(result[user.args[1]]) not in known:
                raise GraphError(f"{self.record.where}: what {self.call.format_node()} gives is no tensor, nor some")
            user.replace_all_uses_with(known[id(result[user.args[1]])])
            self.graph.erase_node(user)
        self.graph.erase_node(self.call)
