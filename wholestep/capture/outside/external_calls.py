"""Calls into the world outside: clocks, files, the environment, random numbers, lines printed and logged.

A replay would repeat the first answer, and not act again. So a table says what a call of each function by which Python
asks or acts means, and while a step is traced, in its thread, it is refused before it has done anything. What is read
of the environment becomes a guard. What libraries log, perhaps once, is logged when the step has been captured; when it
is not, the step's Python comes there again. Modules that a step is the first to import are executed as ever; the user's
are in sight when it is traced again.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import functools
import gc
import importlib._bootstrap as machinery
import io
import locale
import logging
import multiprocessing
import os
import pathlib
import pickle
import queue
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import accumulate
from multiprocessing import connection, queues
from types import ClassMethodDescriptorType
from typing import Any, NamedTuple

import numpy
import torch

from wholestep import patches
from wholestep.capture.outside.shared_generators import Draws
from wholestep.capture.outside.torch_settings import READERS, Settings
from wholestep.capture.snapshot.user_code import is_library, is_system, is_user_module, origin
from wholestep.errors import CaptureError, DataDependentError, UnsupportedError
from wholestep.patches import Replacement, original, suspended
from wholestep.torch_compat import FUNCTION_MODES, dispatch_modes_off, function_modes_disabled


class Verdict(NamedTuple):
    """What a call means for a step.

    Attributes:
        error, what, remedy: how it is refused.
        applies: whether it is, by what has the function and the file that calls it.
    """

    error: type[CaptureError]
    what: str
    remedy: str
    applies: Callable[[Any, str], bool]


# Kinds of files that are also memory, which torch and Python write to for purposes of their own.
IN_MEMORY = (io.StringIO, io.BytesIO)
# Code whose acts are none of the step's: warnings, which are said once, imports, and torch's compiler, which torch 2.11
# asks for its folder wherever a function is put under it.
_LET_PASS = (warnings.__file__, "<frozen", os.path.join(os.path.dirname(torch.__file__), "_inductor", ""))
# Code between what a user calls and what asks.
_BETWEEN = {__file__, patches.__file__, random.__file__, os.__file__, "<frozen os>", "<frozen _collections_abc>"}


def _acts(owner: Any, file: str) -> bool:
    """Whether a call is the step's, and none that torch, the import system or a warning makes for itself."""
    return not file.startswith(_LET_PASS) and not (owner in IN_MEMORY and is_system(file))


ASKS = Verdict(
    DataDependentError, "whose answer may be another at each call; a replay would repeat the first",
    "call it outside of the step, and pass what depends on it as an argument", lambda _, file: not is_library(file),
)  # fmt: skip
# What is received is gone, whoever asks for it: the iterator of a DataLoader.
TAKES = ASKS._replace(applies=_acts)
ACTS = Verdict(UnsupportedError, "which a replay would not do again",
               "call it after the step, or by ws.log(fn, **values)", _acts)  # fmt: skip
# Not by installed packages, whose threads are their own: the monitor of tqdm.
STARTS = ACTS._replace(applies=lambda _, file: origin(file) != "installed")
# Nor by any library, for objects of its own: torch's fake tensors.
WATCHES = ACTS._replace(applies=lambda _, file: not is_library(file))
DRAWS = Verdict(
    DataDependentError, "whose numbers a replay would repeat",
    "draw with torch, or draw outside of the step and pass the number as an argument; what a library draws is switched "
    "off in its settings (SpecAugment: a probability of 0)", lambda *_: True,
)  # fmt: skip

# What seeds at random, tells the seed, or shares states between generators.
SEEDS = DRAWS._replace(error=UnsupportedError, what="which a graph cannot hold",
                       remedy="seed with a number: manual_seed(n), or save and restore states: get_state(), "
                              "set_state(state)")  # fmt: skip
# What no graph can hold, whoever calls it.
MAKES = Verdict(UnsupportedError, "whose result no fake tensor can stand for",
                "make it outside of the step, or compile without fullgraph=True", lambda *_: True)  # fmt: skip
EVALUATES = MAKES._replace(what="which evaluates its closure as often as the data ask for",
                           remedy="use another optimizer, or compile without fullgraph=True")  # fmt: skip

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
SYSTEMS = random.SystemRandom  # in whose methods others of it end

# By what has them, names of functions and methods.
TABLE: list[tuple[Verdict, dict[Any, tuple[str, ...]]]] = [
    (ASKS, {
        time: (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "clock_gettime", "clock_gettime_ns", "localtime",
               "gmtime", "ctime", "asctime", "strftime"),
        os: ("urandom", "getrandom", "times", "getloadavg", "getcwd", "listdir", "scandir", "stat"),
        os.path: ("exists", "isfile", "isdir", "getmtime", "getsize"),
        pathlib.Path: ("read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "iterdir"),
        builtins: ("open",),
        uuid: ("uuid1", "uuid4"),
        secrets: ("token_bytes", "token_hex", "token_urlsafe", "randbits", "randbelow", "choice"),
        SYSTEMS: ("random", "getrandbits"),
        datetime.datetime: ("now", "utcnow"),
        datetime.date: ("today",),
        sys: ("getrecursionlimit", "getswitchinterval", "get_int_max_str_digits", "gettrace", "getprofile"),
        gc: ("isenabled", "get_threshold", "get_count"),
        type(threading.Lock()): ("locked",), threading: ("current_thread", "active_count", "enumerate"),
        queues.Queue: ("qsize", "empty"), queues.SimpleQueue: ("empty",), connection.Connection: ("poll",),
        pickle: ("load", "loads", "_load", "_loads"), pickle.Unpickler: ("load",),  # globals by any name
        decimal: ("getcontext",), locale: ("getlocale", "localeconv"), numpy: ("geterr", "get_printoptions"),
        torch.overrides: FUNCTION_MODES, torch.__config__: ("parallel_info",),
        **dict.fromkeys((torch.Tensor, torch.UntypedStorage), ("is_shared",)),
        **dict.fromkeys((multiprocessing, torch.multiprocessing), ("get_start_method",)),
    }),
    (TAKES, {
        socket.socket: ("recv", "recv_into", "recvfrom", "accept"), os: ("read",),
        queues.Queue: ("get",), queues.SimpleQueue: ("get",),
        connection.Connection: ("recv", "recv_bytes"),
    }),
    (ACTS, {
        builtins: ("print", "input"),
        io.TextIOWrapper: ("write", "writelines"),
        io.BufferedWriter: ("write",), io.FileIO: ("write",),
        io.StringIO: ("write",), io.BytesIO: ("write",),
        os: ("write", "system", "remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir", "kill",
             "putenv"),
        subprocess.Popen: ("__init__",),
        socket.socket: ("send", "sendall", "sendto", "connect"),
        time: ("sleep",), torch: ("save",), pickle: ("dump", "dumps"),
    }),
    (MAKES, {
        torch.nested: tuple(name for name in torch.nested.__all__ if name != "to_padded_tensor"),
        torch.jit: ("trace", "trace_module"),
    }),
    (EVALUATES, {torch.optim.LBFGS: ("step",)}),
    (SEEDS, {torch.Generator: ("seed", "initial_seed", "set_offset", "get_offset", "clone_state",
                               "graphsafe_get_state", "graphsafe_set_state")}),
    (STARTS, {
        threading.Thread: ("start",), threading.Event: ("set",), queue.Queue: ("put",), queue.SimpleQueue: ("put",),
    }),
    (WATCHES, {weakref.finalize: ("__init__",)}),
]  # fmt: skip
# These ask for the time unless they are given one, as an argument at this place.
_GIVEN = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
_SHORT = {os.path: "os.path"}
# By what Python learns the levels of loggers.
LEVELS: tuple[tuple[Any, str], ...] = (
    (logging.Logger, "isEnabledFor"), (logging.Logger, "getEffectiveLevel"), (logging, "getLogger"))


def variables(names: Iterable[str]) -> list[Any]:
    """The values of variables of the environment, and of settings."""
    return [READERS[name]() for name in names]


def _levels(logger: Any) -> list[int]:
    """What decides on whether a logger logs: its own level and those above it, and what is switched off."""
    found = [logger.manager.disable, logger.disabled]
    while logger is not None:
        found.append(logger.level)
        logger = logger.parent
    return found


def _caller(between: str = "") -> str:
    """The file of the code that calls what is patched, by way of another file or not."""
    frame = sys._getframe(1)
    file = frame.f_code.co_filename
    while frame.f_back is not None and (file in _BETWEEN or file == between):
        frame = frame.f_back
        file = frame.f_code.co_filename
    return file


class FirstImportError(UnsupportedError):
    """A module of the user's comes into sight as the step imports it: it is there for the next attempt."""


class Outside:
    """What one step asks of the world outside, and would do there.

    Args:
        names: those that are known to be used, of variables and settings too.

    Attributes:
        refused: why it cannot be replayed; code of its own may have caught that.
        draws: from random generators of Python and NumPy.
        environment: name of a variable that the step reads -> its value, None where there is none; and of settings.
        modules: the user's that are in sight.
        ended: whether nothing is refused any more; who wraps what stood in a class meanwhile may keep it for good.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.refused: list[CaptureError] = []
        self.draws = Draws(lambda generator: self._refuse(DRAWS, f"draws from {generator}"))
        self.settings = Settings(self.refused)
        self.modules = set[Any]()
        self.environment: dict[str, Any] = self.settings.read
        for name in READERS.keys() & names:
            self.settings.note(name, READERS[name])
        self._logged: list[tuple[logging.Logger, logging.LogRecord]] = []
        self.ended = False

    def replacements(self, named: Set[str]) -> Iterator[Replacement]:
        """What stands in the place of functions that ask and act.

        Args:
            named: names that the step's code uses, among which are those of all that it asks.
        """
        self.ended = False
        if "warn" in named:  # which these may make an error
            self.settings.note("filters of warnings", lambda: [*warnings.filters])
        for verdict, owners in TABLE:
            yield from ((owner, name, self._refusing(verdict, owner, name))
                        for owner, names in owners.items() for name in names
                        if hasattr(owner, name) and (verdict is not ASKS or name in named or owner is SYSTEMS))
        yield from self.draws.replacements()
        yield type(os.environ), "__getitem__", lambda environ, key: self._read(environ, key)
        yield from ((owner, name, self._of_level(owner, name)) for owner, name in LEVELS)
        yield logging.Logger, "handle", lambda logger, record: self._log(logger, record)
        yield machinery, "_find_and_load", lambda name, importer: self._import(name, importer)
        yield from self.settings.replacements()

    def raise_refused(self) -> None:
        """Raises what the step was refused with first."""
        if self.refused:
            raise self.refused.pop(0)  # with it goes what its traceback holds

    def end(self) -> None:
        """Ends the trace."""
        self.ended = True

    def log(self) -> None:
        """Logs what libraries have logged meanwhile."""
        while self._logged:
            logger, record = self._logged.pop(0)
            logger.handle(record)

    def _refuse(self, verdict: Verdict, does: str) -> None:
        self.refused.append(verdict.error(f"the step {does}, {verdict.what}", remedy=verdict.remedy))
        raise self.refused[0]  # what code that caught it asks then is of no interest

    def _refusing(self, verdict: Verdict, owner: Any, name: str) -> Any:
        found, place = original(owner, name), _GIVEN.get(name)
        says = f"calls {f'{_SHORT.get(owner, owner.__name__)}.{name}'.removeprefix('builtins.')}()"

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.ended and (place is None or len(args) <= place) and verdict.applies(owner, _caller()):
                self._refuse(verdict, says)
            return found(*args, **kwargs)

        def of_class(kind: type, *args: Any, **kwargs: Any) -> Any:
            if verdict.applies(owner, _caller()):
                self._refuse(verdict, says)
            return found.__get__(None, kind)(*args, **kwargs)

        return classmethod(of_class) if isinstance(found, (classmethod, ClassMethodDescriptorType)) else call

    def _read(self, environ: Any, key: Any) -> Any:
        asked, name = not is_library(_caller()), os.fsdecode(key)
        if asked:
            self.settings.note(f"os.environ[{name!r}]", functools.partial(os.environ.get, name))
        with suspended():
            return environ[key]

    def _import(self, name: str, importer: Any) -> Any:
        """Imports a module, which may be there, with real tensors; one of the user's has to be in sight."""
        new = name not in sys.modules
        with suspended(), function_modes_disabled(), dispatch_modes_off():
            module = original(machinery, "_find_and_load")(name, importer)
        held = [sys.modules.get(above) for above in accumulate(name.split("."), "{}.{}".format)]
        if not self.ended and any(is_user_module(one) and one not in self.modules for one in held):
            what = f"the step imports {name}, " + ("the first to do so" if new else "of which its code has no name")
            kind = FirstImportError if new else UnsupportedError
            self.refused.append(kind(what, remedy="import it before the step"))
            raise self.refused[-1]
        return module

    def _of_level(self, owner: Any, name: str) -> Any:
        found = original(owner, name)

        def ask(*args: Any) -> Any:
            answer = found(*args)
            logger = answer if owner is logging else args[0]
            if not is_library(_caller(logging.__file__)):
                self.settings.note(f"levels of the logger {logger.name!r}", functools.partial(_levels, logger))
            return answer

        return ask

    def _log(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        if not is_library(record.pathname):
            self._refuse(ACTS, f"calls logging.{record.levelname.lower()}()")
        self._logged.append((logger, record))
