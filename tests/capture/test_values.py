"""What a step returns and leaves behind, whatever kind of object it is: as eager makes it anew at each call."""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.errors import LeakError


class Holder:
    kept: Any = None

    def __init__(self, t: Any) -> None:
        self.t = t

    def twice(self) -> Any:
        return self.t * 2


@dataclass(slots=True, frozen=True)
class Slotted:
    t: Any


class Tagged(list[Any]):
    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag


class Counted(tuple[Any, ...]):
    pass


class Wrong(Exception):
    def __init__(self, loss: Any, code: int) -> None:
        super().__init__(f"wrong: {code}")
        self.loss = loss


def closure(x: torch.Tensor) -> Any:
    holder = Holder(x * 2)
    return lambda: holder.t


def defaults(x: torch.Tensor) -> Any:
    def inner(a: Any = x * 2, *, b: Any = x * 3) -> Any:
        return a + b

    return inner


def recursive(x: torch.Tensor) -> Any:
    y = x * 2

    def inner(n: int = 2) -> Any:
        return y if n == 0 else inner(n - 1)

    return inner


def counter(x: torch.Tensor) -> Any:
    calls: list[int] = []

    def call() -> int:
        calls.append(1)
        return len(calls)

    return call, lambda: calls


def caught(x: torch.Tensor) -> Any:
    try:
        raise Wrong(x * 2, 7)
    except Wrong as error:
        return error, error.loss


def chained(x: torch.Tensor) -> Any:
    try:
        try:
            raise KeyError("a")
        except KeyError as error:
            raise OSError(2, "none", "file") from error
    except OSError as error:
        return error, error.__cause__, error.filename


def attributes(x: torch.Tensor) -> Any:
    def inner() -> Any:
        return inner.t  # type: ignore[attr-defined]

    inner.t = x * 2  # type: ignore[attr-defined]
    return inner


def tagged(x: torch.Tensor) -> Any:
    made = Tagged("a")
    made.append(x * 2)
    return made, made.tag, Counted([x * 2])


def own_self(x: torch.Tensor) -> Any:
    holder = Holder(x * 2)
    holder.me = holder  # type: ignore[attr-defined]
    return lambda: holder.me.me.t  # type: ignore[attr-defined]


def weak(x: torch.Tensor) -> Any:
    y = x * 2
    return weakref.ref(y), y


STEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "closure": closure,
    "argument in a closure": lambda x: lambda: x,
    "defaults": defaults,
    "recursive": recursive,
    "counter": counter,
    "exception": caught,
    "chained": chained,
    "attributes of a function": attributes,
    "subclasses": tagged,
    "cycle": own_self,
    "weak": weak,
    "method": lambda x: Holder(x * 2).twice,
    "method of a tensor": lambda x: (x * 2).sum,
    "partial": lambda x: functools.partial(torch.add, x * 2, alpha=2, other=1),
    "slots": lambda x: Slotted(x * 2),
    "iterator": lambda x: iter([x * 2, x]),
    "map": lambda x: map(torch.neg, [x * 2]),
    "sums": lambda x: itertools.accumulate([x * 2, x * 3], initial=1),
    "sums of a chain": lambda x: itertools.accumulate(itertools.chain([x * 2], [x]), initial=x * 3),
    "zip": lambda x: zip([x * 2], itertools.chain([x], [x * 3]), strict=False),
    "enumerate": lambda x: enumerate({"a": x * 2}.values(), 3),
    "views": lambda x: ({"a": x * 2}.values(), collections.OrderedDict(a=x).items()),
    "read-only": lambda x: types.MappingProxyType({"a": x * 2}),
    "containers": lambda x: (collections.defaultdict(list, a=x * 2), collections.Counter("aab"),
                             collections.ChainMap({"a": x * 2})),
    "deque": lambda x: collections.deque([x * 2], 3),
    "results": lambda x: torch.max(x * 2, 0),
    "number": lambda x: (lambda s: lambda: s)((x * 2).sum().item()),
    "objects": lambda x: (object(), x * 2)[1],
}  # fmt: skip

# What a replay makes anew; the Python of the other steps runs at each call.
REPLAYED = (
    "closure", "argument in a closure", "defaults", "counter", "subclasses", "cycle", "weak", "method", "slots",
    "containers", "results", "number", "objects",
)  # fmt: skip


def shown(value: Any) -> Any:
    """A value as it can be compared: called or read through, by the kinds that it is made of."""
    if isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor
        return value.tolist()
    if isinstance(value, weakref.ref):
        return "reference", shown(value())
    if callable(value):
        return type(value), shown(value())
    if isinstance(value, (dict, collections.ChainMap)):
        return type(value), {key: shown(v) for key, v in value.items()}
    if isinstance(value, BaseException):
        return type(value), str(value), [shown(v) for v in vars(value).values()]
    several = (list, tuple, Iterator, types.MappingProxyType, collections.deque)
    if isinstance(value, several) or hasattr(value, "mapping"):
        length = getattr(value, "maxlen", None)
        return type(value), length, [shown(v) for v in value]
    if isinstance(value, (Holder, Slotted)):
        return type(value), shown(value.t)
    return value


@pytest.mark.parametrize("name", STEPS)
def test_whatever_a_step_returns_is_made_anew(name: str) -> None:
    step = STEPS[name]
    compiled = ws.compile(step, fullgraph=name in REPLAYED)
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2,), value)
        assert shown(compiled(x.clone())) == shown(step(x.clone()))
    if name in REPLAYED:
        assert compiled.captures == 1
    else:
        assert re.search("cannot be made again at each call|contains itself", compiled.breaks[0])


@pytest.mark.parametrize("name", STEPS)
def test_whatever_a_step_keeps_is_made_anew(name: str) -> None:
    found = []
    for wrap in (lambda f: f, functools.partial(ws.compile, fullgraph=name in REPLAYED)):
        module, log = nn.Linear(2, 2), list[Any]()

        def make(module: nn.Module, log: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
            def step(x: torch.Tensor) -> torch.Tensor:
                module.kept = STEPS[name](x)  # type: ignore[assignment]
                log.append(STEPS[name](x))
                Holder.kept = x * 5
                return x + 1

            return step

        run = wrap(make(module, log))
        for value in (1.0, 2.0):
            run(torch.full((2,), value))
        found.append((shown(module.kept), [shown(v) for v in log], shown(Holder.kept)))
        Holder.kept = None
    assert found[0] == found[1]


def test_the_standard_output_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(None)

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.t = sys.stdout
        return x * 2

    compiled = ws.compile(step, fullgraph=True)
    compiled(torch.ones(1))
    assert holder.t is sys.stdout
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    compiled(torch.ones(1))
    assert holder.t is sys.stderr


def test_an_object_of_a_library_stays_itself() -> None:
    def step(x: torch.Tensor) -> Any:
        return x * 2, nn.functional.relu, torch.nn.init.zeros_, sys.stdin, sys.path_hooks[1]

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(2):
        assert all(a is b for a, b in zip(compiled(torch.ones(1))[1:], step(torch.ones(1))[1:], strict=True))


def test_functions_of_one_call_share_their_cells() -> None:
    def step(x: torch.Tensor) -> Any:
        total = x * 2

        def add(value: float) -> None:
            nonlocal total
            total = total + value

        return add, lambda: total

    compiled = ws.compile(step, fullgraph=True)
    for value in (1.0, 2.0):
        add, total = compiled(torch.full((1,), value))
        add(3.0)
        assert total().item() == value * 2 + 3


LIBRARY = types.ModuleType("some_library")


def in_library(x: torch.Tensor) -> torch.Tensor:
    vars(importlib.import_module("some_library"))["last"] = [x * 2]
    return x + 1


def in_library_number(x: torch.Tensor) -> torch.Tensor:
    vars(importlib.import_module("some_library"))["last"] = [(x * 2).sum().item()]
    return x + 1


def in_new_class(x: torch.Tensor) -> Any:
    class Local:
        t = x * 2

    return Local


def generator(x: torch.Tensor) -> Any:
    y = x * 2
    return (y for _ in range(2))


@pytest.mark.parametrize(("step", "words"), [
    (in_library, r"\(2,\), torch.float32.*in module some_library\['last'\]\[0\]"),
    (in_library_number, r"a number computed in the step is kept in module some_library\['last'\]"),
    (in_new_class, r"in class in_new_class.<locals>.Local"),
    (generator, "a generator made in the step, which cannot be made again"),
])  # fmt: skip
def test_what_is_alive_after_a_capture_is_found_by_identity(
    step: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "some_library", LIBRARY)
    with pytest.raises(LeakError, match=words) as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert f"at: {__file__}:" in str(caught.value)
    vars(LIBRARY).pop("last", None)


def test_garbage_of_the_step_is_no_leak() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        cycle: list[Any] = [x * 2]
        cycle.append(cycle)
        return x + 1

    compiled = ws.compile(step, fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2
