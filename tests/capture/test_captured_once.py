"""One capture serves from the first call on, and every later one says why it was made."""

from __future__ import annotations

import gc
import importlib
import io
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler

import wholestep as ws
from tests.support.equal import World, assert_same_run
from tests.zoo.optimizers import SETTINGS, optimizers
from wholestep.errors import CaptureError

OPTIMIZERS = optimizers()
# Their first step copies the gradient, and a later one takes a part of it: two programs.
TWO = {name for name in OPTIMIZERS if "dampening" in name}


def parts(make: Callable[[Any], optim.Optimizer] = optim.AdamW) -> tuple[nn.Module, optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return net, make(net.parameters()), torch.randn(3, 4)


def zero_last(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
    loss = net(x).square().sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def zero_first(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
    opt.zero_grad()
    loss = net(x).square().sum()
    loss.backward()
    opt.step()
    return loss.detach()


def none_first(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
    for parameter in net.parameters():
        parameter.grad = None
    loss = net(x).square().sum()
    loss.backward()
    opt.step()
    return loss.detach()


STEPS = [zero_last, zero_first, none_first]


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if not n.startswith("RAdam")])
def test_state_is_there_before_the_first_capture(name: str) -> None:
    """Bit for bit is `test_optimizer`'s to say."""
    world = OPTIMIZERS[name](0)
    step = ws.compile(world.step, fullgraph=True)
    for index in range(3):
        step(*world.args[index % len(world.args)])
    expected = 2 if name in TWO else 1
    assert (step.captures, len(step.recompiles)) == (expected, expected - 1), step.recompiles


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_momentum_that_a_first_call_makes_and_updates_counts_the_updates(options: dict[str, bool]) -> None:
    def counted(compile: Callable[[Any], Any]) -> list[int]:
        net, opt, x = parts(partial(optim.SGD, lr=0.1, momentum=0.9, **options))

        def step(x: Tensor) -> None:
            net(x).sum().backward()
            opt.step()
            opt.step()

        compiled = compile(step)
        return [(compiled(x), opt.state[net[0].weight]["momentum_buffer"]._version)[1] for _ in range(3)]

    assert counted(ws.compile) == counted(lambda step: step)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_before_the_step_that_it_replaces_are_no_matter(step: Any, kind: Any) -> None:
    def make(seed: int) -> World:
        net, opt, x = parts(lambda p: kind(p, lr=0.1))
        return World(lambda x: step(net, opt, x), [(x,), (x + 1,)], {"net": net, "opt": opt})

    assert_same_run(make)
    net, opt, x = parts(lambda p: kind(p, lr=0.1))
    compiled = ws.compile(step, fullgraph=True)
    for times in range(4):
        compiled(net, opt, x)
        if times == 1:
            opt.zero_grad(set_to_none=True)
        if times == 2:
            list(net.parameters())[0].grad = torch.ones(8, 4)
    if step is not zero_last:
        assert (compiled.captures, compiled.recompiles) == (1, [])


def test_a_gradient_that_is_none_in_the_end_is_so_whatever_was_there() -> None:
    net, opt, x = parts()
    net.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    opt.add_param_group({"params": net.unused.parameters()})

    def step(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = net[2](net[1](net[0](x))).square().sum()
        loss.backward()
        opt.step()
        return loss.detach()

    compiled = ws.compile(step, fullgraph=True)
    compiled(x)
    net.unused.weight.grad = torch.ones(2, 2)
    compiled(x)
    assert net.unused.weight.grad is None
    assert (compiled.captures, compiled.recompiles) == (1, [])
    assert not any(p in opt.state for p in net.unused.parameters())


def test_gradients_that_add_up_are_another_step_than_the_first() -> None:
    def step(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss.detach()

    runs = []
    for run in (step, ws.compile(step, fullgraph=True)):
        net, opt, x = parts()
        for _ in range(3):
            run(net, opt, x)
        runs.append([p.grad for p in net.parameters()])
        assert not opt.state
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert run.recompiles == ["L['net'].0.weight.grad: expected None, found a Tensor"]


@pytest.mark.parametrize("look", [
    lambda opt: len(opt.state), lambda opt: len(opt.state_dict()["state"]), lambda opt: len(vars(opt)["state"]),
    lambda opt: len(getattr(opt, "state")),  # noqa: B009
])  # fmt: skip
def test_a_step_that_looks_at_the_state_finds_none_at_first(look: Any) -> None:
    def step(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> tuple[Tensor, int]:
        return zero_last(net, opt, x * (1 + look(opt))), look(opt)

    runs = []
    for run in (step, ws.compile(step, fullgraph=True)):
        net, opt, x = parts()
        runs.append([run(net, opt, x) for _ in range(3)])
    assert runs[0] == runs[1]


WRAPPER = """
import torch

class Wrapper(torch.optim.Optimizer):
    def __init__(self, base):
        self.base, self.met = base, []

    @property
    def param_groups(self):
        return self.base.param_groups

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.base.state[p]
                self.met.append(len(state))
                slow = state.setdefault("slow", p.clone())
                p.lerp_(slow, 0.5 if "momentum_buffer" in state else 0.25)
        self.base.step()
"""


def test_a_library_that_wraps_an_optimizer_finds_no_state_at_first(tmp_path: Path, monkeypatch: Any) -> None:
    """Its class has no groups and no state of its own."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "wrapping_optimizers.py").write_text(WRAPPER)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    wrapper = importlib.import_module("wrapping_optimizers").Wrapper

    runs = []
    for run in (zero_first, ws.compile(zero_first, fullgraph=True)):
        net, opt, x = parts(lambda parameters: wrapper(optim.SGD(parameters, 0.1, momentum=0.9)))
        losses = [run(net, opt, x) for _ in range(3)]
        runs.append((losses, opt.met, [list(state) for state in opt.base.state.values()]))
    assert runs[0] == runs[1]


def test_a_first_run_that_fails_leaves_no_state() -> None:
    def step(net: nn.Module, opt: optim.Optimizer, tokens: Tensor) -> Tensor:
        loss = net(tokens).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    net = nn.Embedding(3, 2)
    opt = optim.AdamW(net.parameters())
    compiled = ws.compile(step, fullgraph=True)
    with pytest.raises(IndexError):
        compiled(net, opt, torch.tensor([7]))
    assert not opt.state
    compiled(net, opt, torch.tensor([1]))
    assert opt.state[net.weight]["step"] == 1


def test_a_capture_that_fails_leaves_no_state() -> None:
    def step(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
        if net(x).sum() > 0:
            opt.step()
        return x

    net, opt, x = parts()
    with pytest.raises(CaptureError):
        ws.compile(step, fullgraph=True)(net, opt, x)
    assert not opt.state
    explained = ws.compile(zero_last, fullgraph=True)
    explained.explain(net, opt, x)
    assert not opt.state and all(p.grad is None for p in net.parameters())


def test_a_step_that_never_updates_gives_no_state() -> None:
    @ws.compile(fullgraph=True)
    def judge(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
        return net(x).sum() * opt.param_groups[0]["lr"]

    net, opt, x = parts()
    judge(net, opt, x)
    assert not opt.state


def test_loaded_state_is_as_what_was_there() -> None:
    net, opt, x = parts()
    step = ws.compile(zero_first, fullgraph=True)
    for _ in range(2):
        step(net, opt, x)
        saved = io.BytesIO()
        torch.save(opt.state_dict(), saved)
        saved.seek(0)
        opt.load_state_dict(torch.load(saved))
        step(net, opt, x)
    assert (step.captures, step.recompiles) == (1, [])


class Counter:
    count = 0


def test_every_later_capture_says_why() -> None:
    def step(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
        Counter.count += 1
        return zero_last(net, opt, x)

    net, opt, x = parts()
    compiled = ws.compile(step, fullgraph=True)
    for _ in range(4):
        compiled(net, opt, x)
    assert Counter.count == 4
    assert len(compiled.recompiles) == compiled.captures - 1 > 0
    assert all("Counter" in reason for reason in compiled.recompiles)


def test_programs_that_take_turns_are_told_apart_without_a_walk() -> None:
    """Walking what a step can see takes milliseconds; that some object is another takes microseconds."""
    def accumulate(net: nn.Module, opt: optim.Optimizer, x: Tensor, last: bool) -> Tensor:
        if last:
            return zero_last(net, opt, x)
        loss = net(x).square().sum()
        loss.backward()
        return loss.detach()

    compiled, (net, opt, x) = ws.compile(accumulate), parts()
    worlds = (compiled, net, opt), (accumulate, *parts()[:2])
    walked = []
    for call in range(18):
        for step, model, optimizer in worlds:
            step(model, optimizer, x + call, call % 3 == 0)
        walked.append(sum(entry.binder.slow_calls for entry in compiled._entries))
    assert compiled.captures == 4 and walked[8] == walked[-1]
    assert all(map(torch.equal, net.state_dict().values(), worlds[1][1].state_dict().values()))


def test_what_the_program_of_another_call_replaces_is_compared_without_a_walk() -> None:
    """`GradScaler.update` leaves a new table of states, which the calls that accumulate see."""
    def accumulate(net: nn.Module, opt: optim.Optimizer, scaler: GradScaler, x: Tensor, last: bool) -> None:
        scaler.scale(net(x).square().sum()).backward()
        if last:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    compiled, worlds, walked = ws.compile(accumulate), [(*parts(), GradScaler("cpu")) for _ in range(2)], []
    for call in range(14):
        for step, (net, opt, x, scaler) in zip((compiled, accumulate), worlds, strict=True):
            step(net, opt, scaler, x + call, call % 2 == 1)
        walked.append(sum(entry.binder.slow_calls for entry in compiled._entries))
    assert not compiled.breaks and walked[9] == walked[-1]
    assert all(map(torch.equal, *(world[0].state_dict().values() for world in worlds)))


class Scaled:
    def of(self, x: Tensor) -> Tensor:
        return x * 2


def test_what_is_made_anew_for_each_call_is_compared_without_a_walk() -> None:
    def step(net: nn.Module, opt: optim.Optimizer, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        return zero_last(net, opt, of(x))

    compiled, scaled, (net, opt, x) = ws.compile(step), Scaled(), parts()
    worlds = (compiled, net, opt), (step, *parts()[:2])
    for call in range(6):
        found = []
        for run, model, optimizer in worlds:
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + np.cos(call / 9))  # no float, but a NumPy one
            optimizer.param_groups[0]["betas"] = (np.float64(0.9 - 0.01 * call), 0.999)
            found += [run(model, optimizer, x, scaled.of), run(model, optimizer, x, partial(torch.mul, other=3.0))]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
        if call == 2:
            walked = [entry.binder.slow_calls for entry in compiled._entries]
    assert compiled.captures == 2 and walked == [entry.binder.slow_calls for entry in compiled._entries]
    other = Scaled()
    other.of = torch.neg  # type: ignore[method-assign, assignment]
    assert torch.equal(compiled(net, opt, x, other.of), step(*worlds[1][1:], x, torch.neg))


def test_numbers_that_never_come_again_are_no_reason_to_capture_for_ever() -> None:
    rates = [0.1 / (1 + call) for call in range(30)]

    def scheduled(net: nn.Module, opt: optim.Optimizer, x: Tensor, call: int) -> Tensor:
        opt.param_groups[0]["lr"] = rates[call]
        return zero_last(net, opt, x[call : call + 2])

    worlds = [(step, *parts(optim.SGD)[:2]) for step in (scheduled, ws.compile(scheduled))]
    x, compiled = torch.randn(40, 4), worlds[1][0]
    for call in range(30):
        assert torch.equal(*(step(net, opt, x, call) for step, net, opt in worlds))
    assert len(compiled.recompiles) == 7 and not compiled._entries  # type: ignore[attr-defined]
    assert "captured 8 times in 9 calls; the last differs again: L['call']: expected 7" in compiled.breaks[0]  # type: ignore[attr-defined]

    turns = ws.compile(scheduled)
    for call in range(40):
        turns(*worlds[1][1:], x, call % 8)
    assert turns.captures == 8 and not turns.breaks


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_another_object_at_each_call_is_not_compared_for_ever(fullgraph: bool) -> None:
    """Where to compare takes longer than the step: its Python runs, unless that is refused."""
    state = SimpleNamespace(inner=None)

    def scaled(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
        return zero_last(net, opt, x * state.inner.scales[1]["x"])

    worlds = [(step, *parts(optim.SGD)[:2]) for step in (scaled, ws.compile(scaled, fullgraph=fullgraph))]
    x, compiled = torch.randn(3, 4), worlds[1][0]
    walked = []
    for _ in range(40):
        state.inner = SimpleNamespace(scales=[1, {"x": 3}])
        assert torch.equal(*(step(net, opt, x) for step, net, opt in worlds))
        walked.append(compiled._entries[0].binder.slow_calls)  # type: ignore[attr-defined]
    assert walked[-1] - walked[20] == (19 if fullgraph else 0)
    assert [b.split(",")[0] for b in compiled.breaks] == [  # type: ignore[attr-defined]
        "objects that the step reaches were others at each of the last 16 calls"
    ] * (not fullgraph)


@pytest.mark.parametrize(("make", "captures"), [(optim.SGD, 1), (optim.AdamW, 9)])
def test_models_that_take_turns(make: Callable[[Any], optim.Optimizer], captures: int) -> None:
    """With optimizers' states, each has a program; without, one program serves all."""
    step, x = ws.compile(zero_last), torch.randn(3, 4)
    folds, others = ([parts(make)[:2] for _ in range(9)] for _ in range(2))
    for times in (2, 2):
        walked = sum(entry.binder.slow_calls for entry in step._entries)
        for (net, opt), (net2, opt2) in list(zip(folds, others, strict=True)) * times:
            assert torch.equal(step(net, opt, x), zero_last(net2, opt2, x))
    assert step.captures == captures and not step.breaks
    assert walked == sum(entry.binder.slow_calls for entry in step._entries)
    kept = [weakref.ref(net) for net, _ in folds]
    del folds, net, opt
    gc.collect()
    assert not any(net() for net in kept)


def test_the_table_has_every_optimizer_and_those_of_two_programs() -> None:
    assert TWO and {name.partition("(")[0] for name in OPTIMIZERS} >= {kind.__name__ for kind in SETTINGS}


def test_a_compiled_step_shows_what_it_serves() -> None:
    @ws.compile(fullgraph=True)
    def scaled(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]) * 2

    assert repr(scaled) == "<Compiled scaled, captures: 0, recompiles: 0>"
    model = nn.Linear(2, 2)
    scaled(model, {"x": torch.ones(3, 2)})
    assert repr(scaled) == "<Compiled scaled, captures: 1, recompiles: 0>\n  L['batch']['x']: float32[3, 2]"
    scaled(model, {"x": torch.ones(4, 2)})
    assert repr(scaled) == "<Compiled scaled, captures: 2, recompiles: 1>\n  L['batch']['x']: float32[4, 2]"


@pytest.mark.parametrize("make", [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad, torch.enable_grad,
])  # fmt: skip
def test_a_context_that_is_kept_between_steps_is_the_same_once_it_was_entered(make: Any) -> None:
    net, opt, x = parts()
    kept = make()

    def step(x: Tensor) -> Tensor:
        with kept:
            seen = net(x)
        loss = net(x).float().square().sum() + seen.float().sum().detach()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(3):
        compiled(x)
    assert compiled.captures == 1 and compiled.recompiles == []


def test_code_that_switches_to_evaluation_does_not_look_at_the_state() -> None:
    net, opt, x = parts()

    def report() -> None:
        net.eval()

    def step(x: Tensor, quiet: bool) -> Tensor:
        loss = zero_last(net.train(), opt, x)
        if not quiet:
            report()
        return loss

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(3):
        compiled(x, True)
    assert compiled.captures == 1 and compiled.recompiles == []


@pytest.mark.parametrize("make", [
    lambda opt: optim.lr_scheduler.StepLR(opt, 1), lambda opt: optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9),
    lambda opt: optim.lr_scheduler.SequentialLR(
        opt, [optim.lr_scheduler.ConstantLR(opt), optim.lr_scheduler.ExponentialLR(opt, 0.9)], [2]),
])  # fmt: skip
def test_a_step_with_its_schedule_is_captured_once(make: Any) -> None:
    def step(net: nn.Module, opt: optim.Optimizer, schedule: Any, x: Tensor) -> Tensor:
        loss = zero_last(net, opt, x)
        schedule.step()
        return loss

    compiled = ws.compile(step, fullgraph=True)
    runs = []
    for run in (step, compiled):
        net, opt, x = parts(optim.Adam)
        schedule = make(opt)
        losses = torch.stack([run(net, opt, schedule, x) for _ in range(4)])
        runs.append([losses, *net.parameters(), torch.tensor(schedule.get_last_lr())])
    assert all(map(torch.equal, *runs)) and compiled.captures == 1 and compiled.recompiles == []


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups or states, as optimizers of libraries do."""

    def __init__(self, parameters: Any, of_group: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.of_group = of_group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                held = group if self.of_group else self.state[p]
                held["step"] = held.get("step", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / (1 - 0.9 ** held["step"]))


@pytest.mark.parametrize("of_group", [True, False])
def test_counts_that_an_optimizer_begins_are_inputs_of_the_second_capture(of_group: bool) -> None:
    def make(seed: int) -> World:
        model = nn.Linear(3, 2)
        opt = Counting(model.parameters(), of_group)

        def step(x: Tensor) -> Tensor:
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss

        return World(step, [(torch.randn(2, 3),)], {"model": model, "opt": opt})

    assert assert_same_run(make).step.captures == 2


@pytest.mark.parametrize("make", [optim.ASGD, optim.Rprop, optim.AdamW])
def test_state_that_begins_with_a_rate_begins_with_the_one_that_the_step_sets(make: Any) -> None:
    def step(net: nn.Module, opt: optim.Optimizer, x: Tensor) -> Tensor:
        opt.param_groups[0]["lr"] = 0.05
        return zero_last(net, opt, x)

    left: list[list[Tensor]] = []
    for run in (step, compiled := ws.compile(step, fullgraph=True)):
        net, opt, x = parts(partial(make, lr=0.01))
        losses = [run(net, opt, x) for _ in range(3)]
        left.append([*losses, *net.parameters(), *(v for state in opt.state.values() for v in state.values())])
    assert all(map(torch.equal, *left)) and compiled.captures == (1 if make is optim.AdamW else 2)


def test_state_of_captures_that_fail_is_taken_out_again() -> None:
    """The first with a changing number as an input, the second without."""
    used, unused, count = nn.Linear(4, 4), nn.Linear(4, 4), SimpleNamespace(calls=0, update=False)
    opt = optim.Adam([*used.parameters(), *unused.parameters()])

    @ws.compile
    def step(x: Tensor) -> None:
        count.calls += 1
        (used(x) * count.calls).sum().backward()
        if count.update:
            opt.step()
            print(end=f"{x.sum().item()}"[:0])

    for count.update in (False, True):
        step(torch.randn(4, 4))
    assert step.breaks and {*map(id, opt.state)} == {*map(id, used.parameters())}
