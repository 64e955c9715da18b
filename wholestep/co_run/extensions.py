"""C extensions that a step calls: they may read memory past the dispatcher that deferred operators do not fill yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from types import FrameType
from typing import Any

from wholestep.capture.snapshot.user_code import origin

# Packages whose functions in C take no tensors, but arrays at most, which are made after a flush.
WITHOUT_TENSORS = frozenset({"google", "numpy", "pandas", "PIL", "psutil", "yaml"})


class ExtensionWatch:
    """Flushes before this thread calls a function of a C extension other than Python's and torch's.

    A profile function sees such calls, and none where another profiler runs. Since it takes time, it watches where a
    step may go a new way: from its beginning and from each read to the next operator that is known, and beside those
    that are not.

    Attributes:
        active: whether it watches.
        found: the names of the functions that were called.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush, self.active, self.found = flush, False, list[str]()

    def begin(self) -> None:
        """Watches from now on."""
        if not self.active and sys.getprofile() is None:
            self.active = True
            sys.setprofile(self._seen)

    def end(self) -> None:
        """No longer watches."""
        if self.active:
            self.active = False
            sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if _is_extension(module):
            self._flush()
            self.found.append(f"{module}.{function.__name__}")


@cache
def _is_extension(name: str) -> bool:
    while name not in sys.modules and "." in name:
        name = name.rpartition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    in_c = file.endswith(tuple(EXTENSION_SUFFIXES)) and origin(file) in ("installed", "user")
    return in_c and name.partition(".")[0] not in WITHOUT_TENSORS
