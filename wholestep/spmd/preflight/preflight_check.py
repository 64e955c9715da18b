"""Preflight check: ranks compare their contracts before a step runs and fail together on a mismatch."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholestep import comm
from wholestep.spmd.preflight.contract import Contract, generator_state

MISS = -1  # the number of a rank that has no program for a call yet
_STRIDE = 0x9E3779B97F4A7C15  # between the numbers of one program's calls

PROGRAMS = "the ranks' programs"
PLANS = "the ranks' plans"
_NAMED = re.compile(" has (parameter|buffer) ")

# How a word begins -> what differs between ranks, and what to do about it.
_KINDS = {
    "call": (
        "the ranks' calls",
        "every rank makes the same calls of compiled steps in the same order: one that leaves out a batch, or goes on "
        "after an interrupt, is a call behind",
    ),
    "state": (
        "the ranks' optimizer states",
        "load the optimizer's state on every rank, before its first step",
    ),
    "setting": (
        "the ranks' optimizers",
        "give the optimizer the same settings on every rank",
    ),
    "batch": (
        "the ranks' batches",
        "give all ranks batches of one shape: pad the last ones, or drop them (DataLoader(drop_last=True))",
    ),
    "plans": (
        PLANS,
        "compile the step with the same mesh and the same plans on every rank",
    ),
    "random generator": (
        "the ranks' random generators",
        "between steps, draw as many random numbers on each rank, or a rank's own from a torch.Generator",
    ),
    "values": (
        "the ranks' data",
        "give every rank the same numbers, and the same batch where the plan does not split it: batch=ws.Shard(0)",
    ),
    "": (PROGRAMS, "build the same model, optimizer and step on every rank; only the data may differ"),
}


class PreflightCheck:
    """The comparisons of one step's ranks, over their groups.

    Attributes:
        axes: group's name -> axis.
        in_global_view: whether the step is in the global view.
        step: the step's name.
        call: how many calls of the step the ranks have met for.
        announced: whether they have for the call that is under way.
        must_compare: whether other ranks may be waiting for this one to `compare`.
        all_compared: whether all of them said more words when they compared last.
        all_failed: whether all of them knew something to be wrong then.
    """

    all_compared = all_failed = False
    step, call, announced, must_compare = "the step", 0, False, False

    def __init__(self, groups: Sequence[comm.ProcessGroup], axes: Mapping[str, str], in_global_view: bool) -> None:
        self.groups, self.axes, self.in_global_view = list(groups), axes, in_global_view

    def compare(self, contract: Contract, trouble: str = "", along: Mapping[str, Sequence[str]] | None = None) -> str:
        """Compares the ranks' contracts along every axis; gives what is wrong, the same on all ranks, or nothing.

        Args:
            trouble: what this rank alone knows to be wrong.
            along: group's name -> more words, which the ranks along one axis must have alike where all say them.
        """
        self.must_compare = False
        for group in self.groups:
            everybody: list[Any] = [None] * group.size()
            name = group.group_name
            words = [f"call {self.call} of {self.step}", *contract.for_axis(self.axes[name])]
            comm.all_gather_object(everybody, (words, (along or {}).get(name), trouble, self.call), group)
            said, more, troubles, calls = zip(*everybody, strict=True)
            self.call = max(calls)  # one that is behind has heard so now
            self.all_failed = all(troubles)
            trouble = next((text for text in troubles if text), "") or _difference(said)
            self.all_compared = None not in more
            trouble = trouble or (_difference(more) if self.all_compared else "")
        if trouble and self.in_global_view and not trouble.startswith(PLANS):  # on all ranks or none
            trouble = self._first_call(zlib.decompress(contract.calls).decode() if contract.calls else "", trouble)
        return trouble

    def _first_call(self, calls: str, trouble: str) -> str:
        """What is wrong; in place of a program that differs, the first of its calls that does."""
        mine, found = calls.split("\n"), ""
        for group in self.groups:
            everybody: list[Any] = [None] * group.size()
            comm.all_gather_object(everybody, (mine, found), group)
            found = next((text for _, text in everybody if text), "") or _difference([said for said, _ in everybody])
        return found if found and trouble.startswith(PROGRAMS) and not _NAMED.search(trouble) else trouble

    def agree(self, contract: Contract | None) -> bool:
        """True when all ranks have the same contract now; if not, all are to `compare`.

        Args:
            contract: None for a rank that has no program for a call yet.
        """
        self.call, self.announced, self.must_compare = self.call + 1, True, False
        number = MISS
        if contract is not None:
            number = contract.number ^ generator_state() if contract.random else contract.number
            number = (number + self.call * _STRIDE) % (1 << 56)
        bounds = torch.tensor([number, -number])
        for group in self.groups:
            comm.all_reduce(bounds, comm.ReduceOp.MAX, group)
        maximum, minimum = bounds.tolist()
        self.must_compare = maximum != -minimum or maximum == MISS
        return not self.must_compare


def _difference(everybody: Sequence[Sequence[str]]) -> str:
    """Says where one rank's words differ from rank 0's; nothing when none do."""
    first = everybody[0]
    for rank, words in enumerate(everybody):
        if words == first:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(first, words, strict=False)) if a != b), min(len(first), len(words))
        )
        here, there = (w[place] if place < len(w) else "nothing more" for w in (first, words))
        kind = next(kind for kind in _KINDS if here.startswith(kind) and there.startswith(kind))
        what, remedy = _KINDS[kind]
        return f"{what} do not fit each other: rank 0 has {here}; rank {rank} has {there}\n  to do: {remedy}"
    return ""
