"""Guards: each change that a program must not survive is named; each that it may survive just binds."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.capture import Binder, GuardFailure, Snapshot
from wholestep.capture.sources import FUNCTION, Item, Source, Vars
from wholestep.errors import CaptureError


def bound(fn: Callable[..., Any], *args: Any, mutated: tuple[str, ...] = (), **kwargs: Any) -> tuple[Snapshot, Binder]:
    """A binder for all tensors and numbers that a call can see."""
    snap = Snapshot(fn, args, kwargs)
    sources = [*(f.source for f in snap.tensors.values()), *(n.source for n in snap.numbers)]
    return snap, Binder(snap, sources, mutated=[s for s in sources if s.text in mutated])


def reason(binder: Binder, *args: Any, **kwargs: Any) -> str:
    """Why a call is refused."""
    result = binder(args, kwargs)
    assert isinstance(result, GuardFailure)
    return result.reason


def passes(binder: Binder, *args: Any, **kwargs: Any) -> list[Any]:
    result = binder(args, kwargs)
    assert not isinstance(result, GuardFailure), result
    return result


@dataclasses.dataclass
class Config:
    width: int = 3
    names: tuple[str, ...] = ("a",)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.config = Config()
        self.scales = [1.0, 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "hidden"):
            x = x + self.hidden[0].sum()
        return self.layers(self.fc(x)) * self.config.width * self.scales[1]


def step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, flag: bool = True) -> torch.Tensor:
    loss = model(x).sum()
    loss.backward()
    opt.step()
    return loss


def ready(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Model, torch.optim.Optimizer, torch.Tensor]:
    model = Model()
    opt = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    x = torch.randn(8, 4)
    step(model, opt, x)
    opt.zero_grad()
    return model, opt, x


def test_tensor_metadata() -> None:
    model, opt, x = ready()
    _, binder = bound(step, model, opt, x)
    assert reason(binder, model, opt, torch.randn(4, 4)) == "L['x'] shape: expected [8, 4], found [4, 4]"
    assert reason(binder, model, opt, x.double()) == "L['x'] dtype: expected torch.float32, found torch.float64"
    assert reason(binder, model, opt, torch.randn(4, 8).t()) == "L['x'] stride: expected (4, 1), found (1, 8)"
    assert reason(binder, model, opt, x.clone().requires_grad_()) == "L['x'] requires_grad: expected False, found True"
    assert reason(binder, model, opt, x.numpy()) == "L['x'] type: expected Tensor, found ndarray"
    passes(binder, model, opt, torch.randn(8, 4))
    assert binder.slow_calls == 5


def test_modules_attributes_flags_and_hooks() -> None:
    model, opt, x = ready()
    _, binder = bound(step, model, opt, x)
    model.fc.eval()
    assert reason(binder, model, opt, x) == "L['model'].fc.training: expected True, found False"
    model.fc.train()
    model.layers[1].eps = 0.5
    assert reason(binder, model, opt, x) == "L['model'].layers.1.eps: expected 1e-05, found 0.5"
    model.layers[1].eps = 1e-5
    model.config.width = 4
    assert reason(binder, model, opt, x) == "L['model'].config.width: expected 3, found 4"
    model.config.width = 3
    model.scales[1] = 3.0
    assert reason(binder, model, opt, x) == "L['model'].scales[1]: expected 2.0, found 3.0"
    model.scales[1] = 2.0
    handle = model.fc.register_forward_hook(lambda *_: None)
    assert reason(binder, model, opt, x) == "L['model'].fc._forward_hooks: expected 0 hooks, found 1 hook"
    handle.remove()
    handle = model.fc.weight.register_hook(lambda g: g)
    assert "L['model'].fc.weight._backward_hooks" in reason(binder, model, opt, x)
    handle.remove()
    model.fc.weight._backward_hooks = None
    passes(binder, model, opt, x)
    del model.fc.bias
    model.fc.register_parameter("bias", None)
    assert reason(binder, model, opt, x) == "L['model'].fc.bias: expected a Parameter, found None"


def test_gradients_and_frozen_parameters() -> None:
    model, opt, x = ready()
    _, binder = bound(step, model, opt, x)
    model.fc.weight.grad = torch.zeros(4, 4)
    assert reason(binder, model, opt, x) == "L['model'].fc.weight.grad: expected None, found a Tensor"
    _, binder = bound(step, model, opt, x)
    passes(binder, model, opt, x)
    assert binder.slow_calls == 0
    model.fc.weight.grad = torch.ones(4, 4)
    assert any(v is model.fc.weight.grad for v in passes(binder, model, opt, x))
    model.fc.weight.grad = None
    assert reason(binder, model, opt, x) == "L['model'].fc.weight.grad: expected a Tensor, found None"
    _, binder = bound(step, model, opt, x)
    model.fc.bias.requires_grad_(False)
    assert reason(binder, model, opt, x) == "L['model'].fc.bias requires_grad: expected True, found False"


def test_optimizer_structure_but_never_its_floats() -> None:
    model, opt, x = ready()
    snap, binder = bound(step, model, opt, x)
    for lr in (0.5, 0.25):
        opt.param_groups[0]["lr"] = lr
        opt.param_groups[0]["betas"] = (lr, 0.5)
        values = dict(zip((str(s) for s in binder.inputs), passes(binder, model, opt, x), strict=True))
        assert values["L['opt'].param_groups[0]['lr']"] == lr == values["L['opt'].param_groups[0]['betas'][0]"]
    assert binder.slow_calls == 0
    opt.param_groups[0]["initial_lr"] = 3.0
    passes(binder, model, opt, x)
    assert binder.slow_calls == 1
    opt.param_groups[0]["amsgrad"] = True
    assert reason(binder, model, opt, x) == "L['opt'].param_groups[0]['amsgrad']: expected False, found True"
    opt.param_groups[0]["amsgrad"] = False
    opt.param_groups[0]["lr"] = torch.tensor(0.1)
    assert reason(binder, model, opt, x) == "L['opt'].param_groups[0]['lr']: expected float, found a Tensor"
    opt.param_groups[0]["lr"] = 0.1
    opt.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert reason(binder, model, opt, x) == "L['opt'].param_groups: expected length 1, found 2"
    opt.param_groups.pop()
    del opt.state[model.fc.weight]
    assert reason(binder, model, opt, x) == "L['opt'].state: expected key L['model'].fc.weight, found it missing"


def test_first_state_and_then_loaded_state() -> None:
    model = Model()
    opt = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 4)
    _, binder = bound(step, model, opt, x)
    step(model, opt, x)
    opt.zero_grad()
    assert reason(binder, model, opt, x) == "L['opt'].state: expected missing key L['model'].fc.weight, found it"
    _, binder = bound(step, model, opt, x)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    values = passes(binder, model, opt, x)
    assert any(v is opt.state[model.fc.weight]["exp_avg"] for v in values)
    slow = binder.slow_calls
    passes(binder, model, opt, torch.randn(8, 4))
    assert binder.slow_calls == slow == 1


def test_another_parameter_of_equal_metadata_binds() -> None:
    model, x = Model(), torch.randn(8, 4)
    _, binder = bound(lambda m, x: m(x), model, x)
    new = model.fc.weight = nn.Parameter(torch.zeros(4, 4))
    assert passes(binder, model, x)[-5:] and any(v is new for v in passes(binder, model, x))
    assert binder.slow_calls == 1  # once: an optimizer might hold the old one
    model.fc.weight = nn.Parameter(torch.zeros(4, 5))
    assert reason(binder, model, x) == "L['m'].fc.weight shape: expected [4, 4], found [4, 5]"
    model.fc.weight = model.layers[0].weight
    assert reason(binder, model, x) == (
        "L['m'].fc.weight is L['m'].layers.0.weight: expected two objects, found the same one")


def test_duplicates() -> None:
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    x, y = torch.ones(2), torch.zeros(2)
    _, same = bound(add, x, x)
    assert reason(same, x, y) == "L['a'] is L['b']: expected the same object, found two"
    passes(same, y, y)
    _, different = bound(add, x, y)
    assert reason(different, y, y) == "L['a'] is L['b']: expected two objects, found the same one"
    passes(different, y, x)


def test_memory_shared_with_what_the_step_writes() -> None:
    def add(a: torch.Tensor, b: torch.Tensor) -> None:
        a.add_(b)

    base = torch.zeros(4)
    _, binder = bound(add, torch.zeros(2), torch.zeros(2), mutated=("L['a']",))
    passes(binder, base[:2], torch.ones(2))
    assert reason(binder, base[:2], base[2:]) == "L['a'] shares memory with L['b']: expected False, found True"
    _, binder = bound(add, base[:2], base[2:], mutated=("L['a']",))
    passes(binder, base[:2], base[2:])
    apart = reason(binder, torch.ones(2), torch.ones(2))
    assert apart == "L['a'] shares memory with L['b']: expected True, found False"
    _, reads = bound(add, torch.zeros(2), torch.zeros(2))
    passes(reads, base[:2], base[2:])
    model, opt, x = ready()
    flat = torch.zeros(40)
    model.fc.bias.data = flat[:4]
    _, binder = bound(step, model, opt, x, mutated=("L['model'].fc.bias",))
    passes(binder, model, opt, torch.zeros(8, 4))
    assert reason(binder, model, opt, flat[4:36].view(8, 4)) == \
        "L['model'].fc.bias shares memory with L['x']: expected False, found True"


def test_arguments_and_plain_values() -> None:
    model, opt, x = ready()
    _, binder = bound(step, model, opt, x)
    assert reason(binder, model, opt, x, False) == (
        "arguments: expected 3 by position and none by name, found 4 by position and none by name")
    _, binder = bound(step, model, opt, x, flag=True)
    assert reason(binder, model, opt, x, flag=1) == "L['flag']: expected True, found 1"
    _, binder = bound(lambda x: x, {"a": [x, 1], "b": None})
    passes(binder, {"a": [x, 1], "b": None})
    assert reason(binder, {"a": [x, 2], "b": None}) == "L['x']['a'][1]: expected 1, found 2"
    assert reason(binder, {"a": [x, 1]}) == "L['x']: expected key 'b', found it missing"
    assert reason(binder, {"a": (x, 1), "b": None}) == "L['x']['a'] type: expected list, found tuple"
    assert reason(binder, {"a": [x], "b": None}) == "L['x']['a']: expected length 2, found 1"


SCALE = 2.0


def test_global_names_and_global_state() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    x = torch.ones(2)
    _, binder = bound(scaled, x)
    for value, text in ((3.0, "G['SCALE']: expected 2.0, found 3.0"), (2, "G['SCALE']: expected 2.0, found 2")):
        globals()["SCALE"] = value
        assert reason(binder, x) == text
    globals()["SCALE"] = 2.0
    with torch.no_grad():
        assert reason(binder, x) == "global state grad mode: expected True, found False"
    with torch.autocast("cpu", torch.bfloat16):
        assert reason(binder, x) == "global state autocast on cpu: expected False, found True"
    torch.set_default_dtype(torch.float64)
    try:
        assert reason(binder, x) == "global state default dtype: expected torch.float32, found torch.float64"
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert "global state default device" in reason(binder, x)
    passes(binder, x)


@pytest.mark.parametrize("form", ["function", "method", "partial", "module", "callable", "closure"])
def test_forms_of_functions(form: str) -> None:
    model = Model()
    x = torch.randn(8, 4)

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

        __call__ = run

    calls: dict[str, Any] = {
        "function": (lambda m, x: m(x), (model, x), "L['m'].fc.weight"),
        "method": (Trainer().run, (x,), "L['self'].model.fc.weight"),
        "partial": (functools.partial(lambda m, x: m(x), model), (x,), "L['self'].args[0].fc.weight"),
        "module": (model, (x,), "L['self'].fc.weight"),
        "callable": (Trainer(), (x,), "L['self'].model.fc.weight"),
        "closure": (lambda x: model(x), (x,), "L['model'].fc.weight"),
    }
    fn, args, text = calls[form]
    snap, binder = bound(fn, *args)
    assert text in [str(f.source) for f in snap.tensors.values()]
    assert {id(v) for v in passes(binder, *args)} == {id(t) for t in (*model.parameters(), *model.buffers(), x)}
    model.fc.eval()
    assert reason(binder, *args) == text.replace(".weight", ".training") + ": expected True, found False"


def test_the_fast_path_serves_what_changes_at_each_call() -> None:
    model, opt, x = ready()
    model.hidden = (torch.zeros(2), torch.zeros(2))
    _, binder = bound(step, model, opt, x)
    for _ in range(3):
        model.hidden = (torch.ones(2), torch.ones(2))
        opt.param_groups[0]["lr"] *= 0.5
        values = passes(binder, model, opt, torch.randn(8, 4))
        assert any(v is model.hidden[1] for v in values)
    assert binder.slow_calls == 0
    model.hidden = (model.hidden[0], model.hidden[0])
    assert reason(binder, model, opt, x).endswith("expected two objects, found the same one")


class Trainer:
    def __init__(self) -> None:
        self.model, self.done, self.log, self.scale = Model(), 0, [], 1.0

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.shape(self.model(x))

    def shape(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.sum() * self.scale

    def fit(self) -> None:
        self.done += 1
        self.log.append(self.done)


def test_what_no_code_of_the_step_names_is_not_guarded() -> None:
    trainer, x = Trainer(), torch.randn(8, 4)
    _, binder = bound(trainer.train_step, x)
    for _ in range(3):
        trainer.fit()
        passes(binder, x)
    assert binder.slow_calls == 0
    trainer.unknown = 1  # type: ignore[attr-defined]
    passes(binder, x)
    trainer.scale = 2.0
    assert reason(binder, x) == "L['self'].scale: expected 1.0, found 2.0"


def test_a_step_that_reads_by_computed_names_guards_all() -> None:
    trainer = Trainer()

    def reads(trainer: Trainer, name: str) -> int:
        return getattr(trainer, name)  # type: ignore[no-any-return]

    _, binder = bound(reads, trainer, "done")
    trainer.fit()
    assert reason(binder, trainer, "done") == "L['trainer'].done: expected 0, found 1"


@pytest.mark.parametrize("returned", [False, True])
def test_a_step_whose_tensor_only_a_library_reads_runs_python(returned: bool) -> None:
    class Holder:
        def __init__(self) -> None:
            self.unnamed = torch.ones(2)

    def step(holder: Holder) -> Any:
        value = inspect.getmembers(holder)[-1][1]
        return [value] if returned else value * 2

    compiled, holder = ws.compile(step), Holder()
    for value in (1.0, 2.0, 3.0):
        holder.unnamed = torch.full((2,), value)
        assert torch.equal(compiled(holder)[0], step(holder)[0]) and (compiled(holder)[0] is holder.unnamed) is returned
    with pytest.raises(CaptureError, match="out of its sight" if returned else "none of its arguments"):
        ws.compile(step, fullgraph=True)(holder)


def test_values_of_a_users_module() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * settings_of.SCALE

    x = torch.ones(1)
    _, binder = bound(step, x)
    settings_of.OTHER = 5
    passes(binder, x)
    settings_of.SCALE = 4.0
    assert reason(binder, x) == "G['settings_of'].SCALE: expected 2.0, found 4.0"


settings_of = types.ModuleType("settings_of")
settings_of.__file__ = "/elsewhere/settings_of.py"
settings_of.SCALE = 2.0  # type: ignore[attr-defined]


def with_defaults(x: torch.Tensor, scale: float = 2.0, *, shift: torch.Tensor | None = None) -> torch.Tensor:
    return x * scale if shift is None else x * scale + shift


def test_defaults_of_a_function_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return with_defaults(x)

    compiled, x = ws.compile(step, fullgraph=True), torch.ones(2)
    for defaults, shift in (((2.0,), None), ((3.0,), None), ((3.0,), torch.ones(2)), ((2.0,), None)):
        monkeypatch.setattr(with_defaults, "__defaults__", defaults)
        monkeypatch.setattr(with_defaults, "__kwdefaults__", {"shift": shift})
        assert torch.equal(compiled(x), step(x))
        assert torch.equal(compiled(x), step(x))
    assert "with_defaults" in compiled.recompiles[0]


class Doubling:
    """A descriptor that keeps its value under another name, and has state of its own."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return vars(instance)["_kept"] * self.factor

    def __set__(self, instance: Any, value: float) -> None:
        vars(instance)["_kept"] = value + 1


class Adding:
    """Something to call that is no function."""

    def __init__(self) -> None:
        self.term = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.term


def of_a_class() -> Any:
    class Described:
        described, added, linear = Doubling(), Adding(), nn.Linear(3, 3)

        def __init__(self) -> None:
            self.described = 1.0

        def _scaled(self, by: float, x: torch.Tensor) -> torch.Tensor:
            self._kept += by
            return x * self._kept

        scaled = functools.partialmethod(_scaled, 2.0)

    with torch.no_grad():
        Described.linear.weight.fill_(0.5)
        Described.linear.bias.fill_(0.25)
    return Described()


def step_sets(one: Any, x: torch.Tensor) -> torch.Tensor:
    one.described = one.described + 1
    return x * one.described


OF_CLASSES: dict[str, tuple[Any, Any]] = {
    "set through a descriptor": (step_sets, lambda one: None),
    "read through a descriptor": (lambda one, x: x * one.described, lambda one: setattr(one, "described", 7.0)),
    "a descriptor's state": (
        lambda one, x: x * one.described, lambda one: setattr(vars(type(one))["described"], "factor", 5.0)
    ),
    "a callable's state": (lambda one, x: one.added(x), lambda one: setattr(one.added, "term", 3.0)),
    "a module": (lambda one, x: one.linear(x), lambda one: nn.init.constant_(one.linear.weight, 0.75)),
    "another module": (lambda one, x: one.linear(x), lambda one: setattr(type(one), "linear", nn.Tanh())),
    "a partial method": (lambda one, x: one.scaled(x), lambda one: setattr(one, "described", 9.0)),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_what_stands_in_a_class_besides_functions_and_values(name: str) -> None:
    step, change = OF_CLASSES[name]
    mine, theirs, compiled, x = of_a_class(), of_a_class(), ws.compile(step, fullgraph=True), torch.randn(2, 3)
    for _ in range(3):
        for _ in range(3):
            assert torch.equal(compiled(mine, x), step(theirs, x))
            assert vars(mine) == vars(theirs)
        change(mine)
        change(theirs)


def test_threads_that_name_sources_of_each_others_kind_do_not_wait_for_each_other() -> None:
    class Meeting(Source):
        """Has both threads in the middle of a name before either goes on to a name of the other's kind."""

        def __init__(self, then: Source) -> None:
            self.then = then

        @property
        def path(self) -> str:  # type: ignore[override]
            meeting.wait(10)
            return self.then.path

    meeting, found = threading.Barrier(2), []
    ends = [Item(Meeting(Vars(FUNCTION)), 0), Vars(Meeting(Item(FUNCTION, 0)))]
    threads = [threading.Thread(target=lambda one=one: found.append(one.path), daemon=True) for one in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert {*found} == {"fn.__dict__[0]", "fn[0].__dict__"}


def test_objects_that_hold_one_another_in_a_long_chain() -> None:
    nodes = [types.SimpleNamespace(tensor=torch.full((2,), float(k)), next=None) for k in range(80)]
    for one, two in itertools.pairwise(nodes):
        one.next = two

    def summed(node: Any) -> torch.Tensor:
        total = torch.zeros(2)
        while node is not None:
            total, node = total + node.tensor, node.next
        return total

    compiled = ws.compile(summed, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(nodes[0]), summed(nodes[0]))
        nodes[70].tensor = torch.ones(2)
    assert compiled.captures == 1


def test_a_number_that_changes_where_two_programs_take_turns():
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale if self.training else x

    module = Scaled()
    model = ws.compile(module)
    for count in range(6):
        module.scale = 1.0 / (count + 1)
        assert model.train()(torch.ones(1)).item() == pytest.approx(module.scale)
        assert model.eval()(torch.ones(1)).item() == 1
    assert model.captures == 4 and model.breaks == []
