"""What Python is told of numbers that vary, of numbers from tensors, of symbolic sizes and of tensors: as in eager."""

from __future__ import annotations

import _thread
import functools
import json
import math
import numbers
import operator
import struct
import threading
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.errors import DataDependentError, UnsupportedError


@functools.singledispatch
def dispatched(n: Any) -> int:
    return 2


@dispatched.register(float)
def _(n: float) -> int:
    return 3


@dispatched.register(int)
def _(n: int) -> int:
    return 4


def matched(n: Any) -> int:
    match n:
        case int():
            return 2
        case float():
            return 3
    return 4


def kinds(*values: Any) -> list[type]:
    return [kind for kind, _ in groupby(values, type)]


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "is float": lambda n: type(n) is float,
    "is int": lambda n: type(n) is int,
    "is not": lambda n: type(n) is not float,
    "equals": lambda n: (type(n) == float, float == type(n), type(n) != int),  # noqa: E721
    "in": lambda n: (type(n) in (float,), type(n) in {float}, type(n) in frozenset([int])),
    "table": lambda n: {float: 2, int: 3}[type(n)],
    "table or": lambda n: {float: 2, int: 3}.get(type(n), 4),
    "name": lambda n: len(f"{type(n).__name__} {type(n)!r} {type(n).__module__}"),
    "subclass": lambda n: (issubclass(type(n), float), issubclass(type(n), numbers.Real), int in type(n).__mro__),
    "of each": lambda n: (list(map(type, [n])) == [float], [(lambda v: type(v))(v) for v in (n,)][0] is int),
    "groups": lambda n: len(kinds(n, 0.5, 1)),
    "made": lambda n: type(n)(3) / 2,
    "class": lambda n: (n.__class__ is float, n.__class__.__name__ == "int"),
    "instance": lambda n: (isinstance(n, float), isinstance(n, (int, str)), isinstance(n, complex)),
    "symbolic": lambda n: (isinstance(n, torch.SymFloat), isinstance(n, (torch.SymInt, float)), isinstance(n, float)),
    "node": lambda n: (hasattr(n, "node"), getattr(n, "node", None) is None, getattr(n, "real", 7) == n),
    "numbers": lambda n: (isinstance(n, numbers.Number), isinstance(n, numbers.Integral), isinstance(n, numbers.Real)),
    "match": matched,
    "dispatch": dispatched,
    "attributes": lambda n: len(dir(n)) + hasattr(n, "__dict__") + hasattr(n, "hex"),
    "bytes": lambda n: n.__sizeof__(),
    "numpy": lambda n: (numpy.isscalar(n), numpy.array(n).dtype == numpy.float64, float(numpy.clip(n, 0, 1))),
    "json": lambda n: len(json.dumps({"n": [n]})),
    "text": lambda n: float(f"{n}") + float("%g" % n) + len(f"{n!r}"),  # noqa: UP031
    "struct": lambda n: sum(struct.pack("d", n)),
    "math": lambda n: math.isnan(n) + math.fsum([n, 1.0]) + math.frexp(n)[0],
    "integer": lambda n: operator.index(n) if type(n) is int else n,
    "tensor": lambda n: torch.tensor(n).dtype == torch.float32,
    "type itself": lambda n: (type(float) is type, isinstance(int, type), type(type(n)) is type, issubclass(int, type)),
    "type of a class": lambda n: (f"{type(int)} {type!r}" == "<class 'type'> <class 'type'>", isinstance(type, type),
                                  issubclass(type, type), type(type) is type, "mro" in dir(type)),
    "what type has": lambda n: (type.__dict__["__mro__"].__get__(int) == int.__mro__, type.__call__(int, 3) == 3,
                                vars(type) is type.__dict__, str(type[int]) == "type[int]"),
}  # fmt: skip


def number(answer: Any) -> float:
    return sum(2**i * float(part) for i, part in enumerate(answer if isinstance(answer, tuple) else (answer,)))


def same(step: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> None:
    assert torch.equal(step(*args), compiled(*args)), args


@pytest.mark.parametrize("values", [(0.25, 0.5, 0.75), (2, 3, 5)], ids=["float", "int"])
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_of_a_number_that_varies(question: Callable[[Any], Any], values: tuple[Any, ...]) -> None:
    def step(x: Tensor, n: Any) -> Tensor:
        return x * number(question(n)) + n

    compiled = ws.compile(step, fullgraph=True)
    for value in values:
        same(step, compiled, torch.ones(2), value)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_of_a_number_from_a_tensor(question: Callable[[Any], Any]) -> None:
    """The answer, where it follows from the type; else a refusal with a line."""

    def step(x: Tensor) -> Tensor:
        return x * number(question(x.sum().item()))

    compiled = ws.compile(step, fullgraph=True)
    try:
        same(step, compiled, torch.ones(2))
    except DataDependentError as error:
        assert error.where.startswith(__file__)
        return
    same(step, compiled, torch.full((2,), 0.25))


def test_a_learning_rate() -> None:
    def step(x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        lr = optimizer.param_groups[0]["lr"]
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()
        return w.detach() * (2 if type(lr) is float else 3)

    results = []
    for compiled in (step, ws.compile(step, fullgraph=True)):
        w = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for lr in (0.1, 0.2, 0.3):
            optimizer.param_groups[0]["lr"] = lr
            results.append(compiled(torch.ones(2), optimizer))
    assert all(map(torch.equal, results[:3], results[3:]))


SIZES: dict[str, Callable[[Tensor], Any]] = {
    "type": lambda x: (type(x.shape[0]) is int, type(x.shape[0] / 2) is float, type(x.shape) is torch.Size),
    "instance": lambda x: (isinstance(x.shape[0], int), isinstance(x.numel(), numbers.Integral)),
    "match": lambda x: matched(x.shape[0] * 2),
    "dispatch": lambda x: dispatched(x.numel()),
    "text": lambda x: len(f"{x.shape} {x.shape[0]} {x.shape[0]!r} {tuple(x.shape)} {x.shape[0] * 2 + 1}"),
}


@pytest.mark.parametrize("question", SIZES.values(), ids=SIZES)
def test_of_a_size(question: Callable[[Tensor], Any]) -> None:
    def step(x: Tensor) -> Tensor:
        return x * number(question(x))

    compiled = ws.compile(step, dynamic=True, fullgraph=True)
    for size in (3, 4, 5, 12):
        same(step, compiled, torch.ones(size))


TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "type": lambda x: type(x * 2) is Tensor,
    "gradient": lambda x: type(torch.autograd.grad(x.square().sum(), x)[0]) is Tensor,
    "class": lambda x: ((x * 2).__class__ is Tensor, x.detach().__class__.__name__ == "Tensor"),
    "parameter": lambda x: type(torch.nn.Parameter(x.detach() * 2)) is torch.nn.Parameter,
    "table": lambda x: {Tensor: 3}.get(type(x * 2), 4),
    "text": lambda x: len(f"{type(x * 2)} {(x * 2).type()} {torch.typename(x * 2)}"),
    "subclass": lambda x: issubclass(type(x * 2), Tensor),
}


@pytest.mark.parametrize("question", TENSORS.values(), ids=TENSORS)
def test_of_a_tensor(question: Callable[[Tensor], Any]) -> None:
    def step(x: Tensor) -> Tensor:
        return x * number(question(x))

    same(step, ws.compile(step, fullgraph=True), torch.ones(2, requires_grad=True))


def test_in_methods_and_functions_that_are_called() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if type(x * 1) is Tensor else self.never(x)

        def never(self, x: Tensor) -> Tensor:
            raise AssertionError

    assert torch.equal(ws.compile(Model(), fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


def test_classes_made_in_the_step_and_other_threads() -> None:
    """`type` makes classes and is a base as ever; other threads see nothing of it, and nothing is left of it."""
    seen: list[Any] = []
    asked = threading.Lock()
    asked.acquire()

    def step(x: Tensor) -> Tensor:
        class Meta(type):
            pass

        made = type("Made", (), {"factor": 3})
        asks = lambda: (seen.append((type(float) is type, type(x.dim()) is int)), asked.release())  # noqa: E731
        _thread.start_new_thread(asks, ())  # below `Thread.start`, which is refused
        asked.acquire()
        return x * made.factor * (2 if Meta("A", (), {}).__class__ is Meta and Meta.__mro__[1] is not object else 5)

    result = ws.compile(step, fullgraph=True)(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 6.0))
    assert "type" not in globals() and seen == [(True, True)]


def test_a_copy_of_globals_has_no_other_names() -> None:
    space: dict[str, Any] = {"torch": torch}
    exec("def step(x): return type(x) is torch.Tensor, dict(globals()), {'type': type}, x * 2", space)
    *given, product = ws.compile(space["step"], fullgraph=True)(torch.ones(2))
    assert given == [True, space, {"type": type}] and torch.equal(product, torch.full((2,), 2.0))


def test_a_class_pattern_of_type_itself() -> None:
    """Under another name it is a class no longer, which `match` needs: eager's way where Python runs, else refused."""

    def step(value: object, x: Tensor) -> Tensor:
        match value:
            case type():
                return x * 2
            case _:
                return x * 3

    for served in (int, 3):
        assert torch.equal(ws.compile(step)(served, torch.ones(2)), step(served, torch.ones(2)))
    with pytest.raises(UnsupportedError, match=r"isinstance\(value, type\)"):
        ws.compile(step, fullgraph=True)(int, torch.ones(2))


def test_of_a_class_that_stays() -> None:
    """What stands for `type` while the step is traced does not outlast that."""

    def step(x: Tensor, held: dict[str, Any]) -> Any:
        held["kind"] = type(int)
        return x + 1, type, [type(int)], {type: 1}, list(map(type, (int, 2)))

    held: dict[str, Any] = {}
    compiled = ws.compile(step, fullgraph=True)
    for _ in range(2):
        assert str(compiled(torch.ones(1), held)) == str(step(torch.ones(1), {})) and held.pop("kind") is type
