"""The view of an operator call that sharding rules take: its arguments and fake values on one device.

Decompositions give a call in terms of others, torch's own or a rule's, which are expanded in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep.functional import Functionalized, bound_arguments, operator_of
from wholestep.inline import Inliner, run_on_fakes
from wholestep.ir import NodeInfo, info, set_info
from wholestep.nested import tensors_of
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Placement, Replicate
from wholestep.torch_compat import decomposition_of, lazy_graph_module

R = Replicate()


@dataclass(frozen=True)
class Call:
    """One call of the step, as one device runs it.

    Attributes:
        target: what is called.
        args, kwargs: its arguments, nodes among them.
        operands: the nodes that give tensors, in the order of the arguments, lists flattened.
        values: theirs, of the whole shapes.
        result: fake value, whole.
        group: the ranks of the axis.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[fx.Node, ...]
    values: tuple[torch.Tensor, ...]
    result: Any
    group: AxisGroup

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors of the result, flattened."""
        return list(tensors_of(self.result))

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the operator's schema; what the schema says where it is not given."""
        found = next((one for one in arguments_of(self.target) if one.name == name), None)
        if found is not None and found.has_default_value():
            default = found.default_value
        return self._given().get(name, default)

    def _given(self) -> dict[str, Any]:
        """The arguments that are given, by name."""
        return bound_arguments(self.target, self.args, self.kwargs)

    def _named(self) -> Iterator[tuple[str, fx.Node]]:
        """The operands with the names of the arguments that they are in."""
        for name, argument in self._given().items():
            for one in argument if isinstance(argument, (list, tuple)) else [argument]:
                if isinstance(one, fx.Node) and isinstance(info(one).value, torch.Tensor):
                    yield name, one

    def placed(self, /, **where: Placement) -> tuple[Placement, ...]:
        """Placements of the operands by the names of their arguments; those that are not named are whole."""
        return tuple(where.get(name, R) for name, _ in self._named())

    def by_name(self, ins: Sequence[Any]) -> dict[str, Any]:
        """What belongs to the operands, by the names of their arguments."""
        return {name: one for (name, _), one in zip(self._named(), ins, strict=True)}

    @classmethod
    def of(cls, node: fx.Node, group: AxisGroup) -> Call:
        """The call that a node of the whole step makes."""
        operands = operands_of(node.args, node.kwargs)
        values = tuple(info(one).value for one in operands)
        return cls(node.target, node.args, node.kwargs, operands, values, info(node).value, group)


def operands_of(args: Any, kwargs: Any) -> tuple[fx.Node, ...]:
    """The nodes among arguments that give tensors, lists flattened."""
    found: list[fx.Node] = []
    fx.map_arg((args, kwargs), found.append)
    return tuple(one for one in found if isinstance(info(one).value, torch.Tensor))


def arguments_of(target: Any) -> list[Any]:
    """The arguments in an operator's schema."""
    return operator_of(target)._schema.arguments  # type: ignore[no-any-return]


def exchanged(
    args: Any, kwargs: Any, local: Iterable[fx.Node], number_of: Callable[[fx.Node], fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with local operands in place of whole ones, and this rank's numbers."""
    operands = iter(local)

    def exchange(one: fx.Node) -> fx.Node:
        return next(operands) if isinstance(info(one).value, torch.Tensor) else number_of(one)

    return fx.map_arg((tuple(args), dict(kwargs)), exchange)  # type: ignore[return-value]


def with_arguments(target: Any, args: Any, kwargs: Any, /, **changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, some exchanged by their names in the operator's schema."""
    if not changed:  # it need not be an operator
        return tuple(args), dict(kwargs)
    given = [*(bound_arguments(target, args, kwargs) | changed).items()]
    return tuple(value for _, value in given[: len(args)]), dict(given[len(args) :])


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
