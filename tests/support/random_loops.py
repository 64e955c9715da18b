"""Random training loops: what happens between and around the calls of a random step is drawn.

A loop trains eagerly, or with one part of its step compiled in the way that a row of `FORMS` names; the judge of
`equal.py` compares everything after each call and after what happens next.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import wholestep as ws
from tests.co_run.test_steps import co_run
from tests.support.equal import identity
from tests.support.random_steps import FIRST, SETTINGS, Program, State, Stop, drawn_step, times, train
from tests.support.worlds import Compile, Step, World
from wholestep.autograd import compiled_backward
from wholestep.errors import CaptureError, MemoryBudgetError

Event = tuple[int, str, int]  # after which call, a name of `EVENTS`, a number from 1 to 8


@dataclass
class Drawn:
    """A loop: its step, rows of the batches that come in turn, how often it is called, what happens after calls."""

    program: Program
    rows: Sequence[int]
    calls: int
    events: Sequence[Event]
    form: str

    def __str__(self) -> str:
        lines = [self.form]
        lines += [f"{field.name}: {getattr(self.program, field.name)}" for field in fields(self.program)]
        for call in range(self.calls):
            happens = [f"{name} ({number})" for after, name, number in self.events if after == call]
            rows = self.rows[call % len(self.rows)]
            lines.append(f"call {call} on {rows} rows, then {', '.join(happens) or 'nothing'}")
        return "\n".join(lines)


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    program = drawn_step(draw)
    sizes = draw.choice([[4], [4, 3], [4, 4, 3], [5, 4, 2], [4, 1]])
    rows = [max(size, 2) if "batch norm" in program.layers else size for size in sizes]
    calls = draw.randint(3, 6)
    number = draw.randint(1, 6)
    events = [(draw.randrange(calls - 1), draw.choice(list(EVENTS)), draw.randint(1, 8)) for _ in range(number)]
    # a second derivative of a compiled module is an error
    forms = [form for form in FORMS if form not in ("model", "backward") or "penalty" not in program.losses]
    return Drawn(program, rows, calls, sorted(events, key=lambda event: event[0]), draw.choice(forms))


class Loop:
    """A run of a drawn loop: what a step is called with, and what happens between its calls."""

    def __init__(self, loop: Drawn) -> None:
        self.drawn, self.state, self.handles, self.gain = loop, State(loop.program), list[Any](), 1.0
        self.net, self.compile_model = self.state.model, identity
        self.train, self.evaluate = train, evaluated
        self.update: Callable[[Any], None] = lambda opt: opt.step()
        self.saved = copy.deepcopy((self.state.model.state_dict(), self.state.opt.state_dict()))

    @property
    def model(self) -> Any:
        return self.state.model

    @property
    def opt(self) -> torch.optim.Optimizer:
        return self.state.opt

    def use(self, model: nn.Module) -> None:
        self.state.model, self.net = model, self.compile_model(model)

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        return FIRST[self.drawn.program.first][1](rows), torch.randint(4, (rows,))

    def call(self, x: Tensor, y: Tensor) -> Any:
        SETTINGS["gain"] = self.gain
        with redirect_stdout(io.StringIO()) as printed:
            try:
                result = self.train(self.state, self.net, self.update, x, y)
            except Stop as stop:
                result = str(stop)
        self.state.fails = False
        self.state.log.append(printed.getvalue())
        return result

    def after(self, call: int, result: Any) -> None:
        """What happens after a call. What is refused, as to load another network's weights, is refused to both runs."""
        for _, name, number in (event for event in self.drawn.events if event[0] == call):
            try:
                EVENTS[name](self, number)
            except (RuntimeError, ValueError, IndexError) as error:
                self.state.log.append(type(error).__name__)


def evaluated(net: Callable[..., Tensor], x: Tensor) -> Tensor:
    return net(x).softmax(-1)


def evaluate(run: Loop, number: int) -> None:
    run.model.train(number % 2 == 0)
    with torch.no_grad():
        run.state.kept.append(run.evaluate(run.net, run.batch(number)[0]))
    run.model.train()


def add_group(run: Loop, number: int = 1) -> None:
    """Of the parameters that no group has."""
    known = {p for group in run.opt.param_groups for p in group["params"]}
    new = [p for p in run.model.parameters() if p not in known]
    run.opt.add_param_group({"params": new, "lr": number / 100})


def average_anew(run: Loop, number: int = 1) -> None:
    run.state.average = AveragedModel(run.model)


def changing(change: Callable[[Any, int], Any]) -> Callable[[Loop, int], None]:
    """A change of the model that the optimizer and the average follow."""

    def event(run: Loop, number: int) -> None:
        change(run.model, number)
        add_group(run)
        average_anew(run)

    return event


def copy_all(run: Loop, number: int) -> None:
    model, run.state.opt = copy.deepcopy((run.model, run.opt))
    run.use(model)


def scale_gradients(run: Loop, number: int) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(number / 8)


def halve(p: Tensor) -> None:
    p.grad.mul_(0.5)


def hooked(register: Callable[[Loop, int], Any]) -> Callable[[Loop, int], Any]:
    return lambda run, number: run.handles.append(register(run, number))


class Shapes:
    """Counts in an object that a step reaches by way of a hook alone."""

    def __init__(self, run: Loop) -> None:
        self.seen = list[Any]()
        run.state.kept.append(self.seen)

    def __call__(self, parameter: Tensor) -> None:
        self.seen.append(parameter.shape)


EVENTS: dict[str, Callable[[Loop, int], Any]] = {
    "add a group": add_group,
    "append a block": changing(lambda model, number: model.blocks.append(nn.Linear(8, 8))),
    "average": lambda run, number: run.state.average.update_parameters(run.model),
    "average anew": average_anew,
    "backward outside": lambda run, number: run.net(run.batch(number)[0]).square().sum().backward(),
    "betas": lambda run, number: run.opt.param_groups[0].update(betas=(number / 10, 0.99)),
    "copy all": copy_all,
    "dropout": lambda run, number: setattr(run.model.dropout, "p", number / 10),
    "edit": torch.no_grad()(lambda run, number: run.model.last.weight.mul_(number / 8)),
    "edit data": lambda run, number: setattr(run.model.last.bias, "data", torch.full((4,), number / 8)),
    "evaluate": evaluate,
    "evaluation mode": lambda run, number: run.model.eval(),
    "factor": lambda run, number: setattr(run.state, "factor", number / 4),
    "fail": lambda run, number: setattr(run.state, "fails", True),
    "freeze": lambda run, number: run.model.first.requires_grad_(False),
    "freeze most": lambda run, number: [p.requires_grad_(p.shape[0] == 4) for p in run.model.parameters()],
    "global": lambda run, number: setattr(run, "gain", number / 4),
    "gradient": lambda run, number: setattr(run.model.last.weight, "grad", torch.ones_like(run.model.last.weight)),
    "gradients to zeros": lambda run, number: run.opt.zero_grad(set_to_none=False),
    "hook": hooked(lambda run, number: run.model.first.register_forward_hook(
        lambda module, args, out: out * 1.25)),
    "hook after accumulation": hooked(
        lambda run, number: run.model.last.weight.register_post_accumulate_grad_hook(halve)),
    "hook on a gradient": hooked(lambda run, number: run.model.last.weight.register_hook(lambda g: g * number)),
    "hook on the backward": hooked(lambda run, number: run.model.last.register_full_backward_hook(
        lambda module, grads, outs: (grads[0] if grads[0] is None else grads[0] * 2,))),
    "hook on the update": hooked(lambda run, number: run.opt.register_step_pre_hook(
        lambda opt, args, kwargs: run.state.log.append("update"))),
    "hook that counts": hooked(
        lambda run, number: run.model.last.weight.register_post_accumulate_grad_hook(Shapes(run))),
    "keep a gradient": lambda run, number: run.state.kept.append(run.model.last.weight.grad),
    "load": lambda run, number: run.model.load_state_dict(run.saved[0]),
    "load the optimizer": lambda run, number: run.opt.load_state_dict(copy.deepcopy(run.saved[1])),
    "load what it has": lambda run, number: run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict())),
    "momentum": lambda run, number: run.opt.param_groups[0].update(momentum=number / 10),
    "no gradient": lambda run, number: setattr(run.model.last.weight, "grad", None),
    "no gradients": lambda run, number: run.opt.zero_grad(),
    "normalise": changing(lambda model, number: parametrizations.weight_norm(model.last)),
    "rate": lambda run, number: run.opt.param_groups[0].update(lr=number / 100),
    "remove a block": changing(lambda model, number: model.blocks.pop(-1)),
    "reset statistics": lambda run, number: run.model.norm.reset_running_stats(),
    "save": lambda run, number: setattr(
        run, "saved", copy.deepcopy((run.model.state_dict(), run.opt.state_dict()))),
    "scale": lambda run, number: setattr(run.model, "scale", number / 4),
    "scale gradients": scale_gradients,
    "schedule": lambda run, number: run.state.schedule.step(),
    "swap": changing(lambda model, number: setattr(model, "last", nn.Linear(8, 4))),
    "tie": changing(lambda model, number: setattr(model.blocks[0], "weight", model.middle.weight)),
    "training mode": lambda run, number: run.model.train(),
    "transform": lambda run, number: setattr(run.state, "transform", times(number / 4)),
    "unfreeze": lambda run, number: run.model.requires_grad_(True),
    "undo normalise": changing(
        lambda model, number: parametrize.remove_parametrizations(model.last, "weight")),
    "unhook": lambda run, number: run.handles.pop().remove(),
    "weight decay": lambda run, number: run.opt.param_groups[0].update(weight_decay=number / 10),
}  # fmt: skip


def or_eager(**options: Any) -> Compile:
    """Steps that are refused run in eager, from what a refusal leaves."""

    def compile(fn: Step) -> Step:
        compiled = ws.compile(fn, **options)

        def call(*args: Any) -> Any:
            try:
                return compiled(*args)
            except (CaptureError, MemoryBudgetError):
                return fn(*args)

        return call

    return compile


def whole(run: Loop, compile: Compile) -> None:
    run.train, run.evaluate = compile(run.train), compile(run.evaluate)


def closure(run: Loop) -> None:
    compiled = ws.compile(lambda x, y: train(run.state, run.net, run.update, x, y))
    run.train = lambda state, net, update, x, y: compiled(x, y)


def model(run: Loop) -> None:
    run.compile_model = ws.compile
    run.use(run.model)


def update(run: Loop) -> None:
    run.update = ws.compile(run.update)


def backward(run: Loop) -> None:
    def call(*args: Any) -> Any:
        with context:
            return train(*args)

    context, run.train = compiled_backward(), call


FORMS: dict[str, Callable[[Loop], None]] = {
    "backward": backward,
    "closure": closure,
    "co-run": partial(whole, compile=co_run),
    "dynamic": partial(whole, compile=partial(ws.compile, dynamic=True)),
    "memory budget": partial(whole, compile=or_eager(memory_budget=0.9)),
    "model": model,
    "update": update,
    "whole": partial(whole, compile=ws.compile),
    "whole or refused": partial(whole, compile=or_eager(fullgraph=True)),
}


def compiled(form: str, step: Any) -> Step:
    """The call of a loop, of which a part is compiled from now on."""
    FORMS[form](step.__self__)
    return step


def world(loop: Drawn, seed: int) -> World:
    run = Loop(loop)
    return World(run.call, [*map(run.batch, loop.rows)], {"state": run.state}, run.after, changing=True, versions=False)
