"""Modules that a step is the first to import: executed as ever, with real tensors, whatever becomes of the trace.

A module is executed once in a process, so a replay owes it nothing; one of which half was executed fails for good.
"""

from __future__ import annotations

import importlib._bootstrap as machinery
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wholestep.patches import original, patched, suspended
from wholestep.torch_compat import dispatch_modes_off, function_modes_disabled

_FIND = "_find_and_load"  # what an import calls, of C too, for a module that is not there yet


@contextmanager
def imports_apart() -> Iterator[None]:
    """While this thread traces."""
    load, thread = original(machinery, _FIND), threading.get_ident()

    def find_and_load(name: str, importer: Any) -> Any:
        with suspended(), function_modes_disabled(), dispatch_modes_off():
            return load(name, importer)

    with patched([(machinery, _FIND, find_and_load)], lambda: threading.get_ident() == thread):
        yield
