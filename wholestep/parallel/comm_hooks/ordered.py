"""Communication of several steps beside the backward, in the same order on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.groups import in_this_world
from wholestep.comm.api.tracing import is_captured
from wholestep.comm.engines.work_queue import WorkQueue

Hook = Callable[[Any, Any], torch.futures.Future]

_queues: weakref.WeakKeyDictionary[comm.ProcessGroup, WorkQueue] = weakref.WeakKeyDictionary()


def communication_hook(hook: Hook) -> Hook:
    """Decorator: torch's wrapper, too, takes the hook, as it does those whose arguments have no annotations."""
    hook.__annotations__.clear()
    return hook


def in_order(group: comm.ProcessGroup, function: Callable[[], torch.Tensor]) -> torch.futures.Future:
    """Calls the function on a thread of the group's, after those that were given before.

    What the functions send is so in one order on all ranks, however long each takes.

    Returns:
        A future of the result; of the exception that the function raised, where it does.
    """
    ended: torch.futures.Future = torch.futures.Future()
    if is_captured():  # a program has one order
        ended.set_result(function())
        return ended.then(value_of)
    called = in_this_world(function)

    def step() -> None:
        try:
            ended.set_result(called())
        except Exception as failure:  # noqa: BLE001 - whatever it is belongs to who waits
            ended.set_result(failure)

    _queues.setdefault(group, WorkQueue()).start("communication hook", step, [], async_op=True)
    return ended.then(value_of)


def value_of(future: torch.futures.Future) -> Any:
    """The one tensor that a future of a hook or of a collective has.

    Raises:
        Exception: what the communication failed with.
    """
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
