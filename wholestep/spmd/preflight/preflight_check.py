"""Preflight check: what the ranks of a step tell each other about its calls, to fail together on a mismatch."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from wholestep import comm
from wholestep.comm.api.object_collectives import first_difference, gathered_objects
from wholestep.errors import BreakError, CaptureError, PlanError, WholestepError
from wholestep.ir import Input
from wholestep.spmd.preflight.contract import SHARED_KINDS, Call, Contract, generator_state, values_of

MISS = -1  # the number of a rank that has no program for a call yet
_STRIDE = 0x9E3779B97F4A7C15  # between the numbers of one program's calls

# How a word begins -> what differs between ranks, and what to do about it.
_KINDS = {
    "call": (
        "the ranks' calls",
        "every rank makes the same calls of compiled steps in the same order: one that leaves out a batch, or goes on "
        "after an interrupt, is a call behind; in a step that reads values, all ranks read the same, hooks included",
    ),
    "state": ("the ranks' optimizer states", "load the optimizer's state on every rank, before its first step"),
    "setting": (
        "the ranks' optimizers",
        "give the optimizer the same settings on every rank, and parameters the same hooks",
    ),
    "batch": (
        "the ranks' batches",
        "give all ranks batches of one shape: pad the last ones, or drop them (DataLoader(drop_last=True))",
    ),
    "plans": ("the ranks' plans", "compile the step with the same mesh and the same plans on every rank"),
    "random generator": (
        "the ranks' random generators",
        "between steps, draw as many random numbers on each rank, or a rank's own from a torch.Generator",
    ),
    "values": (
        "the ranks' data",
        "give every rank the same numbers, the same new buffers and parameters, and the "
        "same batch where the plan does not split it: batch=ws.Shard(0)",
    ),
    "": (
        "the ranks' programs",
        "build the same model, hooks, optimizer and step on every rank; only the data may differ",
    ),
}


# What a rank finds that has no program: the step cannot be replayed there, or could not be captured.
BREAK, FAILURE = "break", "failure"
_TENSOR = "tensor"  # parameters or buffers differ, which says more than the first call that does


class Finding(NamedTuple):
    """What is wrong, the same on all ranks that have compared.

    Attributes:
        text: in words, with what to do.
        kind: how the words that differ begin, as in `_KINDS`; or one of those above.
    """

    text: str
    kind: str


class PreflightCheck:
    """What the ranks of one step tell each other about its calls, over their groups.

    Args:
        axes: group's name -> axis.
        spread: names of the groups that are in the global view.

    Attributes:
        agreed: the contracts of the programs that they have begun together.
        synchronized: by id, the parameters, buffers and states that they have compared, or that were given to all; none
            of them is kept alive.
        all_capture: whether none of them had a program for the call that they met for last.
        all_compared: whether all of them said more words when they compared last.
    """

    def __init__(self, groups: Sequence[comm.ProcessGroup], axes: Mapping[str, str], spread: Container[str]) -> None:
        self.groups, self.axes, self._spread = list(groups), axes, spread
        self._in_global_view = bool(spread)
        self.agreed: set[Contract] = set()
        self.synchronized: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.all_compared = self.all_capture = False
        self._all_failed = False  # whether all of them knew something to be wrong then
        self._raised: weakref.ref[WholestepError] | None = None  # what they found then
        self._step, self._call = "the step", 0  # its name, and how many calls of it the ranks have met for
        self._announced = False  # whether they have for the call that is under way
        self._must_compare = False  # whether other ranks may be waiting for this one to compare
        self._one_captures = False  # whether one of them has no program for the call

    def begin_call(self, name: str) -> None:
        """A call of the step begins."""
        self._announced, self._must_compare, self._step = False, False, name

    def check_call(
        self, contract: Contract, values: Sequence[Any] = (), more: Sequence[tuple[Input, torch.Tensor]] = ()
    ) -> None:
        """Before a program serves a call: all ranks are to run it, in the same call, with the same numbers; in the
        global view, on batches of one shape and with the same new tensors in the place of parameters, buffers and
        states. A program without collectives, in the local view, is run alone.

        Args:
            values: the call's, numbers and tensors of the contract among them.
            more: tensors that are watched, besides.

        Raises:
            PlanError: on every rank, when they are not, or when another rank's call has failed.
        """
        if self._announced or (contract.is_local and not self._in_global_view):
            return
        watched = [*((item, values[index]) for index, item in contract.watched), *more]
        new = [(item, tensor) for item, tensor in watched if self.synchronized.get(id(tensor)) is not tensor]
        if not self._agree(contract, contract.checksum(values, [values_of(*pair) for pair in new])):
            words = [values_of(item, values[index]) for index, item in contract.numbers]
            along = None if self._one_captures else {group.group_name: words for group in self.groups}
            lasting = [(item, values[index]) for index, item in contract.lasting]
            lasting += () if self._one_captures else more  # of which a rank that captures says nothing
            self.compare(contract.with_random_state() if contract.random else contract, along, lasting)
        if not (more and self._one_captures):
            self.synchronized.update({id(tensor): tensor for _, tensor in new})

    def meet(self, what: str) -> None:
        """Before collectives that are in no program.

        Raises:
            PlanError: on every rank, when they do not all come here for the same.
        """
        self.check_call(Contract((Call("", what, ""),)))

    def compare(
        self, contract: Contract, along: Mapping[str, Sequence[str]] | None = None,
        lasting: Sequence[tuple[Input, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
        """Compares the ranks' contracts along every axis.

        Args:
            along: group's name -> more words, which the ranks along one axis must have alike where all say them.
            lasting: tensors that the ranks of the global view must have alike.

        Raises:
            PlanError, BreakError: on every rank, when they differ, or when one of them has no program.
        """
        self._raised = None
        found = self._compare(contract, None, along, lasting)
        if found is not None:
            error: WholestepError = (BreakError if found.kind == BREAK else PlanError)(found.text)
            self._raised = weakref.ref(error)
            raise error

    def all_know(self, error: Exception) -> bool:
        """Whether it is the error that all ranks were given when they last compared their contracts."""
        return self._raised is not None and self._raised() is error

    def announce_capture(self, compare: bool = False) -> None:
        """Before a capture, the first one or any in the global view: the others are told, and meet this rank when it is
        done.

        Args:
            compare: in any case.
        """
        if self.groups and not self._announced and (compare or self._in_global_view or not self.agreed):
            self._agree(None)

    def announce_break(self, error: Exception) -> bool:
        """This rank cannot capture the step: its Python runs at each call, on all ranks.

        Returns:
            False where other ranks do not come along: the error is the step's own, and only some have it.
        """
        breaks = isinstance(error, CaptureError)
        if not breaks and self.all_know(error):
            return False
        return not self._tell(error, breaks) or breaks or self._all_failed

    def abort_call(self, error: BaseException) -> None:
        """This rank's call has failed before its program ran: the others, which wait for it to start, are told why."""
        if not isinstance(error, Exception):  # an interrupt: no time to meet; the next call sees that one is left out
            self._call += not self._announced
            return
        with suppress(comm.DistError):  # another rank has gone: this one's own error says more
            self._tell(error)

    def abort_program(self, error: BaseException) -> None:
        """This rank's program has failed in the middle: the others, which wait for its collectives, are told."""
        if isinstance(error, comm.DistMismatchError) and len(self.groups) == 1:
            return  # all of them have seen it
        for group in self.groups:
            group.abort(f"its {self._here} failed with {type(error).__name__}: {error}")

    @property
    def _here(self) -> str:
        return f"call {self._call} of {self._step}"

    def _tell(self, error: Exception, breaks: bool = False) -> bool:
        """Tells the other ranks that this one has no program, and why; False where they do not meet for that."""
        self.announce_capture(compare=any(not contract.is_local for contract in self.agreed))
        if not self._must_compare:
            return False
        rank = comm.get_rank()
        mine = Finding(f"the step cannot be replayed on rank {rank}: {error}", BREAK)
        if not breaks:
            what = f"could not capture the step: {type(error).__name__}: {error}\n  in: {self._here}"
            mine = Finding(f"rank {rank} {what}", FAILURE)
        self._compare(Contract(()), mine)
        return True

    def _compare(
        self, contract: Contract, mine: Finding | None, along: Mapping[str, Sequence[str]] | None = None,
        lasting: Sequence[tuple[Input, torch.Tensor]] = (),
    ) -> Finding | None:  # fmt: skip
        """Compares contracts; gives what is wrong.

        Args:
            mine: what this rank alone knows to be wrong.
        """
        self._must_compare = False
        found, held = mine, [values_of(*pair) for pair in lasting]
        for group in self.groups:
            name = group.group_name
            words = [f"call {self._call} of {self._step}", *contract.for_axis(self.axes[name])]
            words += held if name in self._spread else ()
            everybody = gathered_objects((words, (along or {}).get(name), found, self._call), group)
            said, more, findings, calls = zip(*everybody, strict=True)
            self._call = max(calls)  # one that is behind has heard so now
            self._all_failed = all(findings)
            found = next(filter(None, findings), None) or _difference(said)
            self.all_compared = None not in more
            if found is None and self.all_compared:
                found = _difference(more)
        if found is not None and self._in_global_view and found.kind != "plans":  # on all ranks or none
            first = self._first_call(zlib.decompress(contract.calls).decode() if contract.calls else "")
            found = first if first is not None and not found.kind else found
        return found

    def _first_call(self, calls: str) -> Finding | None:
        """The first call in which the ranks' programs differ."""
        mine, found = calls.split("\n"), None
        for group in self.groups:
            everybody = gathered_objects((mine, found), group)
            found = next((one for _, one in everybody if one), None) or _difference([said for said, _ in everybody])
        return found

    def _agree(self, contract: Contract | None, checksum: int = 0) -> bool:
        """True when all ranks have the same contract now; if not, all are to `_compare`.

        Args:
            contract: None for a rank that has no program for a call yet.
            checksum: of the call's numbers.
        """
        self._call, self._announced, self._must_compare = self._call + 1, True, False
        number = MISS
        if contract is not None:
            number = contract.number ^ checksum ^ (generator_state() if contract.random else 0)
            number = (number + self._call * _STRIDE) % (1 << 56)
        bounds = torch.tensor([number, -number])
        for group in self.groups:
            comm.all_reduce(bounds, comm.ReduceOp.MAX, group)
        maximum, minimum = bounds.tolist()
        self._must_compare, self._one_captures = maximum != -minimum or maximum == MISS, -minimum == MISS
        self.all_capture = maximum == MISS
        return not self._must_compare


def _difference(everybody: Sequence[Sequence[str]]) -> Finding | None:
    """Says where one rank's words differ from rank 0's; None when none do."""
    found = first_difference(everybody)
    if found is None:
        return None
    here, there = (words or "nothing more" for words in found[2:])
    kind = next(kind for kind in _KINDS if here.startswith(kind) and there.startswith(kind))
    what, remedy = _KINDS[kind]
    if not kind and (here.startswith(SHARED_KINDS) or there.startswith(SHARED_KINDS)):
        kind = _TENSOR
    text = f"{what} do not fit each other: rank 0 has {here}; rank {found[0]} has {there}\n  to do: {remedy}"
    return Finding(text, kind)
