"""Inlining: one call of a graph is replaced by the operators that a function runs on its operands.

May import: errors, ir, nested, torch_compat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from wholestep.errors import GraphError, UnsupportedError
from wholestep.ir import GETITEM, NodeInfo, info, set_info
from wholestep.nested import map_leaves, tensors_of
from wholestep.torch_compat import FakeTensor, TorchDispatchMode

Table = Mapping[Any, Callable[..., Any]]


def run_on_fakes(node: fx.Node, function: Callable[..., Any], inliner: Inliner | None = None) -> Any:
    """What a function gives for the fake values of a call's operands."""
    operands = [info(operand).value for operand in node.all_input_nodes]
    known = [*operands, info(node).value] if "info" in node.meta else operands
    tensor = next(tensors_of(known), None)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if isinstance(tensor, FakeTensor):
            stack.enter_context(tensor.fake_mode)
            if inliner is not None:
                stack.enter_context(inliner)
        of = {operand: info(operand).value for operand in node.all_input_nodes} if inliner is None else inliner.values
        # in containers that a function may change
        given = map_leaves(lambda leaf: of[leaf] if isinstance(leaf, fx.Node) else leaf, (node.args, node.kwargs))
        return function(*given[0], **given[1])


def _own(value: Any) -> Any:
    """A fake tensor of its own, like one that may be the value of other nodes too."""
    return value.detach() if isinstance(value, FakeTensor) else value


class Inliner(TorchDispatchMode):
    """Adds each operator that runs to a graph, before one call.

    Args:
        record: of the added nodes, but for their values.
        table: operators that run as these functions, where those do not give NotImplemented.
    """

    def __init__(self, gm: fx.GraphModule, call: fx.Node, record: NodeInfo, table: Table | None = None) -> None:
        super().__init__()
        self.gm, self.call, self.record, self.table = gm, call, record, table or {}
        self.values = {operand: map_leaves(_own, info(operand).value) for operand in call.all_input_nodes}
        self.nodes = {id(value): operand for operand, value in self.values.items()}
        self.keep: list[Any] = []
        self.added = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.table:
            with self:
                result = self.table[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if self.table and func._schema.is_mutable:
            what = f"the decomposition of {self.call.target} writes in place, by {func}"
            raise UnsupportedError(what, where=self.record.where)
        result = func(*args, **(kwargs or {}))
        is_constant = func is torch.ops.aten.lift_fresh.default and id(args[0]) not in self.nodes  # of the function
        with self.gm.graph.inserting_before(self.call):
            if is_constant:
                name = f"{self.call.name}_constant_{self.added}"
                setattr(self.gm, name, args[0])
                made = self.gm.graph.get_attr(name)
            else:
                named: Any = map_aggregate((tuple(args), dict(kwargs or {})), lambda x: self.nodes.get(id(x), x))
                made = self.gm.graph.call_function(func, *named)
            self._note(result, set_info(made, replace(self.record, value=result)))
        return result

    def _note(self, value: Any, node: fx.Node) -> None:
        self.keep.append(value)  # so that no other value has its id
        self.nodes[id(value)] = node
        self.added += 1
        if isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                item = self.gm.graph.call_function(GETITEM, (node, index))
                self._note(part, set_info(item, replace(self.record, value=part)))

    def stand_in(self, result: Any) -> None:
        """Who reads the call reads what was added for it from now on."""
        if id(result) in self.nodes:
            self.call.replace_all_uses_with(self.nodes[id(result)])
        for user in list(self.call.users):  # it gives several tensors
            if user.target is not GETITEM or id(result[user.args[1]]) not in self.nodes:
                raise GraphError(f"{self.record.where}: what {self.call.format_node()} gives is no tensor, nor some")
            user.replace_all_uses_with(self.nodes[id(result[user.args[1]])])
            self.gm.graph.erase_node(user)
        self.gm.graph.erase_node(self.call)
