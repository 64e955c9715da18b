"""Operators in terms of others, by a table that the user brings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from wholestep.inline import Inliner, Table, run_on_fakes
from wholestep.ir import Pass, StepGraph, dead_code, info


def decompose(table: Table) -> Pass:
    """A pass that replaces each operator of a table by what its function does.

    Args:
        table: operator overload -> a function of the same arguments, as torch's own tables are; it may change
            rounding, and where it returns NotImplemented the operator stays.
    """
    return partial(_decompose, table)


def _decompose(table: Table, step: StepGraph) -> StepGraph:
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in table:
            inliner = Inliner(step.gm, node, replace(info(node), value=None), table)
            result = run_on_fakes(node, table[node.target], inliner)
            if result is not NotImplemented:
                inliner.stand_in(result)
    return dead_code(step)
