"""Reads of memory that never reach the dispatcher: methods and functions that flush the queue first."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from wholestep.patches import Replacement, original

# Methods of tensors that hand out memory or what is in it.
TENSOR = ("__repr__", "tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "const_data_ptr", "mutable_data_ptr",
          "storage", "untyped_storage", "_typed_storage", "__reduce_ex__", "__deepcopy__", "__setstate__",
          "__cuda_array_interface__", "share_memory_")  # fmt: skip

# Methods of random generators, whose state deferred operators have not moved yet.
GENERATOR = ("get_state", "set_state", "manual_seed", "seed", "get_offset", "set_offset", "clone_state",
             "graphsafe_get_state", "graphsafe_set_state")  # fmt: skip

# Functions that hand objects to other threads, and those that change how kernels compute.
FUNCTIONS = (
    (threading.Thread, "start"), (threading.Condition, "notify"), (queue.SimpleQueue, "put"),
    (torch, "set_num_threads"), (torch, "use_deterministic_algorithms"), (torch, "set_flush_denormal"),
)  # fmt: skip


def flushing(flush: Callable[[], None]) -> list[Replacement]:
    """Replacements for all of these that call ``flush()`` first."""
    owners = [(torch.Tensor, name) for name in TENSOR] + [(torch.Generator, name) for name in GENERATOR]
    return [(owner, name, _after(flush, owner, name)) for owner, name in [*owners, *FUNCTIONS]
            if hasattr(owner, name)]  # fmt: skip


def _after(flush: Callable[[], None], owner: Any, name: str) -> Any:
    found = original(owner, name)
    if not callable(found):  # a property, of Python or of C

        def get(self: Any) -> Any:
            flush()
            return found.__get__(self)

        return property(get)

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        flush()
        return found(*args, **kwargs)

    return call
