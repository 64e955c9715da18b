"""What a step asks to have logged when it is over: functions, and values of the step for them.

May import: nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_thread = threading.local()


class Logged(NamedTuple):
    """What a step returned, and the calls that it has asked for."""

    result: Any
    calls: list[tuple[Callable[..., Any], dict[str, Any]]]

    def deliver(self) -> Any:
        """Makes the calls, and gives the result."""
        for fn, values in self.calls:
            fn(**{name: _number(value) for name, value in values.items()})
        return self.result


def collecting(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that gives a `Logged` where it asks for calls."""

    @functools.wraps(step, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_thread, "calls", None)
        calls = _thread.calls = []
        try:
            result = step(*args, **kwargs)
        finally:
            _thread.calls = before
        return Logged(result, calls) if calls else result

    return run


def log(fn: Callable[..., Any], **values: Any) -> None:
    """Calls a function when the step is over, with values of the step.

    The step stays what it is: a replayed one is replayed, and one whose Python runs at each call reads nothing in
    between. Where no compiled step runs, the function is called at once.

    Args:
        fn: called as ``fn(**values)`` after each call of the step that did not raise.
        values: tensors of one element arrive as Python numbers, others as tensors, as they are now.
    """
    given = {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    calls = getattr(_thread, "calls", None)
    if calls is None:
        Logged(None, [(fn, given)]).deliver()
    else:
        calls.append((fn, given))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
