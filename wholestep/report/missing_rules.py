"""Operators that no sharding rule knows: they run whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from wholestep.ir import GETITEM, StepGraph, fake_tensors, info
from wholestep.spmd.plans.constraint_ops import place
from wholestep.spmd.rules import name_of, rule_of


@dataclass(frozen=True)
class Unruled:
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


def unruled(step: StepGraph) -> list[Unruled]:
    """The operators without a rule in a graph of the whole step, those with most bytes first."""
    found: dict[str, Unruled] = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or node.target in (GETITEM, place) or not _has_tensors(node):
            continue
        if rule_of(node.target) is None:
            name, record = name_of(node.target), info(node)
            nbytes = sum(t.numel() * t.itemsize for o in node.all_input_nodes for t in fake_tensors(info(o).value))
            old = found.get(name) or Unruled(name, 0, 0, record.where, record.module)
            found[name] = Unruled(name, old.count + 1, old.nbytes + nbytes, old.where, old.module)
    return sorted(found.values(), key=lambda one: -one.nbytes)


def _has_tensors(node: fx.Node) -> bool:
    taken = any(next(fake_tensors(info(o).value), None) is not None for o in node.all_input_nodes)
    return taken and next(fake_tensors(info(node).value), None) is not None
