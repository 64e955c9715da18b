"""A user's functions as passes: on the graph, and in place of operators, by a table.

What a function on the graph adds becomes calls of ATen operators with records of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from wholestep.errors import GraphError
from wholestep.inline import Inliner, Table, run_on_fakes
from wholestep.ir import NodeInfo, Phase, StepGraph, dead_code, info, set_info
from wholestep.torch_compat import OpOverload

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
            _add_record(gm, node, NodeInfo(None, phase, where=name))
    gm.recompile()
    return StepGraph(gm, step.signature, name)


def _add_record(gm: fx.GraphModule, node: fx.Node, record: NodeInfo) -> None:
    """Gives an added call its record; one that is no operator becomes those that it runs."""
    inliner = None if isinstance(node.target, OpOverload) else Inliner(gm, node, record)

    def called(*args: Any, **kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        result = run_on_fakes(node, called, inliner)
    except Exception as error:
        raise GraphError(f"{record.where} adds {node.format_node()}, which fails: {error}") from error
    if inliner is not None and inliner.added:
        inliner.stand_in(result)
    else:
        set_info(node, replace(record, value=result))


def decompose(step: StepGraph, table: Table) -> StepGraph:
    """Replaces each operator of a table by what its function does.

    Args:
        table: operator overload -> a function of the same arguments, as torch's own tables are; it may change
            rounding, and where it returns NotImplemented the operator stays.
    """
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in table:
            inliner = Inliner(step.gm, node, replace(info(node), value=None), table)
            result = run_on_fakes(node, table[node.target], inliner)
            if result is not NotImplemented:
                inliner.stand_in(result)
    return dead_code(step)
