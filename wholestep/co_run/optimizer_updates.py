"""torch's functions that update a list of parameters one by one, each deferred as one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from wholestep.capture.guards.bulk import count_writes, versions
from wholestep.co_run.places import storage_at
from wholestep.co_run.prefix_tree import Results, Unknown
from wholestep.co_run.queue import MISSING, Queue
from wholestep.co_run.reads import current
from wholestep.nested import tensors_of
from wholestep.patches import Replacement
from wholestep.torch_compat import function_modes_enabled, no_modes
from wholestep.trace.patches.like_updates import single_tensor_updates


@dataclass(frozen=True)
class Update:
    """Such a function as an operator; calls what a recorder has put where torch's optimizers look it up."""

    owner: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with function_modes_enabled(), torch.no_grad():  # a recorder's mode
            getattr(self.owner, self.name)(*args, **kwargs)


def deferred_updates() -> Iterator[Replacement]:
    """Replacements that defer such functions' calls in the thread's queue."""
    for owner, name, function in single_tensor_updates():
        yield owner, name, _deferred(owner, name, function)


@cache
def _deferred(owner: Any, name: str, function: Any) -> Any:
    return partial(_defer, Update(owner, name), function)


def _defer(update: Update, function: Any, *args: Any, **kwargs: Any) -> None:
    queue: Queue = current.queue
    queue.watch.end()  # such a function calls torch alone
    tensors = list(tensors_of((args, kwargs)))
    if torch.is_grad_enabled() or not queue.defers(tensors) or _share_memory(tensors):
        return function(*args, **kwargs)
    with no_modes():
        key, node = queue.looked_up(update, args, kwargs, any_float=True)
    if node is MISSING:
        return queue.learn(key, partial(_counted, tensors, function, args, kwargs))
    if node is None:
        queue.flush()  # slots that the arguments got are none
        return function(*args, **kwargs)
    counted = tuple(tensors)
    count_writes(counted, versions(counted, node.results))
    queue.defer(update, key, node, [t for t, n in zip(tensors, node.results, strict=True) if n])


def _share_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether some share memory, and with it perhaps a version counter."""
    return len({storage_at(t) for t in tensors}) < len(tensors)


def _counted(tensors: list[torch.Tensor], function: Any, args: Any, kwargs: Any) -> Results:
    """Runs an update, and counts how often it writes each tensor."""
    counts = [tensor._version for tensor in tensors]
    function(*args, **kwargs)
    after = list(tensors_of((args, kwargs)))
    if len(after) != len(tensors) or any(a is not b for a, b in zip(after, tensors, strict=True)):
        raise Unknown  # states were made
    return tuple([tensor._version - count for tensor, count in zip(tensors, counts, strict=True)])
