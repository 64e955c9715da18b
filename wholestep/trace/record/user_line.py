"""Lines of the user's program: of the frames that run, and of those that an error came through.

While a step is traced, code that calls operators is looked at: what the walk has not met is asked for, or noted.
"""

from __future__ import annotations

import sys
import traceback
from types import CodeType, FrameType, FunctionType

from wholestep.capture import Snapshot
from wholestep.capture.snapshot.names_read import codes_in
from wholestep.capture.snapshot.user_code import is_library, is_system, origin


def user_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame of the user's code, and of the library's that it called, if it is in one.

    Args:
        frame: where to begin, by default at the caller.
    """
    frame, library = frame or sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_system(name) and name != "<string>":
            if not is_library(name):
                return _joined(f"{name}:{frame.f_lineno}", library)
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
    return _joined(user or user_line(), library)


def _joined(user: str, library: str) -> str:
    """Both in one."""
    return f"{user} (in {library})" if user and library else user or library


class UnmetCode(Exception):  # noqa: N818 - a request, not an error
    """User code runs that nothing in reach of the step leads to. Trace again, with its functions in reach."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(f"{code.co_qualname} runs in the step, which has no other way to it")
        self.code = code


class RunningCode:
    """Looks at the frames that operators are called from.

    Args:
        world: is told what runs.
        outermost: the code that calls the step.
    """

    def __init__(self, world: Snapshot, outermost: CodeType) -> None:
        self._world, self._outermost = world, outermost
        self._known: dict[int, CodeType] = {}  # by id, which it keeps
        self._met: frozenset[int] | None = None
        self.request: UnmetCode | None = None

    def line(self, frame: FrameType) -> str:
        """What `user_line` gives for a frame, after a look at it and at those that called it, as far as the step.

        Raises:
            UnmetCode: for the innermost of the user's that the walk has not met.
        """
        running: FrameType | None = frame
        while running is not None and (code := running.f_code) is not self._outermost:
            if id(code) not in self._known:
                self._add(code, running)
            running = running.f_back
        return user_line(frame)

    def done(self) -> None:
        """Raises what it has raised before, where the step has caught that."""
        if self.request is not None:
            raise self.request from None

    def _add(self, code: CodeType, frame: FrameType) -> None:
        called, place = self._world.called, origin(code.co_filename) if code.co_filename != "<string>" else "standard"
        if place == "user":
            if self._met is None:
                functions = [f for f in self._world.reachable.kept if isinstance(f, FunctionType)]
                self._met = frozenset(id(inner) for f in functions for inner in codes_in(f.__code__))
            if id(code) not in self._met:
                self.request = self.request or UnmetCode(code)
                raise self.request
            called.user[id(code)] = code
        elif place == "installed":
            called.note(code, frame.f_globals)
        self._known[id(code)] = code
