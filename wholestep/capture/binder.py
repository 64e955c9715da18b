"""The binder: checks a call against the guards and fetches the inputs of a captured program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.capture.effects import Effect, replay
from wholestep.capture.guards import Guard, GuardFailure, compare
from wholestep.capture.snapshot import Snapshot, snapshot
from wholestep.capture.source import Call, Source


class Binder:
    """``binder(args, kwargs)`` gives the input values in order, or a `GuardFailure`."""

    def __init__(self, snap: Snapshot, inputs: Sequence[Source], guards: list[Guard], mutated: Sequence[Source]) -> None:
        self.fn, self.inputs, self.guards, self.mutated = snap.call.fn, list(inputs), guards, list(mutated)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | GuardFailure:
        later = snapshot(self.fn, args, kwargs)
        failure = compare(self.guards, later.guards())
        if failure is not None:
            return failure
        return [source.read(later.call) for source in self.inputs]

    def apply(self, effects: Sequence[Effect], args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Sequence[Any]) -> None:
        """Replays effects in a call that this binder has just let pass."""
        replay(effects, Call(self.fn, args, kwargs), made)


def compile_binder(snap: Snapshot, inputs: Sequence[Source], guards: list[Guard] | None = None,
                   mutated: Sequence[Source] = ()) -> Binder:
    """Makes the binder of a captured program.

    Args:
        inputs: the sources of the program's placeholders, in order.
        guards: what must hold; all of the snapshot's when None.
        mutated: the inputs that the program writes to.
    """
    return Binder(snap, inputs, snap.guards() if guards is None else guards, mutated)
