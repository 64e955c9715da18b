"""Code that calls operators while a step is traced: what the walk has not met is asked for, or noted."""

from __future__ import annotations

from types import CodeType, FrameType, FunctionType

from wholestep.capture import Snapshot
from wholestep.capture.snapshot.names_read import codes_in
from wholestep.capture.snapshot.user_code import origin
from wholestep.trace.record.user_line import joined, user_line


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
        self._known: dict[int, tuple[str, CodeType]] = {}  # by id: whose it is, and what keeps the id
        self._met: frozenset[int] | None = None
        self.request: UnmetCode | None = None

    def line(self, frame: FrameType | None) -> str:
        """What `user_line` gives for a frame, after a look at it and at those that called it, as far as the step.

        Raises:
            UnmetCode: for the innermost of the user's that the walk has not met.
        """
        user = library = ""
        while frame is not None and (code := frame.f_code) is not self._outermost:
            place, _ = self._known.get(id(code)) or self._add(code, frame)
            if place == "user":
                user = user or f"{code.co_filename}:{frame.f_lineno}"
            elif place == "installed" and not user:
                library = library or f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return joined(user, library) if user else user_line(frame, library)

    def done(self) -> None:
        """Raises what it has raised before, where the step has caught that."""
        if self.request is not None:
            raise self.request from None

    def _add(self, code: CodeType, frame: FrameType) -> tuple[str, CodeType]:
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
        self._known[id(code)] = place, code
        return self._known[id(code)]
