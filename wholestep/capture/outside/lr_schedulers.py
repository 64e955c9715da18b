"""Learning-rate schedulers inside a step: their `step()` is not traced but done again at each call.

A scheduler computes numbers from a count that grows with every call, in Python of any kind. Traced, that would be a
new program for each step. So while a step is captured, `scheduler.step()` only takes note of the call; the effect
`CALL` makes the real call after the program has run. Until then the numbers that the scheduler sets are
`Pending`: whoever reads them before the step ends is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.outside.stand_ins import refusing
from wholestep.capture.sources import Item, Source
from wholestep.errors import CaptureError, UnsupportedError


class Pending:
    """Stands for what a scheduler sets at the end of the step: to be kept or returned; computing with it is an error.

    Args:
        before: what stood there before: a number, or a list or tuple of numbers.
        refused: takes the error by which the step is refused when it computes with it.
    """

    def __init__(self, source: Source, before: Any, refused: list[CaptureError]) -> None:
        self.source, self.refused = source, refused
        self.original: Any = before.original if isinstance(before, Pending) else before

    def __repr__(self) -> str:
        return f"<{self.source}, set when the step ends>"

    def __len__(self) -> int:
        return len(self._several())

    def __getitem__(self, index: int) -> Pending:
        several = self._several()
        return Pending(Item(self.source, range(len(several))[index]), several[index], self.refused)

    def _several(self) -> Sequence[Any]:
        return self.original if isinstance(self.original, (list, tuple)) else _compute(self)


_compute = refusing(UnsupportedError, "{} was read after scheduler.step() in the same step",
                    "call scheduler.step() last, or after the compiled step")  # fmt: skip
for _name in ("add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg pos abs float int bool index "
              "eq ne lt le gt ge round trunc format hash array").split():
    setattr(Pending, f"__{_name}__", _compute)


@dataclass(frozen=True, eq=False)
class Noted:
    """One `scheduler.step(…)` that the captured step made."""

    scheduler: LRScheduler
    source: Source
    args: tuple[Any, ...]


def is_of_numbers(value: Any, kinds: Container[type]) -> bool:
    """Whether a scheduler may set a value of this kind anew: a number of certain types, or several."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return isinstance(value, Pending) or all(type(v) in kinds for v in several)


def all_of(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler, and those that it moves."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from all_of(inner)


class Deferred:
    """Takes the place of a scheduler's `step` while a step is captured."""

    def __init__(self, scheduler: LRScheduler, source: Source, note: Callable[[Noted], None]) -> None:
        self.scheduler, self.source, self.note = scheduler, source, note

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs or any(type(a) not in (int, float) for a in args):
            raise UnsupportedError(
                f"{self.source}.step was given a value that is only known when the step runs",
                remedy="return the value, and call scheduler.step(value) after the compiled step",
            )
        self.note(Noted(self.scheduler, self.source, args))
