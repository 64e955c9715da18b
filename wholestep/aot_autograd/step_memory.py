"""Recomputation in the graph of a whole step, so that it fits into a budget of memory.

Which values are in memory at the fullest moment the planner of the lowering says. That they must fit is an inequality
over what is kept for the backward and what is made again there; an integer program finds the least time that meets
those of all plans so far, and the graph that follows is planned anew, until it fits.

Sources: Kelley, "The Cutting-Plane Method for Solving Convex Programs", 1960; Jain et al., "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization", 2020.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import fx

from wholestep.aot_autograd.min_cut import Limit, least_time
from wholestep.aot_autograd.min_cut_partition import draws, is_pure, seconds, value_of, with_bool_masks
from wholestep.errors import MemoryBudgetError
from wholestep.functional import Replayed, get_rng_state
from wholestep.ir import StepGraph, ancestors, check, copy_graph, copy_node, dead_code, info, nbytes, set_info
from wholestep.torch_compat import lazy_graph_module

# Plans a graph; gives the values in memory at its fullest moment, each with the bytes that it takes.
Usage = Callable[[StepGraph], Sequence[tuple[fx.Node, int]]]

ROUNDS = 24  # plans: to make one takes about as long as lowering does
PATIENCE = 2.0  # seconds for each
STRONGER = 0.5  # how much of what a plan is above the budget the next ones aim below it


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory a step may take.

    Attributes:
        amount: bytes of all its tensors, inputs included; or the part that its own values may take of what they take
            without a budget.
        required: whether it is an error when the step takes more.
    """

    amount: int | float
    required: bool = True

    @classmethod
    def of(cls, given: str | float) -> MemoryBudget:
        """From what a user writes: ``"1.5GiB"``, ``"800 MB"``, ``0.6``.

        Raises:
            ValueError: no number, an unknown unit, or a part that is not between 0 and 1.
        """
        if not isinstance(given, str):
            if isinstance(given, bool) or not 0 < given <= 1:
                raise ValueError(f"memory_budget is {given}: a number is a part of the memory, above 0 and at most 1; "
                                 'bytes have a unit, as "1.5GiB"')
            return cls(float(given))
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", given)
        if found is None or found[2].lower() not in UNITS:
            raise ValueError(f'memory_budget is {given!r}: expected a number with {", ".join(SHOWN)}, as "1.5GiB"')
        return cls(int(float(found[1]) * UNITS[found[2].lower()]))

    def limit(self, step: StepGraph, whole: int) -> int:
        """Bytes that the values which a graph computes may take at once.

        Args:
            whole: what they take without a budget.
        """
        if isinstance(self.amount, float):
            return int(self.amount * whole)
        return self.amount - sum(nbytes(info(node).value) for node in step.placeholders)


SHOWN = ("B", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB")
UNITS = {unit.lower(): (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0]) for unit in SHOWN}


def fit_memory(step: StepGraph, budget: MemoryBudget, usage: Usage) -> StepGraph:
    """Computes values of the forward again in the backward, at the least cost at which the step's memory fits.

    Operators give the same bits whenever they run, and random ones run again with the generator's state of then.
    Collectives, operators of the user's own and what reads numbers on the host are never run twice.

    Args:
        step: the graph of one rank, left as it is.
        usage: plans a graph.

    Raises:
        MemoryBudgetError: the budget is required, and below what was found to be possible; it says how much that is.
    """
    fullest = usage(step)
    whole = sum(size for _, size in fullest)
    limit = budget.limit(step, whole)
    best = whole, step
    if whole <= limit:
        return step
    problem = _Problem(with_bool_masks(step))
    limits: list[Limit] = []
    aim = float(limit)
    for _ in range(ROUNDS):
        limits.append(problem.limit(fullest, whole))
        found = problem.solved(limits, aim / whole)
        fullest = usage(found)
        used = sum(size for _, size in fullest)
        best = min(best, (used, found), key=itemgetter(0))
        if used <= limit:
            break
        aim -= STRONGER * (used - limit)
    if budget.required and best[0] > limit:
        raise _too_little(step, budget, limit, best[0], whole)
    return check(best[1], "recomputation")


def _too_little(step: StepGraph, budget: MemoryBudget, limit: int, least: int, whole: int) -> MemoryBudgetError:
    if isinstance(budget.amount, float):
        asked, possible, part = f"{budget.amount:g} of what its values take", f"{least / whole:.3f}", ""
    else:
        inputs = budget.amount - limit
        asked, possible = _size(budget.amount), _size(least + inputs)
        part = f", of which {_size(inputs)} are parameters, states and the batch"
    what = f"memory_budget: the step cannot do with {asked}; the least that was found is {possible}{part}"
    return MemoryBudgetError(f"{what} (without a budget: values of {_size(whole)} at once)", least)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


class _Problem:
    """What the forward of a step may keep and what its backward may make again.

    Attributes:
        step: the graph.
        nodes: the values that the backward follows from, in order.
        again: by the names of copies, the values that were made again in the last solution.
    """

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        calls = [node for node in step.graph.nodes if node.op != "output"]
        forward: set[fx.Node] = set()
        for node in calls:
            first = node.op != "call_function" or info(node).phase == "forward"
            if first and forward.issuperset(node.all_input_nodes):
                forward.add(node)
        # and what a forward makes of gradients, as of those that it penalises
        self.backward = {node for node in calls if node not in forward and info(node).phase in ("backward", "forward")}
        wanted = {operand for node in self.backward for operand in node.all_input_nodes} & forward
        needed = ancestors(wanted) & forward
        self.nodes = [node for node in calls if node in needed]
        self.places = {node: index for index, node in enumerate(self.nodes)}
        lasting = {n for n in self.nodes if n.op == "placeholder" or not (self.backward | forward).issuperset(n.users)}
        prices = [0 if _may_run_again(node) else None for node in self.nodes]
        self.values = [value_of(n, self.places, wanted, lasting, p) for n, p in zip(self.nodes, prices, strict=True)]
        self.seconds = [seconds(node) for node in self.nodes]
        self.names = {node.name: index for node, index in self.places.items() if self.values[index].keep}
        self.again: dict[str, int] = {}

    def limit(self, fullest: Sequence[tuple[fx.Node, int]], whole: int) -> Limit:
        """That the values which a plan has at its fullest moment fit, of which some were kept and some made again."""
        kept, remade = np.zeros(len(self.nodes)), np.zeros(len(self.nodes))
        others = 0.0
        for node, size in fullest:
            if node.name in self.again:
                remade[self.again[node.name]] += size / whole
            elif node.name in self.names:
                kept[self.names[node.name]] += size / whole
            else:
                others += size / whole
        return Limit(kept, remade, -others)

    def solved(self, limits: Sequence[Limit], aim: float) -> StepGraph:
        """The graph of least time within some limits, or of the least above them.

        Args:
            aim: what the limits are to come to, in their unit.
        """
        limits = [replace(one, most=one.most + aim) for one in limits]
        kept = least_time(self.values, self.seconds, limits, PATIENCE, soft=True)
        return self._rewritten(set(self.nodes) if kept is None else {self.nodes[index] for index in kept})

    def _rewritten(self, kept: set[fx.Node]) -> StepGraph:
        """The graph in which what is not kept is made again just before its first reader in a backward."""
        graph, copies = copy_graph(self.step.graph.nodes)
        available = kept | {node for node in self.nodes if node.op == "placeholder"}
        made: dict[fx.Node, fx.Node] = {}
        self.again = {}
        for node in self.step.graph.nodes:
            if node in self.backward:
                for operand in [operand for operand in node.all_input_nodes if operand in self.places]:
                    if operand not in available:
                        self._make(operand, available, made, copies, copies[node])
                        copies[node].replace_input_with(copies[operand], made[operand])
            elif node.op == "call_function" and info(node).phase == "forward":
                made.clear()  # of the next batch: what the last one's backward made is not kept for it
        return dead_code(StepGraph(lazy_graph_module(self.step.gm, graph), self.step.signature, self.step.stage))

    def _make(
        self, wanted: fx.Node, available: set[fx.Node], made: dict[fx.Node, fx.Node], copies: dict[fx.Node, fx.Node],
        reader: fx.Node,
    ) -> None:  # fmt: skip
        """Adds copies of a value's call, and of those that it follows from as far as these are not there."""
        graph, there = reader.graph, available | made.keys()
        for node in sorted(ancestors([wanted], until=there.__contains__) - there):
            with graph.inserting_before(reader):
                again = copy_node(graph, node, lambda operand: made.get(operand) or copies[operand])
            if draws(node):
                with graph.inserting_before(copies[node]):
                    own: Any = node.kwargs.get("generator")
                    state = graph.call_function(get_rng_state, () if own is None else (copies[own],))
                set_info(state, replace(info(node), value=torch.empty(0, dtype=torch.uint8)))
                again.target, again.args = Replayed(node.target), (state, *again.args)
            record = replace(info(node), phase="backward", part=info(reader).part, recomputed=True)
            made[node] = set_info(again, record)
            self.again[again.name] = self.places[node]


def _may_run_again(node: fx.Node) -> bool:
    """Whether a call gives the same bits when it runs again, under the generator's state of then if it draws."""
    filled = node.target in EMPTY and all(map(draws, node.users))  # memory that draws alone will fill
    return filled or is_pure(node) or draws(node) or node.op == "get_attr"


EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default}
