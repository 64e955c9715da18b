"""New objects: those made since a step began to be traced; which of the others a module holds by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from wholestep.capture.snapshot.garbage_collection import older_objects_frozen
from wholestep.capture.sources import Attr, Source, module


@contextmanager
def new_objects() -> Iterator[Callable[[], set[int]]]:
    """Gives a function that gives the ids of all objects made inside of the context so far.

    Objects that the collector does not follow, which hold no others, are not among them.
    """
    with older_objects_frozen():
        yield lambda: set(map(id, gc.get_objects()))


def kept_in_module(value: Any) -> Source | None:
    """The name under which a module holds an object, such as ``sys.stdout``, which may be another in a later call."""
    for holder in list(sys.modules.values()):
        for name, held in list(getattr(holder, "__dict__", {}).items()):
            if held is value and name.isidentifier():
                return Attr(module(holder.__name__), name)
    return None
