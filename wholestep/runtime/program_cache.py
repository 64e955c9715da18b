"""Which program of one step serves a call; which sizes and branches get a program, and how many programs stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from wholestep.capture import Args, Binder, GuardFailure, Kwargs
from wholestep.runtime.entry import Entry, Ready

# Of programs for many sizes: how many stay, and how many of them with their memory.
MAX_SIZES, AT_HAND = 64, 8
# Programs up to which one is made as soon as a size comes that none serves, where there is one that serves many.
AT_ONCE = 8
# At which of its calls a new size gets a program, beyond the second size: while there is room, and when there is none.
# Before, it runs in eager: sizes that never come again cost no half a second for a program that serves one call.
COMES_AGAIN, OFTEN = 2, 16


# How many captures outcomes of decisions get at once, and at all, and after how many calls there is one more.
BRANCHES, MOST_BRANCHES, CALLS_A_BRANCH = 3, 8, 32

# Captures beyond which each must have served so many calls, on average: else numbers come that never come again.
FEW, CALLS_A_CAPTURE = 8, 4


class ProgramCache(list[Entry]):
    """Entries, the last used first.

    Attributes:
        sized: whether they differ in the shapes of their arguments.
        calls: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sized, self.calls = False, 0
        self._evicts = False
        self._came: Counter[Any] = Counter()  # how often shapes came that have no entry

    def serve(
        self, args: Args, kwargs: Kwargs, ready: Ready, run: Callable[..., Any], shapes: Any, walks: bool
    ) -> Any:
        """Serves a call by the first program that fits it, or says why none does (`GuardFailure`).

        Whether all objects are those of an earlier call is told in microseconds, so all programs are asked for that
        before one of them walks what the step can see, in milliseconds.

        Args:
            ready: called once it is clear which program serves, before it runs.
            run: runs an entry; called as `Entry` is.
            shapes: of the arguments, where entries are `sized`.
            walks: whether what the step can see is walked at all.
        """
        candidates, failures, decided = self._candidates(shapes), dict[Entry, GuardFailure](), GuardFailure("")
        for bind in (Binder.fast, Binder.walk) if walks else (Binder.fast,):
            for entry in candidates:
                if entry in failures or not entry.may_follow(decided.outcomes):
                    continue
                values = bind(entry.binder, args, kwargs)
                if values is None:
                    continue
                outcome = run(entry, values, args, kwargs, ready) if type(values) is list else values
                if type(outcome) is not GuardFailure:
                    self._has_served(entry, shapes)
                    return outcome
                failures[entry] = outcome
                if outcome.outcomes:
                    decided = outcome
        return decided if decided.outcomes else next((failures[e] for e in candidates if e in failures), decided)

    def _candidates(self, shapes: Any) -> list[Entry]:
        """Those that may serve a call: those of its shapes, then those for many, else one for its reason."""
        if not self.sized:
            return list(self)
        alike = [e for e in self if shapes in e.shapes]
        return alike + [e for e in self if e.many is not None and shapes not in e.shapes] or self[:1]

    def _has_served(self, entry: Entry, shapes: Any) -> None:
        if shapes is not None:
            if len(entry.shapes) >= 16 * MAX_SIZES:
                entry.shapes.clear()
            entry.shapes.add(shapes)
        if entry is not self[0]:
            self.remove(entry)
            self._put_first(entry)

    def add(self, entry: Entry, evicts: bool) -> None:
        """Adds a new entry.

        Args:
            evicts: whether there may be one for each size: those not used lately then give back their memory, or go.
        """
        self.sized = any(other.shapes != entry.shapes for other in self)
        self._evicts = evicts
        self._put_first(entry)

    def _put_first(self, entry: Entry) -> None:
        self.insert(0, entry)
        if self._evicts:
            serving = [e.program for e in self[:AT_HAND]]
            for unused in self[AT_HAND:]:
                if unused.program not in serving:
                    unused.program.release_memory()
            del self[MAX_SIZES:]

    def may_branch(self) -> bool:
        """Whether one more outcome of Python's decisions gets a program: where each call has others, none does."""
        branches = {entry.early_exit.outcomes for entry in self if entry.early_exit is not None}
        return len(branches) < min(BRANCHES + self.calls // CALLS_A_BRANCH, MOST_BRANCHES)

    def forget_branches(self) -> None:
        """Lets go of programs that may end at a decision."""
        self[:] = [entry for entry in self if entry.early_exit is None]

    def serve_seldom(self, captures: int) -> bool:
        """Whether there were many captures for the calls that came."""
        return FEW <= captures > self.calls / CALLS_A_CAPTURE

    def is_rare(self, shapes: Any) -> bool:
        """Whether shapes that no program serves have come too seldom to get one; counts them."""
        if any(shapes in entry.shapes for entry in self):
            return False
        if len(self) < AT_ONCE and any(entry.many is not None for entry in self):
            return False
        self._came[shapes] += 1
        if self._came[shapes] < (COMES_AGAIN if len(self) < MAX_SIZES else OFTEN):
            if len(self._came) > 16 * MAX_SIZES:
                self._came.clear()
            return True
        del self._came[shapes]
        return False
