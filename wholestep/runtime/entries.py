"""The programs of one step: which may serve a call, which sizes get one, and how many stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

from wholestep.runtime.entry import Entry

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


class Entries(list[Entry]):
    """Entries, the latest used first.

    Attributes:
        sized: whether they differ in the shapes of their arguments.
        calls: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sized, self.calls = False, 0
        self._came: Counter[Any] = Counter()  # how often shapes came that have no entry

    def candidates(self, wanted: Any) -> list[Entry]:
        """Those that may serve a call: those of its shapes, then those for many, else one for its reason."""
        if not self.sized:
            return list(self)
        alike = [e for e in self if wanted in e.shapes]
        return alike + [e for e in self if e.many is not None and wanted not in e.shapes] or self[:1]

    def note(self, entry: Entry, wanted: Any) -> None:
        """Notes that an entry has served arguments of some shapes."""
        if len(entry.shapes) >= 16 * MAX_SIZES:
            entry.shapes.clear()
        entry.shapes.add(wanted)

    def may_branch(self) -> bool:
        """Whether one more outcome of Python's decisions gets a program: where each call has others, none does."""
        branches = {entry.early_exit.outcomes for entry in self if entry.early_exit is not None}
        return len(branches) < min(BRANCHES + self.calls // CALLS_A_BRANCH, MOST_BRANCHES)

    def serve_seldom(self, captures: int) -> bool:
        """Whether there were many captures for the calls that came."""
        return FEW <= captures > self.calls / CALLS_A_CAPTURE

    def forget_branches(self) -> None:
        """Lets go of programs that may end at a decision."""
        self[:] = [entry for entry in self if entry.early_exit is None]

    def is_new(self, wanted: Any) -> bool:
        """Whether shapes that no program serves have come too seldom to get one; counts them."""
        if any(wanted in entry.shapes for entry in self):
            return False
        if len(self) < AT_ONCE and any(entry.many is not None for entry in self):
            return False
        self._came[wanted] += 1
        if self._came[wanted] < (COMES_AGAIN if len(self) < MAX_SIZES else OFTEN):
            if len(self._came) > 16 * MAX_SIZES:
                self._came.clear()
            return True
        del self._came[wanted]
        return False

    def prefer(self, entry: Entry, many: bool) -> list[Entry]:
        """Puts an entry first; gives those that go.

        Args:
            many: whether there may be one for each size: those not used lately then give back their memory, or go.
        """
        if entry in self:
            self.remove(entry)
        else:
            self.sized = any(other.shapes != entry.shapes for other in self)
        self.insert(0, entry)
        if not many:
            return []
        serving = [e.program for e in self[:AT_HAND]]
        for unused in self[AT_HAND:]:
            if unused.program not in serving:
                unused.program.release_memory()
        gone = self[MAX_SIZES:]
        del self[MAX_SIZES:]
        return gone
