"""Restoring: whatever a step does to the Python world, ending well or not, can be undone exactly."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from wholestep.capture import Binder, GuardFailure, Snapshot, new_values, outcome
from wholestep.capture.guards.guards import compare
from wholestep.errors import LeakError

Pair = namedtuple("Pair", ["left", "right"])


class Slotted:
    __slots__ = ("value", "other")

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    extra: dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.again = self.fc
        self.register_buffer("seen", torch.zeros(2))
        self.calls = 0
        self.notes: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.again(x)


def world(net: nn.Module, opt: torch.optim.Optimizer) -> list[Any]:
    """Everything about a model and its optimizer that a user could compare, with identities and orders."""
    found: list[Any] = []
    for name, module in net.named_modules():
        found.append((name, [(k, id(v)) for k, v in vars(module).items()]))
        for table in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            found.append((table, [(k, id(v)) for k, v in getattr(module, table).items()]))
    for p in (*net.parameters(), *net.buffers()):
        found.append((id(p.grad) if p.is_leaf else 0, p.requires_grad, p._version, p.is_leaf, p._backward_hooks))
    found.append([[(k, id(v)) for k, v in group.items()] for group in opt.param_groups])
    found.append([(id(k), [(n, id(v)) for n, v in s.items()]) for k, s in opt.state.items()])
    return found


def test_a_whole_step_is_undone() -> None:
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        net.calls += 1
        net.notes.append("x")
        net.extra = torch.ones(1)
        net.eval()
        net.register_forward_hook(lambda *_: None)
        net.fc.weight.register_hook(lambda g: g * 2)
        net.fc.bias.requires_grad_(False)
        net.seen.mul_(net.fc.weight.sum())
        del net.again
        (net.fc(x).sum()).backward()
        opt.step()
        opt.param_groups[0]["lr"] = 3.0
        opt.add_param_group({"params": [torch.zeros(1)]})
        raise RuntimeError("the user's own")

    before = world(net, opt)
    net.fc.weight.grad  # noqa: B018
    snap = Snapshot(step, (torch.ones(2, 3),))
    with pytest.raises(RuntimeError, match="the user's own"):
        step(torch.ones(2, 3))
    assert world(net, opt) != before
    snap.restore()
    assert world(net, opt) == before
    assert net.seen.grad_fn is None and not net.seen.requires_grad
    assert torch.is_grad_enabled()


def test_containers_keep_identity_order_and_content() -> None:
    inner = [1, 2]
    things: dict[str, Any] = {
        "list": inner, "tuple": (inner, 3), "set": {1, 2}, "deque": deque([1, 2], 4), "pair": Pair(inner, 1),
        "ordered": OrderedDict(a=1, b=2), "default": defaultdict(list, a=[1]), "slots": Slotted([1]),
        "space": types.SimpleNamespace(a=[1]), "batch": Batch(torch.ones(2), {"k": [1]}),
    }
    things["self"] = things

    def step(t: dict[str, Any]) -> None:
        t["list"].append(3)
        t["set"].add(9)
        t["deque"].popleft()
        t["ordered"].move_to_end("a")
        t["default"]["new"].append(1)
        t["slots"].value.clear()
        t["slots"].other = 1
        t["space"].b = 2
        t["space"].a += [5]
        t["batch"].extra["k"] = None
        t["batch"].x = torch.zeros(1)
        del t["tuple"]
        t["list"] = t.pop("list")

    x, keys = things["batch"].x, list(things)
    snap = Snapshot(step, (things,))
    step(things)
    snap.restore()
    assert list(things) == keys and things["list"] is inner and inner == [1, 2]
    assert things["set"] == {1, 2} and things["deque"] == deque([1, 2]) and list(things["ordered"]) == ["a", "b"]
    assert list(things["default"]) == ["a"] and things["slots"].value == [1] and not hasattr(things["slots"], "other")
    assert vars(things["space"]) == {"a": [1]} and things["batch"].x is x and things["batch"].extra == {"k": [1]}


COUNT = 0
CACHE: dict[str, Any] = {}


def test_globals_closures_defaults_and_class_values() -> None:
    held = 1

    class Kept:
        total = 0
        seen: list[int] = []

        def add(self) -> None:
            Kept.total += 1
            self.seen.append(1)

    def helper(memo: list[int] = []) -> None:  # noqa: B006
        global COUNT
        COUNT += 1
        CACHE["k"] = torch.ones(1)
        memo.append(1)

    def step() -> None:
        nonlocal held
        held += 1
        helper()
        Kept().add()

    snap = Snapshot(step)
    step()
    assert (COUNT, held, Kept.total, Kept.seen) == (1, 2, 1, [1])
    snap.restore()
    assert (COUNT, held, Kept.total, Kept.seen, CACHE, helper.__defaults__) == (0, 1, 0, [], {}, ([],))


def test_lifted_numbers_come_back() -> None:
    weight = nn.Parameter(torch.ones(1))
    opt = torch.optim.Adam([{"params": [weight], "lr": 1}], betas=(0.5, 0.75))
    opt.param_groups[0]["initial_lr"] = 0.25
    groups = dict(opt.param_groups[0])
    snap = Snapshot(lambda o: o.step(), (opt,))
    assert {str(n.source).removeprefix("L['o'].param_groups[0]"): n.value for n in snap.numbers} == {
        "['lr']": 1.0, "['betas'][0]": 0.5, "['betas'][1]": 0.75, "['eps']": 1e-8, "['initial_lr']": 0.25,
    }
    marks = [float(i) + 100 for i in range(len(snap.numbers))]
    snap.substitutes.lift(marks)
    assert isinstance(opt.param_groups[0]["betas"], tuple) and all(b > 99 for b in opt.param_groups[0]["betas"])
    assert outcome(snap, lambda t: False)[0] == []
    snap.restore()
    assert opt.param_groups[0] == groups and opt.param_groups[0]["betas"] is groups["betas"]
    with pytest.raises(ValueError, match="1 stand-ins for"):
        snap.substitutes.lift([1.0])


def test_a_cycle_of_objects_and_shared_modules_end() -> None:
    a, b = types.SimpleNamespace(n=1), types.SimpleNamespace(n=2)
    a.b, b.a = b, a
    net = Net()
    net.__dict__["owner"] = a
    a.net = net
    snap = Snapshot(lambda o: o, (a,))
    sources = [str(found.source) for found in snap.tensors.values()]
    assert sorted(sources) == ["L['o'].net.fc.bias", "L['o'].net.fc.weight", "L['o'].net.seen"]


# random object graphs -------------------------------------------------------------------------------------

PLAIN = st.one_of(st.integers(-2, 2), st.booleans(), st.sampled_from(["a", "b", 0.5, 1.0, None]))
VALUES = st.recursive(PLAIN, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    st.lists(inner, max_size=2).map(tuple), st.lists(inner, max_size=3).map(deque),
    st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(lambda d: types.SimpleNamespace(**d)),
    st.just(0).map(lambda _: torch.zeros(2)),
), max_leaves=12)


def holders(value: Any, found: list[Any] | None = None) -> list[Any]:
    """All mutable containers inside a value."""
    found = [] if found is None else found
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, (list, deque, dict)):
        found.append(value)
    if isinstance(value, (list, deque, dict, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            holders(inner, found)
    return found


def picture(value: Any) -> Any:
    """A value with the identities of its tensors, comparable and typed."""
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, types.SimpleNamespace):
        return ("space", picture(vars(value)))
    if isinstance(value, dict):
        return ("dict", [(k, picture(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value), [picture(v) for v in value])
    return (type(value), value)


def mutate(holder: Any, how: int, value: Any) -> None:
    if isinstance(holder, dict):
        if how == 0 and holder:
            holder.pop(next(iter(holder)))
        elif how == 1 and holder:
            holder[next(iter(holder))] = value
        else:
            holder["z"] = value
    elif how == 0 and holder:
        holder.pop()
    elif how == 1 and holder:
        holder[0] = value
    else:
        holder.append(value)


@given(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), st.lists(st.tuples(st.integers(0, 50),
       st.integers(0, 2), VALUES), max_size=4))
def test_random_graphs_are_restored_and_changes_are_guarded(
        root: dict[str, Any], changes: list[tuple[int, int, Any]]) -> None:
    def step(root: dict[str, Any]) -> None:
        """Reads anything."""

    before = picture(root)
    snap = Snapshot(step, (root,))
    binder = Binder(snap, [f.source for f in snap.tensors.values()])
    values = binder((root,), {})
    assert not isinstance(values, GuardFailure) and [id(v) for v in values] == list(snap.tensors)
    for which, how, value in changes:
        found = holders(root)
        mutate(found[which % len(found)], how, value)
    differs = _without_ids(picture(root)) != _without_ids(before)
    verdict = binder((root,), {})
    assert isinstance(verdict, GuardFailure) >= differs, verdict
    slow = compare(snap.guards(), Snapshot(step, (root,)).guards())
    assert (slow is None) == (not isinstance(verdict, GuardFailure))
    snap.restore()
    assert picture(root) == before
    assert not isinstance(binder((root,), {}), GuardFailure)


def _without_ids(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "tensor":
        return "tensor"
    return type(value)(_without_ids(v) for v in value) if isinstance(value, (tuple, list)) else value


@given(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), st.lists(st.tuples(st.integers(0, 50),
       st.integers(0, 2), VALUES), max_size=4))
def test_random_changes_are_undone_and_done_again(root: dict[str, Any], changes: list[tuple[int, int, Any]]) -> None:
    def step(root: dict[str, Any]) -> None:
        for which, how, value in changes:
            found = holders(root)
            mutate(found[which % len(found)], how, value)

    before = picture(root)
    snap = Snapshot(step, (root,))
    known = set(snap.tensors)
    values = [found.tensor for found in snap.tensors.values()]
    step(root)
    after = picture(root)
    try:
        effects, _ = outcome(snap, lambda t: id(t) not in known)
    except LeakError:  # a list grew by tensors made in the step
        effects = None
    snap.restore()
    assert picture(root) == before
    if effects is not None:
        binder = Binder(snap, [found.source for found in snap.tensors.values()], effects=effects)
        assert [id(v) for v in binder((root,), {})] == [id(v) for v in values]
        binder.path.apply((root,), {}, new_values(effects))
        assert picture(root) == after
