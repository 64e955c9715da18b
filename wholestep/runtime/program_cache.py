"""Which program of one step serves a call; which sizes and branches get a program, and how many programs stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from time import perf_counter
from typing import Any

from wholestep.capture import Args, Binder, GuardFailure, Kwargs
from wholestep.runtime.entry import Entry, Ready

# How many programs are kept where each size may have its own, and how many of them keep their memory.
MAX_SIZES, AT_HAND = 64, 8
# Up to so many programs, a size that none serves gets one at once, if one of them serves many sizes.
AT_ONCE = 8
# At which of its calls a new size gets a program: while there is room for more, and when there is none. Until then it
# runs in eager: sizes that never come again cost no half a second for a program that serves one call.
COMES_AGAIN, OFTEN = 2, 16

# Outcomes of a step's decisions: how many get a program at once, how many in all, and after how many calls one more.
BRANCHES, MOST_BRANCHES, CALLS_A_BRANCH = 3, 8, 32

# Beyond so many captures each must have served so many calls, on average: else it is for numbers that never come again.
FEW, CALLS_A_CAPTURE = 8, 4

# After so many calls in a row that were compared object by object, replays are given up where that took longer than
# they did.
WALKS = 16

# Runs an entry on the inputs that its binder gave; called as `Entry` is.
Run = Callable[[Entry, list[Any], Args, Kwargs, Ready], Any]


class ProgramCache(list[Entry]):
    """The entries of one step, the last used first.

    Attributes:
        sized: whether they differ in the shapes of their arguments.
        calls: how many there were.
        walks: how many of the last ones in a row were served after a walk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sized, self.calls, self.walks = False, 0, 0
        self._lost = 0.0  # seconds that these walks took more than what they served
        self._evicts = False
        self._came: Counter[Hashable] = Counter()  # how often shapes came that have no entry

    def serve(self, args: Args, kwargs: Kwargs, ready: Ready, run: Run, shapes: Hashable, walks: bool) -> Any:
        """Serves a call by the first program that fits it, or says why none does (`GuardFailure`).

        Whether all objects are those of an earlier call is told in microseconds, so all programs are asked for that
        before one of them walks what the step can see, in milliseconds.

        Args:
            ready: called once it is clear which program serves, before it runs.
            shapes: of the arguments, where entries are `sized`.
            walks: whether what the step can see is walked at all.
        """
        candidates, failures, decided = self._candidates(shapes), dict[Entry, GuardFailure](), GuardFailure("")
        for bind in (Binder.fast, Binder.walk) if walks else (Binder.fast,):
            began = perf_counter()
            for entry in candidates:
                if entry in failures or not entry.may_follow(decided.outcomes):
                    continue
                values = bind(entry.binder, args, kwargs)
                if values is None:
                    continue
                bound = perf_counter()
                outcome = run(entry, values, args, kwargs, ready) if type(values) is list else values
                if type(outcome) is not GuardFailure:
                    self._has_served(entry, shapes)
                    self._count_walk(bind is Binder.walk, bound - began, perf_counter() - bound)
                    return outcome
                failures[entry] = outcome
                if outcome.outcomes:
                    decided = outcome
        found = [failures[e] for e in candidates if e in failures]
        if decided.outcomes or not found:
            return decided
        varying = next((failure.varying for failure in found if failure.varying), frozenset[str]())
        return replace(found[0], varying=varying)  # also where another program than the last differs in a number alone

    def _candidates(self, shapes: Hashable) -> list[Entry]:
        """Those that may serve a call: those of its shapes, then those for many, else one for its reason."""
        if not self.sized:
            return list(self)
        alike = [e for e in self if shapes in e.shapes]
        return alike + [e for e in self if e.many is not None and shapes not in e.shapes] or self[:1]

    def _has_served(self, entry: Entry, shapes: Hashable) -> None:
        if shapes is not None:
            if len(entry.shapes) >= 16 * MAX_SIZES:
                entry.shapes.clear()
            entry.shapes.add(shapes)
        if entry is not self[0]:
            self.remove(entry)
            self._put_first(entry)

    def _count_walk(self, walked: bool, binding: float, running: float) -> None:
        self.walks = self.walks + 1 if walked else 0
        self._lost = self._lost + binding - running if walked else 0.0

    @property
    def walks_in_vain(self) -> bool:
        """Whether objects that the step reaches are others at each call, and comparing them takes longer than it."""
        return self.walks >= WALKS and self._lost > 0

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

    def is_rare(self, shapes: Hashable) -> bool:
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
