"""What a step asks of the world outside of Python: the time, the system's random bytes, files, the environment.

A replay would repeat the first answer. While a step is traced, the functions that user code names refuse to answer it;
libraries, which may keep logs, are answered as ever. What it reads of the environment becomes a guard.
"""

from __future__ import annotations

import builtins
import datetime
import os
import pathlib
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from wholestep.capture.code import is_library
from wholestep.errors import DataDependentError

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
# Functions, by what has them, that may give another answer at each call.
ASKING: dict[Any, tuple[str, ...]] = {
    time: (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "clock_gettime", "clock_gettime_ns", "localtime", "gmtime",
           "ctime", "asctime", "strftime"),
    os: ("urandom", "getrandom", "times", "getloadavg", "getcwd", "listdir", "scandir", "stat"),
    os.path: ("exists", "isfile", "isdir", "getmtime", "getsize"),
    pathlib.Path: ("read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "iterdir"),
    builtins: ("open", "input"),
    uuid: ("uuid1", "uuid4"),
    secrets: ("token_bytes", "token_hex", "token_urlsafe", "randbits", "randbelow", "choice"),
}  # fmt: skip
# The id of each -> its name: code may have it under another.
NAMES = {id(vars(owner)[name]): name for owner, names in ASKING.items() for name in names if name in vars(owner)}
# Those that do not always: they ask for the time unless they are given one, and read a file unless they write to it.
ASKS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("localtime", "gmtime", "ctime", "asctime"), lambda given=None: given is None),
    "strftime": lambda form, given=None: given is None,
    "open": lambda file, mode="r", *rest, **options: not set(mode) & set("wax"),
}
# Classes of C whose methods ask, which a class of the same name stands for.
ASKING_CLASSES: dict[str, tuple[str, ...]] = {"datetime": ("now", "today", "utcnow"), "date": ("today",)}
SHORT = {os.path: "os.path"}
ENVIRONMENT = "os.environ "  # before the name of a variable, among the names that a step uses
_OF_ENVIRONMENT = (os.__file__, "<frozen os>", "<frozen _collections_abc>")


def variables(names: Iterable[str]) -> list[str | None]:
    """The values of variables of the environment."""
    return [os.environ.get(name) for name in names]


def _asked_by(frame: FrameType | None) -> bool:
    """Whether a call from a frame is user code's, past the methods of the environment."""
    while frame is not None and frame.f_code.co_filename in _OF_ENVIRONMENT:
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Stands for a function while this thread traces."""
    thread, asks = threading.get_ident(), ASKS.get(function.__name__, lambda *_, **__: True)

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and _asked_by(sys._getframe(1)) and asks(*args, **kwargs):
            raise DataDependentError(
                f"the step calls {name}(), whose answer may be another at each call; a replay would repeat the first",
                remedy="call it outside of the step, and pass what depends on it as an argument",
            )
        return function(*args, **kwargs)

    return call


def _standing_for(kind: Any) -> type:
    """A class that does all that another does, but for its methods that ask."""

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

    methods = {name: staticmethod(_refusing(getattr(kind, name), f"{kind.__name__}.{name}"))
               for name in ASKING_CLASSES[kind.__name__]}  # fmt: skip
    return Kind(kind.__name__, (kind,), methods)


class Outside:
    """What one step asks of the world outside, as far as the names show that its code uses.

    Args:
        names: those that are known to be used; with `ENVIRONMENT` before them, variables that are known to be read.

    Attributes:
        environment: name of a variable that the step reads -> its value, None where there is none.
    """

    def __init__(self, names: Iterable[str]) -> None:
        read = [name.removeprefix(ENVIRONMENT) for name in names if name.startswith(ENVIRONMENT)]
        self.environment: dict[str, str | None] = dict(zip(read, variables(read), strict=True))
        self._exchanged: list[tuple[Any, str, Any]] = []

    @property
    def names(self) -> frozenset[str]:
        """The variables in the form of names."""
        return frozenset(ENVIRONMENT + name for name in self.environment)

    def put(self, names: set[str]) -> dict[int, Any]:
        """Puts what refuses in the place of what asks, in modules; gives it by the id of the original.

        Args:
            names: those that the step's code uses.
        """
        standing: dict[int, Any] = {}
        for owner, functions in ASKING.items():
            for name in names.intersection(functions):
                if name in vars(owner):
                    refusing = _refusing(vars(owner)[name], f"{SHORT.get(owner, owner.__name__)}.{name}")
                    self._exchange(standing, owner, name, refusing)
        for name, methods in ASKING_CLASSES.items():
            if not names.isdisjoint(methods):
                self._exchange(standing, datetime, name, _standing_for(getattr(datetime, name)))
        if not names.isdisjoint(("environ", "environb", "getenv", "getenvb")):
            self._watch_environment()
        return standing

    def _exchange(self, standing: dict[int, Any], owner: Any, name: str, replacement: Any) -> None:
        original = vars(owner)[name]
        standing[id(original)] = replacement
        self._exchanged.append((owner, name, original))
        setattr(owner, name, replacement)

    def _watch_environment(self) -> None:
        kind: Any = type(os.environ)
        read, thread = kind.__getitem__, threading.get_ident()

        def watched(environment: Any, key: Any) -> Any:
            if threading.get_ident() == thread and _asked_by(sys._getframe(1)):
                (self.environment[os.fsdecode(key)],) = variables([os.fsdecode(key)])
            return read(environment, key)

        self._exchange({}, kind, "__getitem__", watched)

    def restore(self) -> None:
        """Puts back what was there."""
        while self._exchanged:
            owner, name, original = self._exchanged.pop()
            setattr(owner, name, original)
