"""lower/: a `StepGraph` -> a callable on flat inputs.

Takes a pure graph. Gives ``fn(*inputs) -> outputs`` that writes mutated inputs in place and
gives every other output memory of its own. This is the only room that may reuse memory or write in place.
May import: comm, errors, functional, ir, nested, packed_graph, passes, sizes, torch_compat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from wholestep.ir import StepGraph
from wholestep.lower.backends.aten import Program, lower_aten
from wholestep.lower.backends.interpreter import lower_naive
from wholestep.lower.backends.other_compilers import Parts, UserBackend, lower_callable, lower_inductor, part_numbers

Backend = Literal["aten", "inductor", "naive"] | UserBackend

LOWERINGS: dict[str, Callable[[StepGraph], Callable[..., Sequence[Any]]]] = {
    "aten": lower_aten,
    "inductor": lower_inductor,
    "naive": lower_naive,
}


def lower(step: StepGraph, backend: Backend) -> Callable[..., Sequence[Any]]:
    """Turns a graph into a callable, by the name of a backend or by the user's own one, part by part where it has some.

    Raises:
        ValueError: no backend of that name.
        LoweringError: the backend failed.
    """
    if isinstance(backend, str) and backend in LOWERINGS:
        make = LOWERINGS[backend]
    elif callable(backend):
        make = partial(lower_callable, backend)
    else:
        raise ValueError(f"backend {backend!r} is none of {sorted(LOWERINGS)} and not callable")
    numbers = part_numbers(step, in_flight=callable(backend))
    return Parts(step, numbers, make) if any(numbers.values()) else make(step)


__all__ = ["LOWERINGS", "Backend", "Program", "lower"]
