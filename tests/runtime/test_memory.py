"""What a compiled step keeps alive, and what it lets go of before its program runs."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.lower_programs import Builder, clone_inputs
from wholestep.lower.backends.aten import lower_aten
from wholestep.lower.codegen.bind_memory import Recycler

aten = torch.ops.aten


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return net, torch.optim.AdamW(net.parameters()), torch.randn(3, 4)


def zero_first(net: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    opt.zero_grad()
    loss = net(x).square().sum()
    loss.backward()
    opt.step()
    return loss.detach()


def keeps_old(net: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    old = net[0].weight.grad
    return zero_first(net, opt, x), old


def watched(step: Any, look: Callable[[], None]) -> None:
    """Has ``look`` called right before each program of a compiled step runs."""
    for program in step._capturer.known.programs.values():
        run = program.run

        def looking(*values: Any, run: Any = run) -> Any:
            look()
            return run(*values)

        program.run = looking


@pytest.mark.parametrize("calls", [2, 4])
def test_gradients_that_a_step_replaces_unread_are_gone_when_it_runs(calls: int) -> None:
    net, opt, x = parts()
    twin, other, _ = parts()
    step = ws.compile(zero_first, fullgraph=True)
    for _ in range(calls):
        step(net, opt, x)
    grads = [weakref.ref(p.grad) for p in net.parameters()]
    alive: list[int] = []
    watched(step, lambda: alive.append(sum(ref() is not None for ref in grads)))
    last = step(net, opt, x)
    assert alive == [0]
    for _ in range(calls):
        zero_first(twin, other, x)
    assert torch.equal(last, zero_first(twin, other, x))
    for mine, eager in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, eager) and torch.equal(mine.grad, eager.grad)


def test_an_old_gradient_that_the_step_hands_out_stays() -> None:
    net, opt, x = parts()
    zero_first(net, opt, x)
    step = ws.compile(keeps_old, fullgraph=True)
    for _ in range(3):
        before, content = net[0].weight.grad, net[0].weight.grad.clone()
        _, old = step(net, opt, x)
        assert old is before and torch.equal(old, content) and net[0].weight.grad is not before


def test_a_program_of_the_users_own_may_fail_and_gradients_stay() -> None:
    def failing(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            raise ZeroDivisionError("not today")

        return run

    net, opt, x = parts()
    zero_first(net, opt, x)
    grads = [p.grad for p in net.parameters()]
    with pytest.raises(ZeroDivisionError):
        ws.compile(zero_first, backend=failing, fullgraph=True)(net, opt, x)
    assert all(p.grad is g for p, g in zip(net.parameters(), grads, strict=True))


@pytest.mark.parametrize("asks", [False, True])
def test_gradients_of_another_kind_are_a_new_capture_where_python_asks(asks: bool) -> None:
    def ask_first(net: Any, opt: Any, x: Any) -> Any:
        _ = net[0].weight.grad is None
        return zero_first(net, opt, x)

    net, opt, x = parts()
    step = ws.compile(ask_first if asks else zero_first, fullgraph=True)
    for _ in range(3):
        step(net, opt, x)
    assert step.captures == 1 + asks
    net[0].weight.grad = None
    step(net, opt, x)
    assert step.captures == 1 + asks
    assert net[0].weight.grad is not None


def test_the_first_calls_tensors_do_not_live_on() -> None:
    net, opt, x = parts()
    step = ws.compile(zero_first, fullgraph=True)
    ref = weakref.ref(x)
    step(net, opt, x)
    step(net, opt, x)
    del x
    gc.collect()
    assert ref() is None


def test_a_program_that_released_its_memory_begins_anew() -> None:
    b = Builder()
    x = b.input("x", torch.randn(600, 600), "parameter")
    doubled = b.call(aten.mm.default, x, b.call(aten.mm.default, x, x))
    step, inputs = b.finish([doubled], {})
    fast = lower_aten(step)
    first = fast(*clone_inputs(inputs))[0].clone()
    fast.release_memory()
    assert torch.equal(fast(*clone_inputs(inputs))[0], first) and fast.rebinds == 2


def test_idle_blocks_beyond_one_are_freed() -> None:
    recycler = Recycler()

    def block() -> torch.Tensor:
        return recycler(0, (1024,), (1,), torch.float32)

    first, second = block(), block()
    assert len(recycler._kept[0]) == 2 and first.data_ptr() != second.data_ptr()
    del first, second
    block()
    assert len(recycler._kept[0]) == 1


def wide() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 160))
    return net, torch.optim.AdamW(net.parameters()), torch.randn(300, 160)


def lent(step: Any) -> list[str]:
    return [name for name, loan in step._entries[0].program.run._loans.items() if loan.is_out]


def test_the_arena_lends_memory_for_gradients_that_a_step_replaces() -> None:
    (net, opt, x), (twin, other, _) = wide(), wide()
    step = ws.compile(zero_first, fullgraph=True)
    for _ in range(4):
        assert torch.equal(step(net, opt, x), zero_first(twin, other, x))
        for mine, eager in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, eager.grad) and torch.equal(mine, eager)
    run = step._entries[0].program.run
    assert len(lent(step)) == 2 and "fresh(" not in run.code
    weight = net[0].weight.grad
    arena = run._arena["cpu"]
    assert arena.data_ptr() <= weight.data_ptr() < arena.data_ptr() + arena.nbytes
    assert weight.untyped_storage().nbytes() == weight.nbytes and weight.storage_offset() == 0
    assert not weight._is_view() and weight.is_leaf
    rest = weight.clone()
    run.release_memory()
    del arena, run
    gc.collect()
    assert torch.equal(weight, rest), "who holds a gradient holds its memory"
    zero_first(twin, other, x)
    step(net, opt, x)
    assert torch.equal(net[2].weight, twin[2].weight)


@pytest.mark.parametrize("hold", [lambda p: p.grad, lambda p: p.grad[3:], lambda p: p.grad.numpy()])
def test_a_gradient_that_somebody_holds_is_not_written_over(hold: Callable[[Any], Any]) -> None:
    (net, opt, x), (twin, other, _) = wide(), wide()
    step = ws.compile(zero_first, fullgraph=True)
    held: list[tuple[Any, Any]] = []
    for turn in range(6):
        step(net, opt, x)
        zero_first(twin, other, x)
        if turn > 1:
            held.append((hold(net[0].weight), hold(twin[0].weight)))
    for mine, eager in held:
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(eager))
    assert step.recompiles == [] and torch.equal(net[2].weight.grad, twin[2].weight.grad)
    assert len(lent(step)) == 1, "the other gradient is lent memory as before"


def test_gradients_are_accumulated_in_memory_that_is_lent() -> None:
    def accumulate(net: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, last: bool) -> torch.Tensor:
        loss = net(x).square().sum()
        loss.backward()
        if last:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    (net, opt, x), (twin, other, _) = wide(), wide()
    step = ws.compile(accumulate, fullgraph=True)
    for turn in range(9):
        last = turn % 3 == 2
        assert torch.equal(step(net, opt, x, last), accumulate(twin, other, x, last))
        for mine, eager in zip(net.parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) is (eager.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, eager.grad)


def dies_with_arguments(c: Any, **options: Any) -> list[Any]:
    """A model and its optimizer, given to a step and deleted: they, a weight, its memory and its state."""
    model = nn.Linear(30, 30)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(parts: dict[str, Any], opt: Any, x: Tensor) -> None:
        parts["model"](x).sum().backward()
        opt.step()
        opt.zero_grad()

    compiled = c(step, **options)
    for size in (2, 2, 3):
        compiled({"model": model}, opt, torch.ones(size, 30))
    held = [model, model.weight, model.weight.untyped_storage(), opt, opt.state[model.weight]["momentum_buffer"]]
    seen = [*map(weakref.ref, held)]
    del model, opt, held
    return [compiled, *seen]


def dies_one_after_the_other(c: Any) -> list[Any]:
    seen, compiled = [], c(lambda model, x: model(x).sum())
    for _ in range(3):
        model = nn.Linear(30, 30)
        compiled(model, torch.ones(2, 30))
        seen += [weakref.ref(model), weakref.ref(model.weight)]
        del model
    return [compiled, *seen]


def dies_behind_an_optimizer(c: Any) -> list[Any]:
    """Gradients that a compiled `opt.step()` read, after `zero_grad(set_to_none=True)`."""
    model = nn.Linear(30, 30)
    opt = torch.optim.Adam(model.parameters())
    seen, compiled = [], c(opt.step)
    for _ in range(3):
        model(torch.ones(2, 30)).sum().backward()
        assert model.weight.grad is not None
        seen += [weakref.ref(model.weight.grad), weakref.ref(model.weight.grad.untyped_storage())]
        compiled()
        model.zero_grad()
    return [compiled, model, opt, *seen]


def dies_in_a_variable(c: Any) -> list[Any]:
    """What a step finds in a variable around it, in a list or in an object, until it is dropped there."""
    seen = []
    for drop in range(3):
        model = nn.Linear(30, 30)
        opt: Any = torch.optim.Adam(model.parameters())
        box, holder = [opt], SimpleNamespace(opt=opt)

        def step(x: Tensor, way: int = drop) -> None:
            model(x).sum().backward()  # noqa: B023
            found = opt if way == 0 else box[0] if way == 1 else holder.opt  # noqa: B023
            found.step()
            found.zero_grad()

        compiled = c(step)
        compiled(torch.ones(2, 30))
        compiled(torch.ones(2, 30))
        seen += map(weakref.ref, [opt, *opt.state[model.weight].values()])
        opt = None
        box.clear()
        holder.opt = None
        seen += [compiled]
    return seen


def dies_in_a_state(c: Any) -> list[Any]:
    """An optimizer's state that is cleared, or of which a part is taken out, while the step stays."""
    model = nn.Linear(30, 30)
    seen: list[Any] = []
    for kind in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam):
        opt = kind(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            opt.zero_grad()  # noqa: B023
            model(x).sum().backward()
            opt.step()  # noqa: B023

        compiled = c(step)
        for drop in (lambda state: None, lambda state: state.pop(model.weight), lambda state: state.clear()):
            compiled(torch.ones(2, 30))
            compiled(torch.ones(2, 30))
            before = [(t, weakref.ref(t)) for values in opt.state.values() for t in values.values()]
            drop(opt.state)
            there = {id(t) for values in opt.state.values() for t in values.values()}
            seen += [ref for t, ref in before if id(t) not in there]
            del before
        seen.append(compiled)
    return seen


def dies_where_another_takes_its_place(c: Any) -> list[Any]:
    """A buffer, an attribute and an item that are others from now on, while the step stays."""
    model, holder, items = nn.BatchNorm1d(30), SimpleNamespace(t=torch.ones(3)), [torch.ones(3)]
    compiled = [c(lambda x: model(x).sum()), c(lambda x: x.sum() * holder.t), c(lambda x: x.sum() * items[0])]
    for _ in range(3):
        for step in compiled:
            step(torch.ones(2, 30))
    seen = [weakref.ref(model.running_mean), weakref.ref(holder.t), weakref.ref(items[0])]
    model.running_mean, holder.t, items[0] = torch.zeros(30), torch.zeros(3), torch.zeros(3)
    return [*compiled, *seen]


def dies_in_an_optimizer(c: Any) -> list[Any]:
    """A parameter in the place of which a module and an optimizer have another from now on."""
    model = nn.Linear(30, 2)
    opt = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()

    compiled = c(step)
    for _ in range(3):
        compiled(torch.ones(2, 30))
    seen = weakref.ref(model.weight)
    model.weight = opt.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 30))
    opt.state.clear()
    return [compiled, model, opt, seen]


PROGRAMS = [
    dies_in_an_optimizer, dies_where_another_takes_its_place,
    dies_with_arguments, dies_one_after_the_other, dies_behind_an_optimizer, dies_in_a_variable, dies_in_a_state,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_compiled_step_keeps_nothing_alive_that_it_was_given(program: Callable[..., list[Any]]) -> None:
    whole = functools.partial(ws.compile, fullgraph=True)
    for compile in (lambda fn: fn, whole, functools.partial(whole, dynamic=True)):
        alive = [ref() for ref in program(compile) if type(ref) is weakref.ref]  # no collection in between
        assert alive == [None] * len(alive)


def test_results_of_a_step_whose_python_runs_die_with_their_last_reference() -> None:
    def step(x: Tensor) -> SimpleNamespace:
        print(end="")
        return SimpleNamespace(t=x * 2)

    compiled = ws.compile(step)
    gc.disable()
    try:
        for _ in range(3):
            made = compiled(torch.ones(2))
            seen = weakref.ref(made.t)
            del made
            assert seen() is None
    finally:
        gc.enable()
    assert compiled.breaks


def test_a_step_serves_other_modules_after_one_has_died() -> None:
    compiled, x = ws.compile(lambda model, x: model(x).sum(), fullgraph=True), torch.ones(2, 30)
    for _ in range(3):
        model = nn.Linear(30, 30)
        for _ in range(2):
            assert torch.equal(compiled(model, x), model(x).sum())
        del model
    assert compiled.captures == 1 and compiled.recompiles == []


def test_gradients_that_stay_are_the_same_to_a_compiled_optimizer() -> None:
    one, two = (nn.Linear(3, 3) for _ in range(2))
    two.load_state_dict(one.state_dict())
    steps = []
    for model, c in ((one, lambda fn: fn), (two, functools.partial(ws.compile, fullgraph=True))):
        steps.append(c(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step))
    for call in range(6):
        for model, step in zip((one, two), steps, strict=True):
            model.zero_grad(set_to_none=call == 3)
            model(torch.ones(2, 3)).square().sum().backward()
            step()
        assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert steps[1].captures == 1
