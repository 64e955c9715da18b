"""Functions for use inside of a step, named as in `torch.compiler` and Dynamo: what stays outside of its programs.

May import: capture_call, co_run, errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from wholestep.capture_call import is_tracing
from wholestep.co_run import outside_of_programs
from wholestep.errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])


def is_compiling() -> bool:
    """True while this thread captures a step, when tensors have no values. Where a step's Python runs at each call, it
    is False: values are there as soon as they are read."""
    return is_tracing()


def graph_break() -> None:
    """Ends a program here: the step's Python runs at each call, and what came before has run when this returns.

    Raises:
        UnsupportedError: the step is compiled with ``fullgraph=True``.
    """
    _refuse("ws.graph_break()")
    with outside_of_programs():
        pass


def disable(fn: F) -> F:
    """A function that runs as it is, in eager, when a compiled step calls it: all that came before has run.

    Args:
        fn: also as a decorator, ``@ws.disable``.

    Raises:
        UnsupportedError: when it is called in a step that is compiled with ``fullgraph=True``.
    """

    @functools.wraps(fn)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        _refuse(f"{getattr(fn, '__qualname__', fn)}, which ws.disable keeps out of programs")
        with outside_of_programs():
            return fn(*args, **kwargs)

    return disabled  # type: ignore[return-value]


def _refuse(what: str) -> None:
    if is_tracing():
        remedy = "call it outside of the step; without fullgraph=True, the step's Python runs at each call"
        raise UnsupportedError(f"the step calls {what}", remedy=remedy)
