"""What a step asks of the world outside, and what objects of the standard library hold, is refused or guarded."""

from __future__ import annotations

import array
import configparser
import contextlib
import ctypes
import datetime
import decimal
import functools
import importlib.util
import io
import logging
import multiprocessing
import os
import pathlib
import pickle
import pkgutil
import queue
import random
import socket
import sys
import threading
import time
import types
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter
from time import time as now
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import wholestep as ws
from wholestep.errors import DataDependentError, LeakError, UnsupportedError


class Watch:
    """An object that keeps its clock."""

    def __init__(self) -> None:
        self.clock = time.monotonic


WATCH = Watch()
SYSTEM = random.SystemRandom()
PIPE, SOCKETS = multiprocessing.Pipe(), socket.socketpair()
ASKED: dict[str, Callable[[], Any]] = {
    "time.time": lambda: now(),
    "time.perf_counter": lambda: perf_counter(),
    "time.monotonic": lambda: WATCH.clock(),
    "pickle.loads": lambda: pickle.loads(b"cmath\npi\n."),
    "time.strftime": lambda: time.strftime("%S"),
    "datetime.now": lambda: datetime.datetime.now().microsecond,
    "date.today": lambda: datetime.date.today().day,
    "os.urandom": lambda: os.urandom(1)[0],
    "uuid.uuid4": lambda: uuid.uuid4().int % 7,
    "os.path.exists": lambda: os.path.exists("stop"),
    "open": lambda: open("stop").read(),
    "Path.read_text": lambda: pathlib.Path("stop").read_text(),
    "SystemRandom.random": lambda: SYSTEM.random(),
    "sys.getrecursionlimit": lambda: sys.getrecursionlimit(),
    "threading.current_thread": lambda: len(threading.current_thread().name),
    "decimal.getcontext": lambda: decimal.getcontext().prec,
    "parallel_info": lambda: len(torch.__config__.parallel_info()),
    "get_start_method": lambda: len(multiprocessing.get_start_method()),
    "Connection.recv": lambda: PIPE[0].recv(),
    "Connection.poll": lambda: PIPE[0].poll(),
    "socket.recv": lambda: SOCKETS[0].recv(1)[0],
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_the_world_outside_is_refused(name: str) -> None:
    ask = ASKED[name]

    def step(x: Tensor) -> Tensor:
        return x * float(ask())

    def there() -> list[Any]:
        return [time.time, perf_counter, datetime.datetime, os.urandom, uuid.uuid4, os.path.exists, open, WATCH.clock]

    before = there()
    refused = pytest.raises((DataDependentError, UnsupportedError), match=f"{name}.*a replay would repeat the first")
    with refused as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert f"{__file__}:" in str(caught.value)
    assert all(a is b for a, b in zip(before, there(), strict=True))


def test_the_line_that_asks() -> None:
    def step(x: Tensor) -> Tensor:
        started = datetime.datetime(2020, 1, 1)
        assert isinstance(started, datetime.datetime) and time.gmtime(0).tm_year == 1970
        return x * (datetime.datetime.now() - started).days

    with pytest.raises(DataDependentError) as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert f"{__file__}:{step.__code__.co_firstlineno + 3}" in str(caught.value)


def test_libraries_may_look_at_the_clock_and_log() -> None:
    lines = io.StringIO()
    log = logging.getLogger("wholestep.test")
    log.addHandler(logging.StreamHandler(lines))
    name = str(pathlib.Path(torch.__file__).parent / "some.py")  # as if a library's code stood there
    library = {"log": log}
    exec(compile("def says():\n    log.warning('time to step')", name, "exec"), library)

    def step(x: Tensor) -> Tensor:
        library["says"]()
        return x + 1

    assert torch.equal(ws.compile(step, fullgraph=True)(torch.ones(2)), torch.ones(2) + 1)
    assert lines.getvalue().count("time to step") == 1


@pytest.mark.parametrize("act", [print, logging.getLogger("wholestep.test").info])
def test_what_acts_outside_is_refused_and_has_not_happened(act: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Tensor) -> Tensor:
        act("a step")
        return x + 1

    logging.getLogger("wholestep.test").setLevel(logging.INFO)
    with pytest.raises(UnsupportedError, match=r"ws\.log") as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert f"{__file__}:{step.__code__.co_firstlineno + 1}" in str(caught.value) and not capsys.readouterr().out


class Holder:
    scale = width = 1.0


HELD = Holder()
WEAK, PROXY = weakref.ref(HELD), weakref.proxy(HELD)
BYTES, NUMBERS, VIEW = bytearray([1, 2]), array.array("d", [1.0, 2.0]), memoryview(bytearray([1, 2]))
OF_C = (ctypes.c_double * 2)(1.0, 2.0)
CHAIN, SETTINGS, STOP = ChainMap({"a": 1.0}, {}), configparser.ConfigParser(), threading.Event()
SETTINGS.read_dict({"train": {"scale": "1"}})
CONTEXT: ContextVar[float] = ContextVar("scale", default=1.0)
WEIGHTS, WAITING = numpy.ones(2), queue.SimpleQueue[int]()
TABLE = {"a": 1.0}
SHOWN = types.MappingProxyType(TABLE)
CONTEXT_OF = contextlib.nullcontext(HELD)
FORMAT, FORMATS = "{.width}", "{.width}".format
PARTS = "settings", "_kept", "_elsewhere"  # of the name of a module
ELSEWHERE = types.ModuleType("".join(PARTS))
ELSEWHERE.__file__ = __file__  # the user's


def elsewhere(value: float) -> None:
    vars(ELSEWHERE)["scale"] = value


elsewhere(1.0)
sys.modules[ELSEWHERE.__name__] = ELSEWHERE

READ: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "chain": (lambda: CHAIN["a"], lambda: CHAIN.__setitem__("a", 5.0)),
    "settings": (lambda: SETTINGS.getfloat("train", "scale"), lambda: SETTINGS.set("train", "scale", "5")),
    "event": (lambda: 1 + STOP.is_set(), STOP.set),
    "weak reference": (lambda: WEAK().scale, lambda: setattr(HELD, "scale", 2.0)),  # type: ignore[union-attr]
    "weak proxy": (lambda: PROXY.scale, lambda: setattr(HELD, "scale", 3.0)),
    "format": (lambda: float("{.width}".format(HELD)), lambda: setattr(HELD, "width", 4.0)),  # noqa: UP032
    "format kept elsewhere": (lambda: float(FORMATS(HELD)), lambda: setattr(HELD, "width", 5.0)),
    "format that is data": (lambda: float(FORMAT.format(HELD)), lambda: setattr(HELD, "width", 6.0)),
    "module by a computed name": (lambda: sys.modules["".join(PARTS)].scale, lambda: elsewhere(2.0)),
    "module imported by one": (lambda: importlib.import_module("".join(PARTS)).scale, lambda: elsewhere(3.0)),
    "module imported by __import__": (lambda: __import__("".join(PARTS)).scale, lambda: elsewhere(4.0)),
    "module imported by a library": (lambda: pkgutil.resolve_name("".join(PARTS)).scale, lambda: elsewhere(5.0)),
    "attribute found by a library": (lambda: pkgutil.resolve_name("".join((*PARTS, ":", "scale"))),
                                     lambda: elsewhere(6.0)),
    "what a library's object holds": (lambda: CONTEXT_OF.__enter__().width, lambda: setattr(HELD, "width", 7.0)),
    "read-only mapping": (lambda: SHOWN["a"], lambda: TABLE.__setitem__("a", 5.0)),
    "environment": (lambda: float(os.environ.get("WHOLESTEP_SCALE", "1")),
                    lambda: os.environ.__setitem__("WHOLESTEP_SCALE", "5")),
}  # fmt: skip
UNNAMED = ("module imported by one", "module imported by a library", "attribute found by a library")


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_a_guard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHOLESTEP_SCALE", raising=False)
    read, change = READ[kind]

    def step(x: Tensor) -> Tensor:
        return x * float(read())

    compiled, x = ws.compile(step, fullgraph=kind not in UNNAMED), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x), step(x))
    if kind in UNNAMED:  # its Python runs
        with pytest.raises(UnsupportedError, match="of which its code has no name"):
            ws.compile(step, fullgraph=True)(x)
    else:
        assert compiled.captures == 1
    before = read()
    change()
    assert read() != before and torch.equal(compiled(x), step(x))


def test_a_module_that_a_step_is_the_first_to_import_is_in_sight(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_imported.py").write_text("scale, steps = 2.0, []\n")
    monkeypatch.syspath_prepend(tmp_path)

    def step(x: Tensor) -> Tensor:
        import first_imported  # type: ignore[import-not-found] # noqa: PLC0415

        first_imported.steps.append(1)
        return x * float(first_imported.scale)

    compiled, x = ws.compile(step, fullgraph=True), torch.ones(2)
    try:
        assert [float(compiled(x)[0]) for _ in range(2)] == [2, 2]
        held = vars(sys.modules["first_imported"])
        held["scale"] = 3.0
        assert float(compiled(x)[0]) == 3 and held["steps"] == [1, 1, 1]
    finally:
        sys.modules.pop("first_imported", None)


UNGUARDED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "BYTES": (lambda: BYTES[0], lambda: BYTES.__setitem__(0, BYTES[0] + 1)),
    "NUMBERS": (lambda: NUMBERS[0], lambda: NUMBERS.__setitem__(0, NUMBERS[0] + 1)),
    "VIEW": (lambda: VIEW[0], lambda: VIEW.__setitem__(0, VIEW[0] + 1)),
    "OF_C": (lambda: OF_C[0], lambda: OF_C.__setitem__(0, OF_C[0] + 1)),
    "WEIGHTS": (lambda: WEIGHTS[0], lambda: WEIGHTS.__setitem__(0, WEIGHTS[0] + 1)),
    "WAITING": (lambda: WAITING.qsize(), lambda: WAITING.put(1)),
    "CONTEXT": (lambda: CONTEXT.get(), lambda: CONTEXT.set(CONTEXT.get() + 1)),
}


@pytest.mark.parametrize("name", UNGUARDED)
def test_what_no_guard_compares_is_read_at_each_call(name: str) -> None:
    read, change = UNGUARDED[name]

    def step(x: Tensor) -> Tensor:
        return x * float(read())

    def writes(x: Tensor) -> Tensor:
        change()
        return x * float(read())

    with pytest.raises(UnsupportedError, match=rf"G\['{name}'\], a .*whose contents may be others(.|\n)*{__file__}"):
        ws.compile(step, fullgraph=True)(torch.ones(2))
    compiled, writing, x = ws.compile(step), ws.compile(writes), torch.ones(2)
    for _ in range(3):
        assert torch.equal(compiled(x), step(x))
        before = read()
        assert writing(x)[0] == before + 1 == read()
        change()
    assert name in compiled.breaks[0] and not compiled.captures


def test_a_variable_of_the_environment_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_SCALE", "2")
    compiled = ws.compile(lambda x: x * float(os.environ["WHOLESTEP_SCALE"]), fullgraph=True)
    assert compiled(torch.ones(1)) == 2
    monkeypatch.setenv("WHOLESTEP_OTHER", "2")
    assert compiled(torch.ones(1)) == 2 and compiled.captures == 1
    monkeypatch.setenv("WHOLESTEP_SCALE", "3")
    assert compiled(torch.ones(1)) == 3
    assert compiled.recompiles == ["os.environ['WHOLESTEP_SCALE']: expected '2', found '3'"]
    monkeypatch.delenv("WHOLESTEP_SCALE")
    with pytest.raises(KeyError):
        compiled(torch.ones(1))


def test_a_queue_is_emptied_as_in_eager() -> None:
    waiting: queue.Queue[float] = queue.Queue()
    for number in (2.0, 3.0, 4.0):
        waiting.put(number)
    compiled = ws.compile(lambda x: x * waiting.get(), fullgraph=True)
    assert [float(compiled(torch.ones(()))) for _ in range(2)] == [2, 3] and waiting.qsize() == 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_received_is_left_for_the_call(fullgraph: bool) -> None:
    batch = iter(DataLoader([1.0, 2.0, 3.0], num_workers=1, multiprocessing_context="fork", timeout=20))  # type: ignore[arg-type]
    out, into = os.pipe()
    os.write(into, b"abc")
    taken = ws.compile(lambda: next(batch) * 2, fullgraph=fullgraph)
    read = ws.compile(lambda x: x * os.read(out, 1)[0], fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(DataDependentError, match=r"Queue\.get\(\).*a replay would repeat"):
            taken()
        with pytest.raises(DataDependentError, match=r"os\.read\(\).*a replay would repeat"):
            read(torch.ones(1))
        assert next(batch) == 1 and os.read(out, 1) == b"a"
    else:
        assert [taken().item() for _ in range(3)] == [2, 4, 6]
        assert [read(torch.ones(1)).item() for _ in range(3)] == [*b"abc"]
    os.close(out)
    os.close(into)
    batch._shutdown_workers()  # type: ignore[attr-defined]  # else the collector does, and waits 5 s for each


@functools.lru_cache
def mask(n: int) -> Tensor:
    return torch.ones(n, n).tril()


def test_nothing_made_in_a_step_stays_in_a_cache_of_c() -> None:
    for _ in range(2):  # made in the step, and there before it
        with pytest.raises(UnsupportedError, match="calls or changes .*mask.*, a function with a cache"):
            ws.compile(lambda x: x * mask(2), fullgraph=True)(torch.ones(2, 2))
        assert type(mask(2)) is Tensor


TABLES = """
import functools, torch

@functools.lru_cache(maxsize=8)
def one(n):
    return torch.arange(n) * 2.0

@functools.cache
def both(n):
    return [torch.ones(n), (torch.zeros(n),)]

@functools.lru_cache
def numbers(n, *more):
    return [n * 2.0]

class Store:
    def __init__(self):
        self.by_name = {}
        self.history = []

STORE = Store()

def stored(n):
    if n not in STORE.by_name:
        STORE.by_name[n] = torch.ones(n)
    return STORE.by_name[n]

def noted(n):
    STORE.history.append(torch.ones(3) * n)
    return torch.stack(STORE.history).mean(0)
"""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["one", "both", "numbers", "stored", "noted"])
def test_nothing_made_in_a_step_stays_in_a_librarys_cache(name: str, fails: bool, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "site-packages" / "tables.py"
    file.parent.mkdir()
    file.write_text(TABLES)
    spec = importlib.util.spec_from_file_location(f"tables_{name}_{fails}", file)
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tables
    spec.loader.exec_module(tables)

    count = torch.tensor(3)

    def step(x: Tensor) -> Tensor:
        table = getattr(tables, name)(count.item(), "more") if name == "numbers" else getattr(tables, name)(3)
        if fails and x.sum() > 0:
            raise ArithmeticError("of the step")
        return x * (table if name in ("one", "stored", "noted") else table[0])

    try:
        for _ in range(2):
            says = {"stored": "by_name", "noted": "history"}.get(name, "in a library")
            says = "of the step" if fails else says
            with pytest.raises(ArithmeticError if fails else LeakError, match=says):
                ws.compile(step, fullgraph=True)(torch.ones(3))
        fails = False
        assert type(step(torch.ones(3))) is Tensor  # eager goes on
        assert all(type(value) is Tensor for value in tables.STORE.history)
        tables.STORE.by_name.clear()
        compiled = ws.compile(step)
        assert all(torch.equal(compiled(torch.ones(3)), step(torch.ones(3))) for _ in range(3))  # as Python does
        assert name != "numbers" or tables.numbers(4, "more") == [8.0]
    finally:
        del sys.modules[spec.name]
