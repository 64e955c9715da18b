"""What a step asks of the world outside of Python: the time, the system's random bytes, files, the environment.

A replay would repeat the first answer. In the thread that traces a step, the functions that user code names refuse to
answer it; libraries, which may keep logs, are answered as ever. What it reads of the environment becomes a guard.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import gc
import locale
import os
import pathlib
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from typing import Any

import numpy

from wholestep import patches
from wholestep.capture.outside.external_effects import ExternalEffects
from wholestep.capture.outside.torch_settings import READERS, Settings
from wholestep.capture.snapshot.user_code import is_library
from wholestep.errors import CaptureError, DataDependentError
from wholestep.patches import Replacement, original

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
    random.SystemRandom: ("random", "getrandbits"),
    datetime.datetime: ("now", "utcnow"),
    datetime.date: ("today",),
    sys: ("getrecursionlimit", "getswitchinterval", "get_int_max_str_digits", "gettrace", "getprofile"),
    gc: ("isenabled", "get_threshold", "get_count"),
    threading: ("current_thread", "active_count", "enumerate"),
    decimal: ("getcontext",), locale: ("getlocale", "localeconv"), numpy: ("geterr", "get_printoptions"),
}  # fmt: skip
# The id of each -> its name: code may have it under another.
NAMES = {id(vars(owner)[name]): name for owner, names in ASKING.items() for name in names if name in vars(owner)}
# Those that do not always: they ask for the time unless they are given one, and read a file unless they write to it.
ASKS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("localtime", "gmtime", "ctime", "asctime"), lambda given=None: given is None),
    "strftime": lambda form, given=None: given is None,
    "open": lambda file, mode="r", *rest, **options: not set(mode) & set("wax"),
}
SHORT = {os.path: "os.path"}
ENVIRONMENT = "os.environ "  # before the name of a variable, among the names that a step uses
# Code between what a user calls and what asks.
_BETWEEN = (patches.__file__, random.__file__, os.__file__, "<frozen os>", "<frozen _collections_abc>")


def variables(names: Iterable[str]) -> list[Any]:
    """The values of variables of the environment, and of settings."""
    return [READERS[name]() if name in READERS else os.environ.get(name) for name in names]


def _asked_by(frame: FrameType | None) -> bool:
    """Whether a call from a frame is user code's."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


def _refusing(owner: Any, name: str, refused: list[CaptureError]) -> Any:
    """Stands for a function or method.

    Args:
        refused: is added to.
    """
    asks, says = ASKS.get(name, lambda *_, **__: True), f"{SHORT.get(owner, owner.__name__)}.{name}"
    found = original(owner, name)

    def refuse(*args: Any, **kwargs: Any) -> None:
        if _asked_by(sys._getframe(2)) and asks(*args, **kwargs):
            error = DataDependentError(
                f"the step calls {says}(), whose answer may be another at each call; a replay would repeat the first",
                remedy="call it outside of the step, and pass what depends on it as an argument",
            )
            refused.append(error)
            raise error

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse(*args, **kwargs)
        return found(*args, **kwargs)

    def of_class(kind: type, *args: Any, **kwargs: Any) -> Any:
        refuse(*args, **kwargs)
        return found.__get__(None, kind)(*args, **kwargs)

    return classmethod(of_class) if isinstance(owner, type) and not isinstance(found, FunctionType) else call


class Outside:
    """What one step asks of the world outside, as far as the names show that its code uses.

    Args:
        names: those that are known to be used; with `ENVIRONMENT` before them, variables that are known to be read.

    Attributes:
        effects: what watches acts upon the world outside, where they are not to be lost.
        environment: name of a variable that the step reads -> its value, None where there is none; and of settings.
    """

    def __init__(self, names: Iterable[str]) -> None:
        read = [name.removeprefix(ENVIRONMENT) for name in names if name.startswith(ENVIRONMENT)]
        self.settings = Settings()
        self.effects: ExternalEffects | None = None
        self.environment: dict[str, Any] = self.settings.read
        self.environment.update(zip(read, variables(read), strict=True))

    @property
    def names(self) -> frozenset[str]:
        """The variables in the form of names."""
        return frozenset(ENVIRONMENT + name for name in self.environment)

    def replacements(self, names: set[str]) -> list[Replacement]:
        """What refuses, in the place of what asks.

        Args:
            names: those that the step's code uses.
        """
        asking = [(owner, name) for owner, functions in ASKING.items() for name in functions
                  if name in names or owner is random.SystemRandom and "SystemRandom" in names]
        refused = self.settings.refused
        found = [(owner, name, _refusing(owner, name, refused)) for owner, name in asking if name in vars(owner)]
        if not names.isdisjoint(("environ", "environb", "getenv", "getenvb")):
            kind: Any = type(os.environ)
            found.append((kind, "__getitem__", self._watching(original(kind, "__getitem__"))))
        acting = self.effects.replacements() if self.effects is not None else ()
        return [*found, *self.settings.replacements(), *acting]

    def _watching(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def watched(environment: Any, key: Any) -> Any:
            if _asked_by(sys._getframe(1)):
                (self.environment[os.fsdecode(key)],) = variables([os.fsdecode(key)])
            return read(environment, key)

        return watched
