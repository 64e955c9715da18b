"""Every error that Wholestep raises on purpose.

WholestepError
├── CaptureError (also RuntimeError)      the step cannot be captured
│   ├── DataDependentError                Python needs a value that only exists when the step runs
│   ├── UnsupportedError                  an operator, object or optimizer that tracing cannot follow
│   ├── BreakError                        another rank cannot replay the step
│   ├── LazyError                         the step has to run once before, for lazy modules
│   └── LeakError                         a traced tensor was stored where replaying cannot put it
├── GraphError (also AssertionError)      a graph breaks an invariant of its stage: our mistake
├── LoweringError (also RuntimeError)     a backend could not turn a graph into a callable
├── PlanError (also ValueError)           a plan, mesh or placement that does not fit
├── MemoryBudgetError (also ValueError)   a step that cannot do with so little memory
├── CheckpointError (also ValueError)     a checkpoint that is not whole, or of another model
└── DistError (also RuntimeError)         communication failed
    ├── DistStoreError                    a key-value store did not answer in time
    ├── DistNetworkError                  a connection could not be made, or ended
    ├── DistBackendError                  a backend cannot do what was asked
    ├── DistMismatchError                 ranks called different collectives, or one on different tensors
    ├── DistTimeoutError                  a collective did not end within its time-out
    └── DistRankError                     another rank has exited, was killed, or cannot go on

A mistake in calling our functions is a plain `ValueError` or `TypeError`.
May import: nothing of the package.
"""

from __future__ import annotations

import os

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of this package, whose lines no error names as the user's."""


class WholestepError(Exception):
    """The root of all errors of this package."""


class CaptureError(WholestepError, RuntimeError):
    """The step cannot be captured; says what, where in the user's code, and what to do.

    Args:
        what: one sentence: what was found, against what is required.
        remedy: what to do about it.
        where: the user's ``file:line``; where it is empty, tracing gives it that of the code that led there.
    """

    def __init__(self, what: str, remedy: str = "", *, where: str = "") -> None:
        self.what, self.remedy = what, remedy
        self.locate(where)

    def locate(self, where: str) -> None:
        """Sets the place in the user's code."""
        self.where = where
        lines = [self.what]
        if where:
            lines.append(f"  at: {where}")
        if self.remedy:
            lines.append(f"  to do: {self.remedy}")
        super().__init__("\n".join(lines))


class DataDependentError(CaptureError):
    """Python asked for a number or a shape that only exists when the step runs."""


class UnsupportedError(CaptureError):
    """Tracing met an operator, an object or an optimizer that it cannot follow."""


class BreakError(CaptureError):
    """Another rank cannot replay the step: its Python runs at each call, on all ranks."""


class LazyError(CaptureError):
    """The step has to run once first: a parameter has no shape yet."""


class LeakError(CaptureError):
    """A tensor made inside the step was stored where a replay cannot put it.

    Attributes:
        held: the tensor or number, by which tracing finds the line that made it.
        grown: paths of the lists that it was appended to, when that is all that happened.
    """

    held: object = None
    grown: frozenset[str] = frozenset()


class GraphError(WholestepError, AssertionError):
    """A graph breaks an invariant of its stage."""


class LoweringError(WholestepError, RuntimeError):
    """A backend could not turn a graph into a callable."""


class PlanError(WholestepError, ValueError):
    """A plan, mesh or placement that does not fit the model, the batch or the world."""


class MemoryBudgetError(WholestepError, ValueError):
    """A step whose memory does not fit into its budget, even where it computes again what it can.

    Attributes:
        least: bytes of the least that was found to be possible.
    """

    def __init__(self, text: str, least: int = 0) -> None:
        super().__init__(text)
        self.least = least


class CheckpointError(WholestepError, ValueError):
    """What cannot be saved, or a checkpoint that is not whole or does not fit."""


class DistError(WholestepError, RuntimeError):
    """Communication failed."""


class DistStoreError(DistError):
    """A store did not answer, or a key did not appear, within the time-out."""


class DistNetworkError(DistError):
    """A connection could not be made, was refused, or ended."""


class DistBackendError(DistError):
    """A backend cannot do what was asked, or its engine reported a failure."""


class DistMismatchError(DistError):
    """Ranks of a group called different collectives, or the same one with different tensors."""


class DistTimeoutError(DistError):
    """A collective did not end within its time-out."""


class DistRankError(DistError):
    """A rank of the group has exited, was killed, or said that it cannot go on."""
