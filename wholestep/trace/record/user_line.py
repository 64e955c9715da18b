"""Lines of the user's program: of the frames that run, and of those that an error came through."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

from wholestep.capture.snapshot.user_code import is_library, is_system


def user_line(frame: FrameType | None = None, library: str = "") -> str:
    """``file:line`` of the innermost frame of the user's code, and of the library's that it called, if it is in one.

    Args:
        frame: where to begin, by default at the caller.
        library: the latter, where it is known.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_system(name) and name != "<string>":
            if not is_library(name):
                return joined(f"{name}:{frame.f_lineno}", library)
            library = library or f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def line_of(error: BaseException) -> str:
    """The same for the frames that an error came through, and if none is the user's for those that call now."""
    user = library = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not is_system(name) and name != "<string>":
            user, library = (user, f"{name}:{number}") if is_library(name) else (f"{name}:{number}", "")
    return joined(user or user_line(), library)


def joined(user: str, library: str) -> str:
    """Both in one."""
    return f"{user} (in {library})" if user and library else user or library
