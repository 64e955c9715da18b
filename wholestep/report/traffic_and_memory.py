"""What a rank sends, with bytes and places; operators without a sharding rule; peak memory by what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import fx

from wholestep import comm
from wholestep.errors import GraphError
from wholestep.functional import base_name, is_collective
from wholestep.ir import GETITEM, InputKind, Phase, StepGraph, arguments, info, nbytes
from wholestep.lower.plan.peak_memory import peak_usage
from wholestep.nested import tensors_of
from wholestep.spmd.expand.graph_edits import sharding_constraint
from wholestep.spmd.rules import name_of, rule_of


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one axis, from one place in the step.

    Attributes:
        kind: the operator's name, such as ``all_reduce``.
        axis: of the mesh; the group's own name where it is none of the mesh's.
        ranks: how many take part.
        count: how many such collectives.
        nbytes: sent by this rank, by all of them.
        phase: when they begin.
        where: the user's ``file:line`` whose value is sent, first among them.
        module: path of the module that ran it.
        tensors: how many tensors of the step they carry.
    """

    kind: str
    axis: str
    ranks: int
    count: int
    nbytes: float
    phase: Phase
    where: str
    module: str
    tensors: int

    def __add__(self, other: Traffic) -> Traffic:
        """Both together, in the place of the first."""
        count, nbytes, tensors = self.count + other.count, self.nbytes + other.nbytes, self.tensors + other.tensors
        return replace(self, count=count, nbytes=nbytes, tensors=tensors)


# Bytes that a rank sends for an operand of B bytes, in a group of n, by the usual algorithms: rings, which are optimal
# in bandwidth. ``root`` says whether the rank is the one that the collective starts from or ends at.
Cost = Callable[[float, int, bool], float]
COSTS: dict[str, Cost] = {
    "all_reduce": lambda b, n, root: 2 * (n - 1) / n * b,
    "reduce_scatter": lambda b, n, root: (n - 1) / n * b,
    "share_rows": lambda b, n, root: (n - 1) / n * b,
    "all_gather": lambda b, n, root: (n - 1) * b,
    "all_to_all": lambda b, n, root: (n - 1) / n * b,
    "broadcast": lambda b, n, root: b if root else 0,
    "reduce": lambda b, n, root: 0 if root else b,
    "gather": lambda b, n, root: 0 if root else b,
    "scatter": lambda b, n, root: (n - 1) * b if root else 0,
    "send": lambda b, n, root: b,
    "recv": lambda b, n, root: 0,
    "barrier": lambda b, n, root: 0,
}
_ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}


def collective_traffic(step: StepGraph, axes: Mapping[str, str]) -> list[Traffic]:
    """The collectives of a graph, those of equal kind, axis, phase and place together, in order.

    Args:
        axes: group's name -> axis.

    Raises:
        GraphError: an operator without a row in `COSTS`: our mistake.
    """
    return _together(_traffic(node, axes) for node in step.graph.nodes if collective_name(node))


def _traffic(node: fx.Node, axes: Mapping[str, str]) -> Traffic:
    name, group, record = collective_name(node), comm.get_group(arguments(node)["group"]), info(node)
    axis, cost = axes.get(group.group_name, group.group_name), _cost(node, name, group)
    tensors = len(record.placement) if isinstance(record.placement, tuple) else 1
    return Traffic(name, axis, group.size(), 1, cost, record.phase, *origin(node), tensors)


def _together(rows: Iterable[Traffic]) -> list[Traffic]:
    """Those of equal kind, axis, phase and place in one row, where the first of them is."""
    found: dict[tuple[Any, ...], Traffic] = {}
    for row in rows:
        key = row.kind, row.axis, row.phase, row.where, row.module
        found[key] = found[key] + row if key in found else row
    return list(found.values())


def collective_name(node: fx.Node) -> str:
    """The name of the collective that a call starts; "" for any other call."""
    return base_name(node.target).removesuffix("_") if is_collective(node.target) else ""  # type: ignore[arg-type]


def _cost(node: fx.Node, name: str, group: comm.ProcessGroup) -> float:
    if name not in COSTS:
        raise GraphError(f"report.traffic_and_memory.COSTS has no row for {node.target}")
    operand = next(tensors_of(info(node.all_input_nodes[0]).value))
    root = name in _ROOTS and arguments(node)[_ROOTS[name]] == group.rank()
    return COSTS[name](operand.numel() * operand.itemsize, group.size(), root)


def origin(node: fx.Node) -> tuple[str, str]:
    """The user's line and the module path of a call.

    A plan's own calls have none: then those of the nearest call whose value it works on, or, where that is an input of
    the step, of the nearest call that it works for.
    """
    return _nearest(node, lambda n: n.all_input_nodes) or _nearest(node, lambda n: [*n.users]) or ("", "")


def _nearest(node: fx.Node, beside: Callable[[fx.Node], list[fx.Node]]) -> tuple[str, str] | None:
    queue, seen = [node], {node}
    for one in queue:
        record = info(one) if one.op == "call_function" else None
        if record is not None and (record.where or record.module):
            return record.where, record.module
        fresh = [n for n in beside(one) if n not in seen]
        seen |= set(fresh)
        queue += fresh
    return None


def per_axis(rows: Iterable[Traffic]) -> dict[str, list[Traffic]]:
    """By axis, those of one kind together, whatever place they come from."""
    found: dict[str, list[Traffic]] = {}
    phase: Phase = "forward"  # of all, whenever they begin
    for row in _together(replace(row, phase=phase, where="", module="") for row in rows):
        found.setdefault(row.axis, []).append(row)
    return found


Kind = Literal["parameters", "gradients", "states", "activations", "buffers", "batch", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_INPUTS: dict[InputKind, Kind] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "grad": "gradients",
    "state": "states",
    "tensor": "other",
    "batch": "batch",
}


GATHERING = ("all_gather", "share_rows")


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds when it holds most.

    Attributes:
        by_class: what is held then: inputs of the step, and what it computes. Parameters that were gathered for use
            count as parameters, buckets of gradients as gradients, what the optimizer computes in passing as other.
        phase, where, module: what runs then.
        arena: bytes that the program keeps between calls for its intermediate values; those that are live at the peak
            are counted in `by_class`.
    """

    by_class: dict[Kind, int]
    phase: str
    where: str
    module: str
    arena: int

    @property
    def total(self) -> int:
        """All classes together."""
        return sum(self.by_class.values())


def memory_of(step: StepGraph) -> Memory:
    """The memory of a graph as the `aten` backend runs it."""
    held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    kinds = {node.name: item.kind for node, item in zip(step.placeholders, step.signature.inputs, strict=True)}
    for node in step.placeholders:
        if isinstance(info(node).value, torch.Tensor):
            held[_INPUTS[kinds[node.name]]] += nbytes(info(node).value)
    found = peak_usage(step)
    gradients = {name for g in step.signature.gradients for name in (g.before, g.after)}
    for nodes, _, size in found.live:
        held[_class_of(nodes, gradients, kinds)] += size
    phase, place = (info(found.at).phase, origin(found.at)) if found.at is not None else ("forward", ("", ""))
    return Memory(held, phase, *place, found.arena)


def _class_of(nodes: list[fx.Node], gradients: set[str | None], kinds: dict[str, InputKind]) -> Kind:
    """What a piece of memory is for, by the values that lie in it over time."""
    sent = [(collective_name(node), node) for node in nodes]
    if any(name in GATHERING and kinds.get(_behind(node).name) == "parameter" for name, node in sent):
        return "parameters"
    phases = {info(node).phase for node in nodes}
    if any(node.name in gradients for node in nodes) or any(name and info(n).phase == "backward" for name, n in sent):
        return "gradients"
    return "other" if phases == {"optimizer"} else "activations"


def _behind(node: fx.Node) -> fx.Node:
    """The value that a chain of calls begins with."""
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class MissingRule:
    """Calls of one operator without a rule.

    Attributes:
        operator: its name, as in the table of rules.
        count: of its calls.
        nbytes: of the whole operands, which every rank must have for them.
        where, module: of the first call.
    """

    operator: str
    count: int
    nbytes: int
    where: str
    module: str


def missing_rules(step: StepGraph) -> list[MissingRule]:
    """The operators without a rule in a graph of the whole step, those with most bytes first."""
    found: dict[str, MissingRule] = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or node.target in (GETITEM, sharding_constraint) or not _has_tensors(node):
            continue
        if rule_of(node.target) is None:
            name, record = name_of(node.target), info(node)
            old = found.get(name, MissingRule(name, 0, 0, record.where, record.module))
            taken = sum(nbytes(info(operand).value) for operand in node.all_input_nodes)
            found[name] = replace(old, count=old.count + 1, nbytes=old.nbytes + taken)
    return sorted(found.values(), key=lambda one: -one.nbytes)


def _has_tensors(node: fx.Node) -> bool:
    taken = any(next(tensors_of(info(o).value), None) is not None for o in node.all_input_nodes)
    return taken and next(tensors_of(info(node).value), None) is not None
