"""Operators without a sharding rule: they run replicated on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from wholestep.ir import GETITEM, StepGraph, info, nbytes
from wholestep.nested import tensors_of
from wholestep.spmd.expand.graph_edits import sharding_constraint
from wholestep.spmd.rules import name_of, rule_of


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
