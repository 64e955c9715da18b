"""Programs that decide: what a call has to do where one may end at a value that Python went on with otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture import Guard, GuardFailure
from wholestep.capture.sources import Decision
from wholestep.functional import Decided, Diverged
from wholestep.ir import is_effectful
from wholestep.trace import Traced
from wholestep.trace.numbers.decisions import outcomes_of


class EarlyExit:
    """The decisions of one program: until the last one it has written nothing, and moved nothing but generators.

    Attributes:
        guards: them, in order.
        outcomes: what Python went on with at each.
    """

    def __init__(self, traced: Traced, decided: Sequence[Decided]) -> None:
        self.guards = [Guard(Decision(d.text), f"decided at {d.line}", d.expected) for d in decided]
        self.outcomes = outcomes_of(traced.step.graph)
        calls = [n for n in traced.step.graph.nodes if n.op == "call_function" and is_effectful(n)]
        self._draws = any(not isinstance(n.target, Decided) for n in calls)
        self._generators = [i for i, item in enumerate(traced.inputs) if isinstance(item.value, torch.Generator)]

    @classmethod
    def of(cls, traced: Traced) -> EarlyExit | None:
        """Those of what was traced; None where there are none."""
        decided = [node.target for node in traced.step.graph.nodes if isinstance(node.target, Decided)]
        return cls(traced, decided) if decided else None

    def attempt(self, values: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Runs the program; where it ends at a decision, all is as before, and the failure says which it was."""
        generators = [torch.default_generator, *(values[i] for i in self._generators)] if self._draws else []
        before = [generator.get_state() for generator in generators]
        try:
            return run()
        except Diverged as decision:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            known = self.outcomes[: decision.decided.index]
            return GuardFailure(str(decision), outcomes=(*known, repr(decision.found)))
