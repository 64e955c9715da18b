"""The hook into the autograd engine: its calls are replaced in this one place, for all threads and contexts.

The engine describes a backward to whoever asked last, in any thread: while one thread has its graph walked, another's
backward must wait (a walk takes microseconds and calls no user code); while another's runs, there is no walk.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from wholestep.patches import Patches, original, patched, suspended
from wholestep.torch_compat import BACKWARD_ENGINE

Handler = Callable[..., Any]

_changed = threading.Condition()
_inside: Counter[int] = Counter()  # thread -> backwards that it runs, one inside of the other
_walker: list[int] = []  # the thread that has its graph walked
_own = threading.local()
_checks: list[Callable[[Any, Any], None]] = []


def _handlers() -> list[Handler]:
    return _own.__dict__.setdefault("handlers", [])


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """In this thread, `torch.autograd.backward` and `torch.autograd.grad` end in ``handler(run, *args, **kwargs)``."""
    _handlers().append(handler)
    try:
        with patched([(*BACKWARD_ENGINE, _enter)], lambda: True):  # a backward of any thread is counted
            yield
    finally:
        _handlers().pop()


def watch(check: Callable[[Any, Any], None]) -> None:
    """From now on, each backward of any thread begins with ``check(roots, inputs)``."""
    if check not in _checks:
        _checks.append(check)
        Patches().put([(*BACKWARD_ENGINE, _enter)], lambda: True)


def _enter(*args: Any, **kwargs: Any) -> Any:
    for check in _checks:
        check(args[0], args[4])
    run = original(*BACKWARD_ENGINE)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with running():
            return run(*args, **kwargs)

    handlers = _handlers()
    return handlers[-1](counted, *args, **kwargs) if handlers else counted(*args, **kwargs)


@contextmanager
def running() -> Iterator[None]:
    """This thread is in the engine."""
    me = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: not _walker or _walker[0] == me)
        _inside[me] += 1
    try:
        yield
    finally:
        with _changed:
            _inside[me] -= 1
            if not _inside[me]:
                del _inside[me]
            _notify()


def _notify() -> None:
    with suspended():  # else a step that defers its operators would run them first, in the engine and under this lock
        _changed.notify_all()


@contextmanager
def walking() -> Iterator[None]:
    """The engine walks a graph of this thread.

    Raises:
        RuntimeError: a backward of another thread runs, or walks.
    """
    me = threading.get_ident()
    with _changed:
        if _walker or any(thread != me for thread in _inside):
            raise RuntimeError("a backward of another thread runs at the same time")
        _walker.append(me)
    try:
        yield
    finally:
        with _changed:
            _walker.clear()
            _notify()
