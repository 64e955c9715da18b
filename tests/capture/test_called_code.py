"""Code that libraries call, and what they read of the user's: a change between two calls is seen, as eager sees it."""

from __future__ import annotations

import copy
import copyreg
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

import wholestep as ws
from wholestep.capture.guards.guards import Guard
from wholestep.capture.snapshot.garbage_collection import new_objects, places_of

LIBRARY = """
import functools
import torch

LEVEL, TABLE, calls, cache, REGISTRY, CALLBACKS = 1.0, {"scale": 1.0}, 0, {}, {}, []

def by_attribute(x, owner): return (x * 1) * owner.scale
def by_method(x, owner): return (x * 1) * owner.factor()
def by_getattr(x, owner): return (x * 1) * getattr(owner, "scale", 2.0)
def by_variable(x): return (x * 1) * LEVEL
def by_table(x): return (x * 1) * TABLE["scale"]
def helper(x): return x * 1
def by_helper(x): return helper(x * 1)
def by_registry(x): return REGISTRY["mine"](x * 1)
def by_function(x, owner): return (x * 1) * _scale_of(owner)
def by_list(x): return (x * 1) * CALLBACKS[0]()
def _scale_of(owner): return owner.scale
@functools.wraps(torch.add)
def _of_c(): return LEVEL
def by_decorated(x): return (x * 1) * _of_c()

class Settings:
    scale = 1.0

class Base:
    table = {}

    def __getitem__(self, name): return self.own.get(name) or self.table[name]

class Registry(Base):
    table = {}

    def __init__(self): self.own = {}

REGISTERED = Registry()

def by_object(x): return REGISTERED["mine"](x * 1)
def by_own_table(x): return REGISTERED["own"](x * 1)

def by_class(x): return (x * 1) * Settings.scale

class Scaled(torch.nn.Module):
    note = 1.0

    def __init__(self, config):
        super().__init__()
        self.config = config

    @property
    def factor(self): return self.config.scale * self.note

    def forward(self, x): return (x * 1) * self.factor

def fresh(x):
    names = {}
    exec(compile("def doubled(x): return x * 2", "<made>", "exec"), names)
    return names["doubled"](x)

def counting(x):
    global calls
    y = x * 1
    calls += 1
    cache[calls % 2] = calls
    return y
"""
STATE = {"scale": 1.0}


class Plain:
    def __init__(self) -> None:
        self.scale, self._hidden = 1.0, 1.0

    def factor(self) -> float:
        return self._hidden


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


class Copied(Box):
    pass


_pytree.register_pytree_node(Box, lambda box: ([box.held * STATE["scale"]], None), lambda held, _: Box(*held))
copyreg.pickle(Copied, lambda box: (Copied, (box.held * STATE["scale"],)))  # type: ignore[arg-type,return-value]


@torch.library.custom_op("wholestep_tests::scaled_square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


@square.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _gradient(context: Any, gradient: Tensor) -> Tensor:
    return gradient * 2 * context.saved_tensors[0] * STATE["scale"]


square.register_autograd(_gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
KERNELS = torch.library.Library("wholestep_called", "DEF")
KERNELS.define("scaled(Tensor x) -> Tensor")
KERNELS.impl("scaled", lambda x: x * STATE["scale"], "CompositeImplicitAutograd")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    place = tmp_path / "site-packages" / "called_library.py"
    place.parent.mkdir()
    place.write_text(LIBRARY)
    monkeypatch.syspath_prepend(place.parent)
    sys.modules.pop("called_library", None)
    yield importlib.import_module("called_library")
    del sys.modules["called_library"]


def _equal(step: Callable[[Tensor], Tensor], change: Callable[[float], Any]) -> None:
    """Calls with values that change: results are eager's, and there is one more capture, where they do."""
    captures = []
    for form in (step, ws.compile(step, fullgraph=True)):
        found = []
        for value in (1.0, 1.0, 3.0, 3.0):
            change(value)
            found.append(form(torch.ones(2)).tolist())
        captures.append(found)
    change(1.0)
    assert captures[0] == captures[1]
    assert captures[0][1] != captures[0][2], "the change is none"
    assert len(form.recompiles) == 1  # type: ignore[attr-defined]


OWNERS = {"object": Plain, "slots": Slotted, "module": Model}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("function", ["by_attribute", "by_getattr", "by_function"])
def test_attributes_that_a_library_reads(library: ModuleType, owner: str, function: str) -> None:
    held, read = OWNERS[owner](), getattr(library, function)
    _equal(lambda x: read(x, held), lambda value: setattr(held, "scale", value))


def test_methods_that_a_library_calls(library: ModuleType) -> None:
    held = Plain()
    _equal(lambda x: library.by_method(x, held), lambda value: setattr(held, "_hidden", value))


def test_a_configuration_that_a_librarys_module_holds(library: ModuleType) -> None:
    config = Plain()
    model = library.Scaled(config)
    _equal(lambda x: model(x), lambda value: setattr(config, "scale", value))


VARIABLES = ["by_variable", "by_table", "by_class", "by_helper", "by_registry", "by_list", "by_object", "by_own_table",
             "by_decorated"]


@pytest.mark.parametrize("function", VARIABLES)
def test_variables_of_a_library(library: ModuleType, function: str) -> None:
    def change(value: float) -> None:
        library.LEVEL = library.TABLE["scale"] = library.Settings.scale = value
        library.helper = first if value == 1 else second
        library.REGISTRY["mine"], library.CALLBACKS[:] = library.helper, [lambda: STATE["scale"]]
        STATE["scale"] = value
        library.Registry.table["mine"] = library.REGISTERED.own["own"] = library.helper

    first, second = library.helper, lambda x: x * 3
    read = getattr(library, function)
    _equal(lambda x: read(x), change)


def test_values_set_on_a_librarys_class(library: ModuleType) -> None:
    model = library.Scaled(Plain())
    _equal(lambda x: model(x), lambda value: setattr(library.Scaled, "note", value))


def test_methods_of_a_librarys_class_that_are_replaced(library: ModuleType) -> None:
    model, first = library.Scaled(Plain()), library.Scaled.forward
    ways = {1.0: first, 3.0: lambda self, x: x * 3}
    _equal(lambda x: model(x), lambda value: setattr(library.Scaled, "forward", ways[value]))


def test_a_value_that_changes_between_a_capture_and_its_first_call() -> None:
    def change(graph: Any) -> Any:
        STATE["scale"] += 1 if STATE["scale"] < 3 else 0
        return graph

    step = ws.compile(lambda x: x * STATE["scale"], passes=[change], fullgraph=True)
    try:
        assert step(torch.ones(1)) == 3
        assert STATE["scale"] == 3
    finally:
        STATE["scale"] = 1.0


def test_what_a_library_counts_and_keeps_for_itself_is_no_guard(library: ModuleType) -> None:
    step = ws.compile(lambda x: library.counting(x), fullgraph=True)
    for calls in range(4):
        step(torch.ones(2))
        library.calls += 10 * calls
    assert step.recompiles == []


def test_code_that_each_call_makes_anew(library: ModuleType) -> None:
    compiled = ws.compile(lambda x: library.fresh(x))
    assert torch.equal(compiled(torch.ones(2)), library.fresh(torch.ones(2)))
    assert "makes anew" in compiled.breaks[0]
    with pytest.raises(ws.errors.UnsupportedError, match="makes anew"):
        ws.compile(lambda x: library.fresh(x), fullgraph=True)(torch.ones(2))


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "a Python kernel": lambda x: torch.ops.wholestep_called.scaled(x),
    "a node of pytrees": lambda x: _pytree.tree_map(lambda t: t + 1, Box(x)).held,
    "how a class is copied": lambda x: x * copy.copy(Copied(1.0)).held,
}


@pytest.mark.parametrize("name", STEPS)
def test_functions_that_torch_and_python_keep(name: str) -> None:
    _equal(STEPS[name], lambda value: STATE.update(scale=value))


def test_the_formula_of_a_custom_operator() -> None:
    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        square(x).sum().backward()
        assert x.grad is not None
        return x.grad

    _equal(step, lambda value: STATE.update(scale=value))


class Mine(Normal):
    pass


class Given:
    @functools.singledispatchmethod
    def of(self, number: int, x: Tensor) -> Tensor:
        return x


def _set_formula(value: float) -> None:
    square.register_autograd(lambda _, gradient: gradient * value)


def _set_divergence(value: float) -> None:
    kl.register_kl(Mine, Mine)(lambda p, q: (q.loc - p.loc) * value)


def _set_flattening(value: float) -> None:
    if Mine in _pytree.SUPPORTED_NODES:
        _pytree._deregister_pytree_node(Mine)
    _pytree.register_pytree_node(Mine, lambda p: ([p.loc * value], None), lambda held, _: held[0])


def _set_copying(value: float) -> None:
    copyreg.pickle(Copied, lambda box: (Copied, (box.held * value,)))  # type: ignore[arg-type,return-value]


def _set_method(value: float) -> None:
    Given.of.register(int, lambda self, number, x: x * value)


def _gradient_of_square(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(square(x).sum(), x)[0]


# Functions that are put in the places of others: a step, and what does so.
REPLACED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], Any]]] = {
    "the formula of an operator": (_gradient_of_square, _set_formula),
    "a divergence": (lambda x: kl.kl_divergence(Mine(x, 1.0), Mine(x * 2, 1.0)), _set_divergence),
    "how nodes are flattened": (lambda x: _pytree.tree_map(lambda t: t + 1, Mine(x, 1.0)), _set_flattening),
    "how objects are copied": (lambda x: x * copy.copy(Copied(1.0)).held, _set_copying),
    "the method for a type": (lambda x: Given().of(1, x), _set_method),
}


@pytest.mark.parametrize("name", REPLACED)
def test_functions_that_torch_and_python_keep_are_replaced(name: str) -> None:
    step, put = REPLACED[name]
    last: list[float] = []
    _equal(step, lambda value: None if last[-1:] == [value] else (last.append(value), put(value)))


HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward": (modules.register_module_forward_hook, lambda module, given, found: found * STATE["scale"]),
    "pre": (modules.register_module_forward_pre_hook, lambda module, given: (given[0] * STATE["scale"],)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_all_modules(name: str) -> None:
    model, (register, hook) = nn.Linear(2, 1), HOOKS[name]
    handle = register(hook)
    try:
        _equal(lambda x: model(x), lambda value: STATE.update(scale=value))
    finally:
        handle.remove()


def test_hooks_of_all_optimizers_and_what_they_count() -> None:
    counts: list[int] = []

    def hook(optimizer: Any, *_: Any) -> None:
        counts[0] += 1
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad *= STATE["scale"]

    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.detach() * 1

    def change(value: float) -> None:
        STATE["scale"] = value

    handle = register_optimizer_step_pre_hook(hook)
    try:
        for form in (step, ws.compile(step, fullgraph=True)):
            counts[:] = [0]
            with torch.no_grad():
                weight.fill_(1)
            found = []
            for value in (1.0, 1.0, 3.0):
                change(value)
                found.append(form(torch.ones(2)).tolist())
            results = (found, counts[0])
            if form is step:
                expected = results
        assert results == expected
    finally:
        handle.remove()
        change(1.0)


def test_guards_of_earlier_captures_are_no_places_of_a_function() -> None:
    """Or each capture would look at all those of the others, and at where these are kept."""

    def function() -> None: ...

    guard = Guard(None, "identity", function)
    with new_objects():
        assert not any("expected" in place for place in places_of([function]))
    assert guard.expected is function
