"""What a step does to the world outside of Python: lines printed and logged, files written, processes started.

A replay would not do it again. Where the step's Python may run at each call instead, the functions that act refuse to
while the step is traced, before they have done anything. What a library logs, perhaps once, is put off: it is logged
when the step has been captured, and when it is not, the step's Python comes there again.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from wholestep import patches
from wholestep.capture.snapshot.user_code import is_library, is_system
from wholestep.errors import UnsupportedError
from wholestep.patches import Replacement, original

# Functions and methods that act, by what has them.
ACTING: dict[Any, tuple[str, ...]] = {
    builtins: ("print", "input"),
    io.TextIOWrapper: ("write", "writelines"),
    io.BufferedWriter: ("write",), io.FileIO: ("write",),
    io.StringIO: ("write",), io.BytesIO: ("write",),
    os: ("write", "system", "remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir", "kill", "putenv"),
    subprocess.Popen: ("__init__",),
    socket.socket: ("send", "sendall", "sendto", "connect"),
    time: ("sleep",),
}  # fmt: skip
# Kinds that are also memory, which torch and Python write to for purposes of their own.
IN_MEMORY = (io.StringIO, io.BytesIO)
# Files whose acts are none of the step's: warnings, which are said once, and what a let-pass act goes on to.
_LET_PASS = (warnings.__file__, __file__)


class ExternalEffects:
    """Watches one trace.

    Args:
        tracing: whether the calling thread traces the step now.

    Attributes:
        refused: what the step was about to do, by which it was stopped; code of its own may have caught it.
    """

    def __init__(self, tracing: Callable[[], bool]) -> None:
        self._tracing = tracing
        self._logged: list[tuple[logging.Logger, logging.LogRecord]] = []
        self._handle = original(logging.Logger, "handle")
        self.refused: list[UnsupportedError] = []

    def replacements(self) -> list[Replacement]:
        """What stands in the place of what acts."""
        owners = [(owner, name) for owner, names in ACTING.items() for name in names]
        handle = self._handle

        def logs(logger: logging.Logger, record: logging.LogRecord) -> None:
            if not self._tracing():
                handle(logger, record)
            elif is_library(record.pathname):
                self._logged.append((logger, record))
            else:
                self._refuse(f"logging.{record.levelname.lower()}")

        return [*((owner, name, self._refusing(owner, name)) for owner, name in owners),
                (logging.Logger, "handle", logs)]  # fmt: skip

    def log(self) -> None:
        """Logs what libraries have logged meanwhile."""
        for logger, record in self._logged:
            self._handle(logger, record)
        self._logged.clear()

    def _refusing(self, owner: Any, name: str) -> Callable[..., Any]:
        found, says = original(owner, name), f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._tracing() and _acts(owner, sys._getframe(1)):
                self._refuse(says.removeprefix("builtins."))
            return found(*args, **kwargs)

        return call

    def _refuse(self, name: str) -> None:
        error = UnsupportedError(f"the step calls {name}(), which a replay would not do again",
                                 remedy="call it after the step, or by ws.log(fn, **values)")  # fmt: skip
        self.refused.append(error)
        raise error


def _acts(owner: Any, frame: FrameType | None) -> bool:
    """Whether a call is the step's, and none that torch, the import system or a warning makes for itself."""
    while frame is not None and frame.f_code.co_filename == patches.__file__:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith("<frozen") or frame.f_code.co_filename in _LET_PASS:
        return False
    if owner in IN_MEMORY:
        return not is_system(frame.f_code.co_filename)
    return True
