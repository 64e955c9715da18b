"""What a user changes between two calls, and effects outside of tensors: never silently wrong."""

from __future__ import annotations

import builtins
import copy
import functools
import ipaddress
import logging
import math
import operator
import random
import re
import statistics
import string
import struct
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from tests.support.equal import Make, World, assert_same_or_refused, assert_same_run
from tests.zoo.models import labelled, training
from tests.zoo.nets import MLP
from wholestep.errors import CaptureError

CHANGES: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], str, str]] = {
    "shape": (lambda x, y: (x[:3].clone(), y[:3].clone()), "x", "shape"),
    "dtype": (lambda x, y: (x, y.int()), "y", "dtype"),
    "requires_grad": (lambda x, y: (x.clone().requires_grad_(), y), "x", "requires_grad"),
    "stride": (lambda x, y: (x.t().contiguous().t(), y), "x", "stride"),
}


CONVERSIONS: list[Callable[[nn.Module], Any]] = [
    nn.Module.double, nn.Module.bfloat16, nn.Module.float, lambda model: model.to(memory_format=torch.channels_last),
]  # fmt: skip


def test_a_module_is_converted_in_place() -> None:
    """Its parameters stay the same objects, and what is contiguous may be so in two memory formats."""

    def make(seed: int) -> World:
        model = nn.Conv2d(3, 3, 1)

        def step(x: Tensor) -> Tensor:
            out: Tensor = model(x.to(model.weight.dtype).contiguous())
            out.sum().backward()
            return out

        def after(i: int, result: Tensor) -> None:
            model.zero_grad()
            CONVERSIONS[i % 4](model)

        return World(step, [(torch.randn(2, 3, 2, 2),) for _ in range(6)], {"model": model}, after, changing=True)

    assert_same_run(make, 6)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_arguments_recompile_and_say_why(change: str) -> None:
    alter, source, word = CHANGES[change]

    def make(seed: int) -> World:
        weight = nn.Parameter(torch.ones(6))

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss = (x * weight).sum()
            loss.backward()
            weight.grad = None
            return x * 2, y + 1

        x, y = torch.randn(5, 6), torch.arange(5)
        return World(step, [(x, y), (x, y), alter(x, y), (x, y), alter(x, y)], {"weight": weight})

    run = assert_same_run(make)
    assert [len(reasons) for reasons in run.recompiles] == [0, 0, 1, 1, 1]
    reason = str(run.recompiles[-1][0])
    assert f"L['{source}']" in reason
    assert word in reason
    assert "expected" in reason
    assert "found" in reason


def test_changed_duplicates_recompile_and_say_why() -> None:
    def make(seed: int) -> World:
        def step(x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x * y

        a, b = torch.randn(3), torch.randn(3)
        return World(step, [(a, b), (a, b), (a, a), (a, b)])

    run = assert_same_run(make)
    assert len(run.recompiles[-1]) == 1
    assert "L['x'] is L['y']" in str(run.recompiles[-1][0])


def edit(what: str) -> Callable[[int, Any], None]:
    """A thing that a user changes between two calls, on the model that the world trains."""

    def act(model: Any) -> None:
        if what == "training flag":
            model.drop.eval()
        elif what == "plain attribute":
            model.drop.p = 0.7
        elif what == "hook added":
            model.fc1.register_forward_hook(lambda module, args, output: output * 2)
        elif what == "tensor hook added":
            model.fc2.bias.register_hook(lambda grad: grad * 2)
        elif what == "layer replaced":
            model.fc1 = nn.Linear(6, 10).requires_grad_(False)
        elif what == "parameter replaced":
            model.fc1.bias = nn.Parameter(torch.ones(10))
        elif what == "forward replaced":
            model.drop.forward = lambda x: x * 3
        elif what == "grad mode of a parameter":
            model.fc2.weight.requires_grad_(False)
        elif what == "data swapped":
            model.fc1.weight.data = torch.ones(10, 6)

    return act


EDITS = (
    "training flag",
    "plain attribute",
    "hook added",
    "tensor hook added",
    "layer replaced",
    "parameter replaced",
    "forward replaced",
    "grad mode of a parameter",
    "data swapped",
)


@pytest.mark.parametrize("what", EDITS)
def test_edited_models_are_never_silently_wrong(what: str) -> None:
    def make(seed: int) -> World:
        world = training(lambda model, x, y: model(x, y))(seed)
        act = edit(what)
        world.after = lambda i, result: act(world.watch["model"]) if i == 1 else None
        world.changing = what == "parameter replaced"  # its gradient is nobody's to clear
        return world

    run = assert_same_run(make)
    assert len(run.recompiles[-1]) <= 1 or what in ("layer replaced", "parameter replaced")


def counts_calls(seed: int) -> World:
    """A Python counter: replaying a graph would not move it."""
    world = training(lambda model, x, y: model(x, y))(seed)
    counter = {"calls": 0}
    inner = world.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        counter["calls"] += 1
        return inner(x, y)

    return World(step, world.args, world.watch | {"counter": counter}, changing=True)


def counts_on_the_module(seed: int) -> World:
    def forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
        model.calls += 1
        return model(x, y)

    world = training(forward)(seed)
    world.watch["model"].calls = 0
    world.changing = True
    return world


def python_random(seed: int) -> World:
    return training(lambda model, x, y: model(x, y) * random.random())(seed)


def numpy_random(seed: int) -> World:
    return training(lambda model, x, y: model(x, y) * float(numpy.random.rand()))(seed)


def generator_seeded_inside(seed: int) -> World:
    generator = torch.Generator().manual_seed(3)

    def step(x: Tensor) -> Tensor:
        return x + torch.randn(3, generator=generator.manual_seed(1))

    return World(step, [(torch.ones(3),)])


def generator_made_inside(seed: int) -> World:
    return World(lambda x: x + torch.randn(3, generator=torch.Generator().manual_seed(3)), [(torch.ones(3),)])


def array_written(seed: int) -> World:
    counts = numpy.zeros(3)

    def step(x: Tensor) -> Tensor:
        counts[1] += 1
        return x * 2

    return World(step, [(torch.ones(3),)], {"counts": lambda: counts.tolist()})


def seed_set_inside(seed: int) -> World:
    def step(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return F.dropout(x)

    return World(step, [(torch.ones(9),)])


def grad_scaler(seed: int) -> World:
    model = MLP()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    return World(step, labelled(), {"model": model, "opt": opt})


def global_number_read(seed: int) -> World:
    """A closure number that changes between calls."""
    settings = {"scale": 1.0}

    def after(i: int, result: Tensor) -> None:
        settings["scale"] += 1.0

    return World(lambda x: x * settings["scale"], [(torch.ones(3),)], after=after, changing=True)


def closure_tensor_replaced(seed: int) -> World:
    """A closure tensor that is another object at each call."""
    held = {"target": torch.ones(3)}

    def after(i: int, result: Tensor) -> None:
        held["target"] = torch.full((3,), float(i))

    return World(lambda x: x * held["target"], [(torch.ones(3),)], after=after, changing=True)


def iterator_consumed(seed: int) -> World:
    batches = iter([torch.full((2,), float(i)) for i in range(9)])
    return World(lambda x: x + next(batches), [(torch.ones(2),)])


def attribute_of_an_object(seed: int) -> World:
    class Meter:
        total = torch.zeros(())

    meter = Meter()

    def step(x: Tensor) -> Tensor:
        meter.total = meter.total + x.sum()
        return meter.total

    return World(step, [(torch.ones(2),)], {"meter": meter}, changing=True)


PYTHON_EFFECTS = (
    counts_calls,
    counts_on_the_module,
    python_random,
    numpy_random,
    generator_seeded_inside,
    generator_made_inside,
    array_written,
    seed_set_inside,
    grad_scaler,
    global_number_read,
    closure_tensor_replaced,
    iterator_consumed,
    attribute_of_an_object,
)


@pytest.mark.parametrize("make", PYTHON_EFFECTS, ids=lambda f: f.__name__)
def test_python_effects_are_right_or_refused(make: Make) -> None:
    """Never silently wrong: what a replay cannot repeat is repeated by other means, or refused."""
    assert_same_or_refused(make)


class Failed(ValueError):
    def __init__(self, shown: float, factor: float) -> None:
        super().__init__(shown)
        self.factor = factor


def because(v: float) -> Exception:
    error = ValueError()
    error.__cause__ = KeyError(v)
    return error


# What is made of a number, and how a step reads it: objects of C and of the standard library that are not looked into.
OBJECTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "exception": (ValueError, lambda e: e.args[0]),
    "exception of the user's": (lambda v: Failed(v, v + 1), lambda e: e.args[0] * e.factor),
    "exception of a tensor": (lambda v: ValueError(torch.tensor(v)), lambda e: e.args[0]),
    "text of an exception": (ValueError, lambda e: float(str(e))),
    "cause": (because, lambda e: e.__cause__.args[0]),
    "end of an iteration": (StopIteration, lambda e: e.value),
    "itemgetter": (lambda v: operator.itemgetter(int(v)), lambda get: get([5.0, 6.0, 7.0, 8.0])),
    "methodcaller": (lambda v: operator.methodcaller("__mul__", v), lambda call: call(3.0)),
    "match": (lambda v: re.match("[0-9]", str(v)), lambda found: float(found.group())),
    "property": (lambda v: property(lambda _: v), lambda p: p.fget(0)),
    "cell": (lambda v: (lambda: v).__closure__[0], lambda cell: cell.cell_contents),  # type: ignore[index]
    "layout of bytes": (lambda v: struct.Struct("f" * int(v)), lambda found: found.size),
    "dtype of NumPy": (lambda v: numpy.dtype(f"S{int(v)}"), lambda dtype: dtype.itemsize),
    "limits": (lambda v: torch.finfo((torch.half, torch.float, torch.double)[int(v) - 1]), lambda found: found.bits),
    "keys": (lambda v: dict.fromkeys(range(int(v))).keys(), len),
    "address": (lambda v: ipaddress.IPv4Address(int(v)), int),
    "template": (lambda v: string.Template(str(v)), lambda found: float(found.template)),
    "record of a log": (lambda v: logging.LogRecord("n", 1, "p", 1, "m", (v,), None), lambda r: r.args[0]),
    "distribution": (statistics.NormalDist, lambda found: found.mean),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", OBJECTS)
def test_another_object_is_another_step(name: str, fullgraph: bool) -> None:
    make, read = OBJECTS[name]

    def step(x: Tensor, value: Any) -> Any:
        return x * read(value)

    served, x = ws.compile(step, fullgraph=fullgraph), torch.ones(2)
    for v in (1.0, 2.0, 3.0, 1.0):
        try:
            found = served(x, make(v))
        except CaptureError:
            assert fullgraph
        else:
            assert torch.equal(found, step(x, make(v)))
    same = make(1.0)
    captures = [served(x, same) is not None and served.captures for _ in range(3)] if not fullgraph else []
    assert len(set(captures)) < 2


def test_objects_that_are_not_looked_into_are_not_kept_alive() -> None:
    served = ws.compile(lambda x, found: x * found.size, fullgraph=True)
    for count in (1, 2):
        value = struct.Struct("f" * count)
        seen = weakref.ref(value)
        served(torch.ones(2), value)
        del value
        assert seen() is None


class Slotted:
    __slots__ = ("flag",)


class Plain:
    pass


def function() -> None:
    pass


PARAMETER, SLOTTED, PLAIN = nn.Parameter(torch.ones(2)), Slotted(), Plain()
# Where an attribute may be that is not there, how it is read, and how it comes and goes.
ABSENT: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    name: (lambda holder=holder: getattr(holder, "flag", 2), lambda at=at: setattr(at, "flag", 5),
           lambda at=at: delattr(at, "flag"))
    for name, holder, at in (("parameter", PARAMETER, PARAMETER), ("function", function, function),
                             ("slot", SLOTTED, SLOTTED), ("class", Plain, Plain), ("class of an object", PLAIN, Plain))
}  # fmt: skip


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_there_yet_is_guarded(name: str) -> None:
    ask, come, go = ABSENT[name]

    def step(x: Tensor) -> Tensor:
        return x * ask() + PARAMETER.sum().detach() * (function is not None)

    served, x = ws.compile(step, fullgraph=True), torch.ones(2)
    for change in (lambda: None, lambda: None, come, lambda: None, go, lambda: None):
        change()
        assert torch.equal(served(x), step(x))
    assert served.captures == 2 and len(served.recompiles) == 1


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


def by(number: float, decorator: Any) -> Any:
    return decorator(lambda self, x: x * number)


class Scaled(nn.Module):
    kind, root, plus = nn.LayerNorm, math.sqrt, functools.partial(torch.add, alpha=2)
    constant, made, partial = Constant(1.5), by(1, staticmethod), by(1, functools.partialmethod)
    chosen = by(1, functools.singledispatchmethod)

    @property
    def scale(self) -> float:
        return 2.0

    def scaled(self, x: Tensor) -> Tensor:
        x = self.chosen(self.partial(self.made(self, x))) * self.constant
        return type(self).plus(x * self.scale * self.root(4.0), len(self.kind.__name__))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


HANDLES: list[Any] = []
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    name: (functools.partial(setattr, Scaled, name, new), functools.partial(setattr, Scaled, name, vars(Scaled)[name]))
    for name, new in (("scaled", lambda self, x: x * 3), ("scale", property(lambda self: 4.0)),
                      ("forward", lambda self, x: x * 5), ("kind", nn.Linear), ("root", math.exp),
                      ("plus", functools.partial(torch.add, alpha=3)), ("constant", Constant(2.5)),
                      ("made", by(2, staticmethod)), ("partial", by(2, functools.partialmethod)),
                      ("chosen", by(2, functools.singledispatchmethod)))
}  # fmt: skip
OTHERS["hooks of all modules"] = (
    lambda: HANDLES.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 7)),
    lambda: HANDLES.pop().remove(),
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_and_hooks_of_all_modules_are_another_step(name: str) -> None:
    change, back = OTHERS[name]
    model, x = Scaled(), torch.ones(2)
    served = ws.compile(lambda x: model(x), fullgraph=True)
    for act in (lambda: None, change, lambda: None, back, lambda: None):
        act()
        assert torch.equal(served(x), model(x))
    assert served.captures == 2 and len(served.recompiles) == 1


class Two:
    def factor(self) -> float:
        return 2.0


class Three:
    def factor(self) -> float:
        return 3.0


@pytest.mark.parametrize("change", [
    lambda kind, module: setattr(kind, "__bases__", (Three,)),
    lambda kind, module: setattr(kind, "factor", lambda self: 5.0),
    lambda kind, module: setattr(kind, "__bool__", lambda self: False),
    lambda kind, module: setattr(module, "act", thrice),
])  # fmt: skip
def test_what_a_class_without_attributes_gets_is_another_step(change: Callable[[Any, Any], Any]) -> None:
    kind, module = type("Empty", (Two,), {}), types.ModuleType("made_by_hand")
    module.act = twice  # type: ignore[attr-defined]
    one = kind()
    step = lambda x: module.act(x) * one.factor() + (1 if one else 7)  # noqa: E731
    served, x = ws.compile(step, fullgraph=True), torch.ones(2)
    for act in (lambda *_: None, change, lambda *_: None):
        act(kind, module)
        assert torch.equal(served(x), step(x))
    assert served.captures == 2


def twice(x: Tensor, **given: Any) -> Tensor:
    return x * 2


def thrice(x: Tensor, **given: Any) -> Tensor:
    return x * 3


@pytest.mark.parametrize("wrap", [
    functools.partial, lambda fn: functools.partial(fn, alpha=1), lambda fn: functools.partial(functools.partial(fn)),
    lambda fn: functools.partial(torch.add if fn is twice else torch.sub, torch.ones(1)),
    lambda fn: types.MethodType(fn, torch.ones(2)), lambda fn: [functools.partial(fn)][0].func,
])  # fmt: skip
def test_another_function_within_a_callable_is_another_step(wrap: Callable[[Any], Any]) -> None:
    held = types.SimpleNamespace(act=wrap(twice))
    step = lambda x: held.act(*[x] * (type(held.act) is not types.MethodType)) + x  # noqa: E731
    served, x = ws.compile(step, fullgraph=True), torch.full((2,), 5.0)
    for fn in (twice, thrice, thrice, twice):
        held.act = wrap(fn)
        assert torch.equal(served(x), step(x))


@pytest.mark.parametrize("method", [
    lambda number: functools.partialmethod(lambda self, x, by: x * by, by=number),
    lambda number: by(number, functools.singledispatchmethod),
    lambda number: staticmethod(lambda x: x * number), lambda number: classmethod(lambda cls, x: x * number),
    lambda number: property(lambda self: lambda x: x * number),
])  # fmt: skip
def test_another_special_method_is_another_step(method: Callable[[float], Any]) -> None:
    kind = type("Called", (), {"__call__": method(2.0)})
    one, x = kind(), torch.ones(2)
    served = ws.compile(lambda x: one(x), fullgraph=True)
    for number in (2.0, 3.0, 2.0):
        kind.__call__ = method(number)  # type: ignore[operator]
        assert torch.equal(served(x), one(x))


def test_another_weak_method_is_another_step() -> None:
    owners = Two(), Three()
    held = types.SimpleNamespace(of=weakref.WeakMethod(owners[0].factor))
    served, x = ws.compile(lambda x: x * held.of()(), fullgraph=True), torch.ones(2)
    for owner in (*owners, owners[0]):
        held.of = weakref.WeakMethod(owner.factor)
        assert torch.equal(served(x), x * owner.factor())


def test_the_kernels_of_attention_are_those_chosen_outside() -> None:
    served, x = ws.compile(lambda x: F.scaled_dot_product_attention(x, x, x), fullgraph=True), torch.randn(1, 1, 4, 4)
    served(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(served(x), F.scaled_dot_product_attention(x, x, x)) and served.captures == 2


@pytest.mark.parametrize("step", [
    lambda x: x + torch.ones(2), lambda x: x + torch.full((2,), 1.5), lambda x: x.int() / 2, lambda x: x.int() * 1.5,
])  # fmt: skip
def test_programs_for_other_default_dtypes_are_others(step: Callable[[Tensor], Tensor]) -> None:
    served, x = ws.compile(lambda x: step(x), fullgraph=True), torch.ones(2)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found, expected = served(x), step(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_zeros_of_both_signs_are_two_values() -> None:
    served = ws.compile(lambda x, k: x * k["a"], fullgraph=True)
    for zero in (0.0, -0.0, 0.0, -0.0):
        assert served(torch.ones(1), {"a": zero}).signbit().item() == (str(zero) == "-0.0")


def test_a_context_variable_comes_to_be_set_by_the_step_alone() -> None:
    variable: ContextVar[int] = ContextVar("variable")

    def step(x: Tensor) -> Tensor:
        variable.set(variable.get(0) + 1)
        return x * variable.get()

    context, served = copy_context(), ws.compile(step)
    assert [context.run(served, torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert context[variable] == 3 and variable not in copy_context()


@pytest.mark.parametrize("of_tensor", [True, False])
def test_whether_memory_is_shared_is_not_baked(of_tensor: bool) -> None:
    def step(x: Tensor, asked: Any) -> Tensor:
        return x + 1 if asked.is_shared() else x * 5

    x = torch.ones(2)
    asked = x if of_tensor else x.untyped_storage()
    with pytest.raises(CaptureError, match="is_shared.., whose answer may be another"):
        ws.compile(step, fullgraph=True)(x, asked)
    served = ws.compile(step)
    for _ in range(2):
        assert torch.equal(served(x, asked), step(x, asked))
        x.share_memory_()


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("typed", [True, False])
def test_the_size_of_a_storage_without_a_tensor_is_not_baked(typed: bool, fullgraph: bool) -> None:
    def step(x: Tensor, storage: Any) -> Tensor:
        return x * storage.nbytes()

    tensor = torch.ones(3)
    storage: Any = tensor.storage() if typed else tensor.untyped_storage()
    served, x = ws.compile(step, fullgraph=fullgraph), torch.ones(2)
    for size in (3, 24, 24):
        storage.resize_(size)
        if fullgraph:
            with pytest.raises(CaptureError, match="size of a storage is read that belongs to no tensor"):
                served(x, storage)
        else:
            assert torch.equal(served(x, storage), step(x, storage))


class Counted(float):
    rate = 2.0

    def doubled(self) -> float:
        return self.rate * 2


class Kind(type):
    rate = 2.0


class Common(metaclass=Kind):
    scale = 2.0


class Special(Common):
    @classmethod
    def scaled(cls) -> float:
        return cls.scale


class Holder:
    rate = 2.0

    def read(self) -> float:
        return self.rate

    reads, shown = read, lambda self: self.rate  # by names that are not the functions' own
    bound = functools.partialmethod(read)

    def __len__(self) -> int:
        return 2


class Sized(dict[str, float]):
    rate = 2.0

    def __missing__(self, key: str) -> float:
        return self.rate


class Matched:
    __match_args__ = ("rate",)
    rate, width = 2.0, 3.0


def by_place(x: Tensor) -> Tensor:
    match matched:
        case Matched(rate):
            return x * rate
    return x


def by_keyword(x: Tensor) -> Tensor:
    match matched:
        case Matched(width=width):
            return x * width
    return x


# Globals of their own: those of this file lead to the runner of tests.
MODULE: dict[str, Any] = {"LIMIT": 2.0}
exec("def of_table(x): return x * globals()['LIMIT']\ndef evaluated(x): return x * eval('LIMIT + 1')", MODULE)
LAZY = types.ModuleType("lazy")
exec("settings = {'rate': 2.0}\ndef __getattr__(name): return settings[name]", vars(LAZY))
vars(builtins)["given_to_all"], vars(builtins)["table_of_all"] = 2.0, {"rate": 2.0}
net, nested = nn.Sigmoid(), nn.Sequential(nn.ReLU(), nn.Sigmoid())
counted, holder, table = Counted(1.0), Holder(), {"a": 2.0}
read, shown = operator.methodcaller("read"), table.values()


class Elsewhere(Holder):
    def read(self) -> float:
        return self.rate * 2


holders = [Holder()]
sized, matched = Sized(), Matched()


def plain(x: Tensor) -> Tensor:
    return x * 2


def other(x: Tensor) -> Tensor:
    return x * 3


# What a step reads past the names in its own code: how, and how it is changed.
PAST_NAMES: dict[str, tuple[Callable[[Tensor], Tensor], Any, str, Any]] = {
    "a base's value through a class method": (lambda x: x * Special.scaled(), Common, "scale", 3.0),
    "a metaclass": (lambda x: x * Common.rate, Kind, "rate", 3.0),
    "an attribute of a number": (lambda x: x * counted.doubled(), counted, "rate", 3.0),
    "a name in a caller of methods": (lambda x: x * read(holder), holder, "rate", 3.0),
    "globals()": (MODULE["of_table"], MODULE, "LIMIT", 3.0),
    "__getattr__ of a module": (lambda x: x * LAZY.rate, LAZY.settings, "rate", 3.0),
    "a name among Python's own": (lambda x: x * given_to_all, builtins, "given_to_all", 3.0),  # type: ignore[name-defined] # noqa: F821
    "a table among Python's own": (lambda x: x * table_of_all["rate"], table_of_all, "rate", 3.0),  # type: ignore[name-defined] # noqa: F821
    "eval": (MODULE["evaluated"], MODULE, "LIMIT", 3.0),
    "a function reloaded in place": (lambda x: plain(x), plain, "__code__", other.__code__),
    "a view of a dict": (lambda x: x * sum(shown), table, "a", 3.0),
    "the class of an object": (lambda x: x * holder.read(), holder, "__class__", Elsewhere),
    "the class of an object in a list": (lambda x: x * holders[0].read(), holders[0], "__class__", Elsewhere),
    "the class of a module": (lambda x: net(x), net, "__class__", nn.Tanh),
    "the class of a module inside": (lambda x: nested(x), nested[1], "__class__", nn.Tanh),
    "a method by another name": (lambda x: x * holder.reads(), Holder, "rate", 3.0),
    "a method that is a lambda": (lambda x: x * holder.shown(), Holder, "rate", 3.0),
    "a partial method": (lambda x: x * holder.bound(), Holder, "rate", 3.0),
    "a special method": (lambda x: x * len(holder), Holder, "__len__", lambda self: 3),
    "the class of a dict": (lambda x: x * sized["a"], Sized, "rate", 3.0),
    "a pattern by place": (by_place, matched, "rate", 4.0),
    "a pattern by keyword": (by_keyword, matched, "width", 4.0),
    "a function of a library": (lambda x: F.silu(x), F, "silu", other),
    "a function of a library, of C": (lambda x: torch.cosh(x), torch, "cosh", other),
    "a function of a library for numbers": (lambda x: x * math.sqrt(4.0), math, "sqrt", lambda x: 7.0),
}


@pytest.mark.parametrize("name", PAST_NAMES)
def test_what_is_read_past_the_names_in_the_code_is_guarded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, owner, attribute, new = PAST_NAMES[name]
    compiled, x = ws.compile(step, fullgraph=True), torch.ones(2)
    before = step(x)
    assert torch.equal(compiled(x), before) and torch.equal(compiled(x), before) and compiled.captures == 1
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, attribute, new)
    else:
        monkeypatch.setattr(owner, attribute, new)
    assert not torch.equal(step(x), before)
    assert torch.equal(compiled(x), step(x)) and torch.equal(compiled(x), step(x)) and compiled.captures == 2


ASKED: dict[str, Callable[[Tensor], bool]] = {
    "its base": lambda x: x._base is None, "whether it is a view": lambda x: x._is_view(),
    "whether it is of inference mode": lambda x: x.is_inference(),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_where_a_tensor_comes_from_is_not_baked(name: str) -> None:
    def step() -> Tensor:
        return held[0] * 1.0 if ASKED[name](held[0]) else held[0] * 2.0

    held = [torch.ones(2)]
    compiled = ws.compile(step, fullgraph=True)
    with torch.inference_mode():
        others = [torch.ones(2, 2)[0], torch.ones(2)]
    for tensor in (held[0], torch.ones(2, 2)[0], *others):
        held[0] = tensor
        assert torch.equal(compiled(), step()) and torch.equal(compiled(), step())
    base = torch.ones(2, 2)
    with pytest.raises(CaptureError, match="is a view of another"):
        ws.compile(lambda view, base: view * 2 if view._base is base else view, fullgraph=True)(base[0], base)


def test_a_class_that_is_compared_keeps_no_module_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    compiled, gone = ws.compile(lambda model, x: model(x)), weakref.ref(model)
    compiled(model, torch.ones(1, 2))
    compiled(model, torch.ones(1, 2))
    del model
    assert gone() is None


class Empty:
    pass


NOTHING = object()


def test_attributes_of_a_class_and_what_is_one_of_a_kind_stay_so() -> None:
    def step(x: Tensor, given: object) -> Any:
        Empty.count, Empty.kind = 3, float  # type: ignore[attr-defined]
        return x + 1, given, NOTHING

    served = ws.compile(step, fullgraph=True)
    for given in (NOTHING, NOTHING, object()):
        assert served(torch.ones(2), given)[1:] == (given, NOTHING)
        assert (Empty.count, Empty.kind) == (3, float)  # type: ignore[attr-defined]
        del Empty.count, Empty.kind  # type: ignore[attr-defined]
    assert served.captures == 2


def test_gradients_of_tensors_that_require_none() -> None:
    def step(x: Tensor) -> Tensor:
        found = [t.grad for t in (x, held[0], norm.running_mean) if t.grad is not None]
        return x + sum(found) if found else x * 1

    held, norm, x = [torch.ones(3)], nn.BatchNorm1d(3, affine=False), torch.ones(3)
    served = ws.compile(step, fullgraph=True)
    for holder in (None, x, held[0], norm.running_mean):
        for value in (1.0, 2.0) if holder is not None else (0.0,):
            if holder is not None:
                holder.grad = torch.full((3,), value)
            assert torch.equal(served(x), step(x))


def test_later_calls_with_what_capture_refuses_run_as_python() -> None:
    step = ws.compile(lambda x: x.sin() * 2)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for x in (torch.ones(3), nested, torch.ones(3), nested):
        assert all(map(torch.equal, step(x).unbind(), (x.sin() * 2).unbind()))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_views_that_are_leaves(own: bool, writes: bool, fullgraph: bool) -> None:
    def step(view: Tensor, base: Tensor) -> Tensor:
        loss = (view * 2).sum() + (base * 3).sum()
        loss.backward()
        if writes:
            with torch.no_grad():
                base.mul_(2)
        return loss.detach()

    def run(step: Callable[..., Any]) -> list[Any]:
        base = torch.ones(4, 3)
        view = base.view(12).requires_grad_() if own else base.view(12)
        base.requires_grad_()
        losses = [step(view, base) for _ in range(1 if writes and fullgraph else 3)]  # a later call is refused
        return [*losses, base, base.grad, view.detach(), view.grad, view.requires_grad, base._version]

    for eager, ours in zip(run(step), run(ws.compile(step, fullgraph=fullgraph)), strict=True):
        assert type(ours) is type(eager) and (torch.equal(ours, eager) if isinstance(eager, Tensor) else ours == eager)


class _Times:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: Tensor) -> Tensor:
        return x * self.factor


def _closure(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def _default(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x, factor=factor: x * factor


HELD_TWICE: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Any]]] = {
    "a closure": (lambda held, x: held(x), [_closure(2), _closure(3), _closure(4)]),
    "a default": (lambda held, x: held(x), [_default(2), _default(3), _default(4)]),
    "a bound method": (lambda held, x: held(x), [_Times(2).apply, _Times(3).apply, _Times(4).apply]),
    "an empty tuple": (lambda held, x: x * len(held), [(), (1,), (1, 2)]),
    "a tuple in a tuple": (lambda held, x: x * sum(held[0]), [((1, 2), 3), ((1, 5), 3), ((2, 5), 3)]),
    "a tuple of tensors": (lambda held, x: x * sum(held), [(torch.ones(2),) * count for count in (1, 2, 3)]),
    "a frozen set": (lambda held, x: x * sum(held), [frozenset({1, 2}), frozenset({3, 4}), frozenset({5})]),
}


@pytest.mark.parametrize("name", HELD_TWICE)
def test_another_value_in_one_of_two_places_that_held_the_same(name: str) -> None:
    use, (first, second, third) = HELD_TWICE[name]
    held = types.SimpleNamespace(one=first, two=first)
    step = ws.compile(lambda held, x: use(held.one, x) + 10 * use(held.two, x), fullgraph=True)
    x = torch.ones(2)
    for where, value in ("two", second), ("one", second), ("one", third), ("two", third), ("one", first):
        assert torch.equal(step(held, x), use(held.one, x) + 10 * use(held.two, x))
        setattr(held, where, value)
    assert torch.equal(step(held, x), use(held.one, x) + 10 * use(held.two, x))


def test_settings_that_two_modules_share() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3))
    model[0].padding = model[1].padding = (1, 1)
    step, x = ws.compile(lambda model, x: model(x), fullgraph=True), torch.ones(1, 1, 6, 6)
    assert step(model, x).shape == (1, 1, 6, 6)
    model[1].padding = (0, 0)
    assert torch.equal(step(model, x), model(x))


def _of_namespace(factor: float) -> Callable[[Tensor], Tensor]:
    """A function of `exec`, whose global variables are no module's."""
    namespace: dict[str, Any] = {"FACTOR": factor, "__name__": "generated"}
    exec(_GENERATED, namespace)  # noqa: S102 - as libraries do that generate code
    return namespace["scaled"]  # type: ignore[no-any-return]


_GENERATED = compile("def scaled(x): return x * FACTOR", "generated", "exec")


@pytest.mark.parametrize("order", [[(0, 0), (0, 1), (1, 1), (1, 2), (2, 0)], [(0, 1), (0, 2), (1, 0), (2, 2)]])
def test_generated_functions_of_one_code_have_their_own_globals(order: list[tuple[int, int]]) -> None:
    scaled = [_of_namespace(factor) for factor in (2, 3, 4)]
    held, x = types.SimpleNamespace(one=None, two=None), torch.ones(2)
    step = ws.compile(lambda held, x: held.one(x) + 10 * held.two(x), fullgraph=True)
    for one, two in order:
        held.one, held.two = scaled[one], scaled[two]
        assert torch.equal(step(held, x), held.one(x) + 10 * held.two(x))


def _inner(x: Tensor) -> Tensor:
    return x * len(HELD_TWICE)


def _outer(x: Tensor, inner: Callable[[Tensor], Tensor] = _inner) -> Tensor:
    return inner(x) + 1


class _Late:
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        self.act = act

    def __call__(self, x: Tensor) -> Tensor:
        return self.act(x) + _inner(x)


def test_functions_may_be_met_in_another_order() -> None:
    step, x = ws.compile(lambda held, x: held(x), fullgraph=True), torch.ones(2)
    for _ in range(3):
        held = _Late(_outer)
        assert torch.equal(step(held, x), held(x))
    assert step.captures == 1 and not step.recompiles


def test_a_global_variable_that_hides_one_of_pythons() -> None:
    x, step = torch.ones(2), ws.compile(lambda x: x * abs(-2), fullgraph=True)
    assert torch.equal(step(x), x * 2)
    globals()["abs"] = lambda number: 5
    try:
        assert torch.equal(step(x), x * 5)
    finally:
        del globals()["abs"]
    assert torch.equal(step(x), x * 2)


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = (value, value)
    return value


def _sum_of(value: Any, levels: int) -> Any:
    """The sum along a path that turns at each level."""
    for level in range(levels):
        value = value[level % 2]
    return value


def test_tuples_that_hold_one_tuple_twice_at_each_of_many_levels() -> None:
    levels = 60  # 2⁶⁰ places

    def step(held: types.SimpleNamespace, hidden: Any, x: Tensor) -> Tensor:
        return x * _sum_of(held.one, levels) + _sum_of(hidden, levels)

    ours, x, weight = ws.compile(step, fullgraph=True), torch.ones(2), torch.ones(2, requires_grad=True)
    for number in 2, 3, 3, 2:
        held, hidden = types.SimpleNamespace(one=_nested(number, levels)), _nested(weight * number, levels)
        assert torch.equal(ours(held, hidden, x), step(held, hidden, x))


@pytest.mark.parametrize("places", [3, 30])
def test_a_nested_tuple_that_many_places_hold(places: int) -> None:
    ours, x = ws.compile(lambda held, x: x * sum(one[0][0] for one in held), fullgraph=True), torch.ones(2)
    shared = ((1, 2), 3)
    held = [shared] * places
    for _ in range(2):
        assert ours(held, x)[0] == places
        held[-1] = ((5, 2), 3)
        assert ours(held, x)[0] == places + 4
        held[-1] = ((1, 2), 3)
        assert ours(held, x)[0] == places
        held[:] = [((6, 2), 3)] * places
        assert ours(held, x)[0] == 6 * places
        held[:] = [((1, 2), 3) for _ in range(places)]


def test_a_tuple_around_an_intermediate_is_one_in_both_places() -> None:
    pair = (torch.ones(2, requires_grad=True) * 2,)

    def step(one: Any, two: Any) -> Tensor:
        return one[0] * (3 if one is two else 5)

    assert torch.equal(ws.compile(step, fullgraph=True)(pair, pair), step(pair, pair))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adadelta])
def test_an_optimizer_compiled_alone_is_given_its_state_anew(make):
    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        opt = make(model.parameters(), lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
        step = ws.compile(lambda opt: opt.step()) if compiled else lambda opt: opt.step()
        for call in range(5):
            opt.zero_grad(set_to_none=call == 3)
            model(torch.randn(2, 4)).square().sum().backward()
            step(opt)
            if call % 2:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        left.append([*model.parameters(), *(v for state in opt.state.values() for v in state.values())])
        assert not compiled or (step.captures <= 2 and not step.breaks)
    assert all(map(torch.equal, *left))
