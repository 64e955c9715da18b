"""Effects: what a step changed in the Python world, done again without running it."""

from __future__ import annotations

import dataclasses
import string
import types
import uuid
from collections import ChainMap, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

import wholestep as ws
from wholestep.capture import Binder, Effect, GuardFailure, Snapshot, new_values, outcome
from wholestep.errors import LeakError, UnsupportedError

Pair = namedtuple("Pair", ["left", "right"])


def traced(fn: Callable[..., Any], *args: Any) -> tuple[Snapshot, list[Effect]]:
    """Runs a step, notes its effects and undoes them; tensors unknown before count as made in the step."""
    snap = Snapshot(fn, args)
    known = {id(t): t for t in (f.tensor for f in snap.tensors.values())}
    try:
        fn(*args)
        effects, _ = outcome(snap, lambda t: id(t) not in known)
    finally:
        snap.restore()
    return snap, effects


def again(snap: Snapshot, effects: list[Effect]) -> list[torch.Tensor]:
    """Replays effects with fresh values, which it gives back."""
    made = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in new_values(effects)]
    Binder(snap, [], effects=effects).path.apply(snap.call.args, snap.call.kwargs, made)
    return made


def test_an_optimizer_step_with_new_state_and_gradients() -> None:
    net = nn.Linear(2, 2)
    opt = torch.optim.Adam(net.parameters())

    def step(x: torch.Tensor) -> None:
        net(x).sum().backward()
        opt.step()

    snap, effects = traced(step, torch.ones(1, 2))
    assert not opt.state and net.weight.grad is None
    lines = [str(e) for e in effects]
    assert lines[0].startswith("L['net'].weight.grad = new[")
    assert any(line.startswith("L['opt'].state[L['net'].weight] = dict({'step': new[") for line in lines)
    made = again(snap, effects)
    assert net.weight.grad is made[0] and list(opt.state) == [net.weight, net.bias]
    assert {id(t) for s in opt.state.values() for t in s.values()} <= {id(t) for t in made}
    snap, effects = traced(lambda: opt.zero_grad())
    assert [str(e) for e in effects] == [f"L['opt'].param_groups[0]['params'][{i}].grad = None" for i in (0, 1)]
    again(snap, effects)
    assert net.weight.grad is None and net.bias.grad is None


def test_momentum_buffers_none_then_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones(2)
    snap, effects = traced(opt.step)
    (line,) = (str(e) for e in effects)
    assert line.endswith("dict({'momentum_buffer': new[0]})")
    opt.state[weight]["momentum_buffer"] = None
    snap, effects = traced(opt.step)
    made = again(snap, effects)
    assert opt.state[weight]["momentum_buffer"] is made[0]


@dataclasses.dataclass
class Kept:
    last: Any = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.kept, self.acts, self.table, self.calls = Kept(), [], defaultdict(list), 0
        self.a, self.b = torch.ones(1), torch.zeros(1)


def test_attributes_containers_and_exchanges() -> None:
    def step(net: Net, queue: deque[Any], space: types.SimpleNamespace) -> None:
        fresh = net.w * 2
        net.kept.last = Pair(fresh.detach(), [net.w])
        net.acts.clear()
        net.acts.append(fresh)
        net.calls += 1
        net.a, net.b = net.b, net.a
        net.table["new"].append(fresh)
        net.config = Kept(fresh)
        queue.appendleft(1)
        del space.old
        space.new = {"t": fresh}
        net.w.requires_grad_(False)

    net, queue, space = Net(), deque([0], 3), types.SimpleNamespace(old=1)
    a, b = net.a, net.b
    snap, effects = traced(step, net, queue, space)
    assert net.calls == 0 and not net.acts and net.a is a and not hasattr(net, "config") and net.w.requires_grad
    fresh, detached = again(snap, effects)
    assert net.kept.last.left is detached and net.kept.last.right[0] is net.w and isinstance(net.kept.last, Pair)
    assert net.acts == [fresh] and net.calls == 1 and (net.a, net.b) == (b, a)
    assert type(net.table["new"]) is list and net.table["new"][0] is fresh
    assert isinstance(net.config, Kept) and net.config.last is fresh
    assert queue == deque([1, 0]) and vars(space) == {"new": {"t": fresh}} and not net.w.requires_grad


def test_globals_closures_slots_and_classes() -> None:
    class Slotted:
        __slots__ = ("t",)
        count = 0

    held: Any = None
    slotted = Slotted()

    def step(x: torch.Tensor) -> None:
        nonlocal held
        global KEPT
        held = KEPT = slotted.t = x * 2
        Slotted.count += 1

    snap, effects = traced(step, torch.ones(1))
    assert held is None and KEPT is None and Slotted.count == 0
    (made,) = again(snap, effects)
    assert held is made and KEPT is made and slotted.t is made and Slotted.count == 1
    snap.restore()
    assert KEPT is None


KEPT: Any = None


CONTEXT: ContextVar[Any] = ContextVar("made", default=None)


def test_context_variables_are_left_as_the_step_leaves_them() -> None:
    def leaves(x: torch.Tensor) -> None:
        CONTEXT.set(x * 2)

    def resets(x: torch.Tensor) -> torch.Tensor:
        token = CONTEXT.set(x * 3)
        result = CONTEXT.get() + 1
        CONTEXT.reset(token)
        return result

    left, reset = ws.compile(leaves), ws.compile(resets)
    for factor in (1.0, 2.0, 3.0):
        left(torch.full((2,), factor))
        assert CONTEXT.get().tolist() == [2 * factor] * 2
        assert reset(torch.full((2,), factor)).tolist() == [3 * factor + 1] * 2
        assert CONTEXT.get().tolist() == [2 * factor] * 2


def test_what_cannot_be_replayed_is_refused() -> None:
    losses: list[torch.Tensor] = [torch.zeros(1)]
    weight = nn.Parameter(torch.ones(1))
    kept: dict[str, Any] = {}

    def grows() -> None:
        losses.append(weight * 2)

    def hides() -> None:
        made = weight * 2
        kept["later"] = (made for _ in range(2))

    def cyclic() -> None:
        kept["self"] = [weight * 2]
        kept["self"].append(kept["self"])

    def hooks() -> None:
        weight.register_hook(lambda g: g)

    for step, what in (
        (grows, r"L\['losses'\] grows by 1"), (hides, r"L\['kept'\]\['later'\]"), (cyclic, "contains itself"),
        (hooks, r"a hook was added to L\['weight'\]"),
    ):
        with pytest.raises(LeakError, match=what):
            traced(step)
        assert len(losses) == 1 and not kept and not weight._backward_hooks


def test_a_counter_is_an_effect_and_a_guard() -> None:
    net = Net()

    def step(net: Net) -> None:
        net.calls += 1

    snap, effects = traced(step, net)
    binder = Binder(snap, [], effects=effects)
    assert binder((net,), {}) == []
    binder.path.apply((net,), {}, [])
    assert net.calls == 1
    assert binder((net,), {}) == GuardFailure("L['net'].calls: expected 0, found 1")


def test_bookkeeping_of_optimizers_and_schedulers_never_recompiles() -> None:
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = rates.ExponentialLR(opt, 0.5)

    def step(x: torch.Tensor) -> None:
        net(x).sum().backward()
        opt.step()
        opt.zero_grad()

    x = torch.ones(1, 2)
    snap, effects = traced(step, x)
    binder = Binder(snap, [n.source for n in snap.numbers], effects=effects)
    for _ in range(3):
        values = binder((x,), {})
        assert not isinstance(values, GuardFailure) and values[0] == opt.param_groups[0]["lr"]
        binder.path.apply((x,), {}, new_values(effects))
        scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.0125


def test_replay_reads_everything_before_it_assigns() -> None:
    box = {"a": torch.ones(1), "b": torch.zeros(1)}
    a, b = box["a"], box["b"]

    def step(box: dict[str, torch.Tensor]) -> None:
        box["a"], box["b"] = box["b"], box["a"]

    snap, effects = traced(step, box)
    other = {"a": a.clone(), "b": b.clone()}
    want = other["b"], other["a"]
    binder = Binder(Snapshot(step, (other,)), [], effects=effects)
    binder.path.apply((other,), {}, [])
    assert (other["a"], other["b"]) == want and box["a"] is a


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: rates.ExponentialLR(o, 0.5),
    lambda o: rates.OneCycleLR(o, 0.5, total_steps=9),
    lambda o: rates.SequentialLR(o, [rates.ConstantLR(o), rates.CosineAnnealingLR(o, 5)], [2]),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_inside_of_the_step_moves_on_and_never_recompiles(make: Callable[[Any], Any]) -> None:
    def fresh() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        net = nn.Linear(2, 2)
        opt = torch.optim.Adam(net.parameters(), lr=0.25)
        return net, opt, make(opt)

    def step(net: Any, opt: Any, scheduler: Any) -> None:
        net(torch.ones(1, 2)).sum().backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()

    eager, ours = fresh(), fresh()
    step(*eager)
    step(*ours)
    snap = Snapshot(step, ours)
    before = dict(vars(ours[2])), dict(ours[1].param_groups[0])
    snap.substitutes.put(None)
    snap.substitutes.lift([n.value for n in snap.numbers])
    step(*ours)
    effects, _ = outcome(snap, lambda t: True)
    snap.restore()
    assert (dict(vars(ours[2])), dict(ours[1].param_groups[0])) == before
    assert [str(e) for e in effects] == ["L['scheduler'].step()"]
    binder = Binder(snap, [n.source for n in snap.numbers], effects=effects)
    for _ in range(4):
        step(*eager)
        assert not isinstance(binder(ours, {}), GuardFailure)
        binder.path.apply(ours, {}, [])
        assert ours[1].param_groups[0]["lr"] == eager[1].param_groups[0]["lr"]
        assert ours[2].last_epoch == eager[2].last_epoch
    assert binder.slow_calls == 0


def test_reading_a_rate_after_its_scheduler_moved_is_refused() -> None:
    weight = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([weight], lr=0.5)
    scheduler = rates.ExponentialLR(opt, 0.5)
    plateau = rates.ReduceLROnPlateau(opt)

    def early() -> None:
        weight.grad = torch.ones(1)
        scheduler.step()
        opt.step()

    def data() -> None:
        plateau.step((weight * 2).sum())

    for step, what in ((early, r"\['lr'\] was read after"), (data, "only known when the step runs")):
        snap = Snapshot(step)
        snap.substitutes.put(None)
        snap.substitutes.lift([n.value for n in snap.numbers])
        with pytest.raises(UnsupportedError, match=what):
            step()
        snap.restore()
        assert opt.param_groups[0]["lr"] == 0.5 and "step" not in vars(scheduler) and weight.grad is None


class Output(OrderedDict[str, Any]):
    """Keeps items as attributes too, as model outputs do."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_results_keep_the_identity_of_what_was_there_and_of_what_is_held_twice() -> None:
    kept = Kept()

    def step(kept: Kept, x: torch.Tensor) -> Any:
        out = Output()
        out["y"] = x * 2
        kept.last = [out["y"], x]
        return {"kept": kept, "list": kept.last, "out": out, "x": x, "n": 3}

    x = torch.ones(1)
    snap = Snapshot(step, (kept, x))
    effects, described = outcome(snap, lambda t: t is not x, step(kept, x))
    snap.restore()
    assert kept.last is None
    binder = Binder(snap, [f.source for f in snap.tensors.values()], effects=effects, result=described)
    made = [torch.zeros(1) for _ in new_values(effects, described)]
    result = binder.path.apply((kept, x), {}, made)
    assert list(result) == ["kept", "list", "out", "x", "n"] and result["n"] == 3
    assert result["kept"] is kept and result["list"] is kept.last and kept.last[0] is made[0] and result["x"] is x
    assert type(result["out"]) is Output and result["out"].y is result["out"]["y"] is made[0]


OF_SIZES: dict[str, Callable[[int], Any]] = {
    "dictionary": lambda n: OrderedDict(n=n),
    "namespace": lambda n: SimpleNamespace(n=n),
    "chain": lambda n: ChainMap({"n": n}),
    "template": lambda n: string.Template("x" * n),
    "identifier": lambda n: uuid.UUID(int=n),
    "fraction": lambda n: Fraction(n, 7),
}


@pytest.mark.parametrize("kind", OF_SIZES)
def test_sizes_are_kept_in_objects_of_the_standard_library(kind: str) -> None:
    """Of each the last one dies when the step puts another into its place."""

    def step(holder: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        holder.kept = OF_SIZES[kind](x.shape[0])
        return x.sum()

    compiled, holder = ws.compile(step, fullgraph=True), SimpleNamespace()
    for size in (4, 5, 6, 7, 4):
        assert compiled(holder, torch.ones(size)) == size
        want = OF_SIZES[kind](size)
        assert type(holder.kept) is type(want)
        assert repr(getattr(holder.kept, "__dict__", holder.kept)) == repr(getattr(want, "__dict__", want))


def test_attributes_and_keys_that_are_set_anew_come_last() -> None:
    def step(holder: SimpleNamespace, table: OrderedDict[str, Any], x: torch.Tensor) -> torch.Tensor:
        first = holder.first
        del holder.first, holder.kept
        holder.kept, holder.first = x * 2, first  # as `clear()` of a module that keeps what it saw last
        table.move_to_end("b", last=False)
        table["c"] = table.pop("c")
        return holder.kept.sum()

    runs: list[Any] = []
    for run in (step, ws.compile(step, fullgraph=True)):
        holder = SimpleNamespace(first=1, kept=None, seen=0)
        table = OrderedDict[str, Any](a=torch.ones(1), b=2, c=[], d=0)
        for call in range(4):
            holder.seen = call  # no code of the step names it
            runs.append([float(run(holder, table, torch.ones(2) * call)), *vars(holder), *table, holder.seen])
    assert runs[:4] == runs[4:]
