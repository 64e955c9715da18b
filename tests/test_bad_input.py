"""What bad input gets: a clear error that names the user's line, and a world left as it was.

Each refused step marks its offending line with a comment; the error must name exactly that line.
"""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from equal import Make, World, assert_refused, assert_same_failure, assert_same_or_refused, assert_same_run
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.models import labelled
from zoo.nets import MLP

import wholestep as ws
from wholestep.errors import CaptureError, DataDependentError, LeakError, UnsupportedError

KEPT: list[Any] = []


@torch.library.custom_op("zoo::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    """An operator without a fake rule."""
    return x * 2


def marked_line(function: Callable[..., Any]) -> str:
    """``file.py:line`` of the line marked HERE in a function's source."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if "# HERE" in line]
    return f"test_bad_input.py:{first + offset}"


def training(forward: Callable[[MLP, Tensor, Tensor], Tensor]) -> Make:
    """A world whose step trains an MLP with dropout and Adam, with ``forward(model, x, y)`` for its loss."""

    def make(seed: int) -> World:
        model = MLP(dropout=0.2)
        opt = torch.optim.Adam(model.parameters())
        model.fc1.weight.register_hook(lambda grad: grad * 2)
        x, y = labelled(1)[0]
        (model(x, y) * 2).backward()
        opt.step()

        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            (model(x, y) * 0.5).backward()
            model.fc2.bias.grad.mul_(2)
            loss = forward(model, x, y)
            loss.backward()
            opt.step()
            return loss

        return World(step, [(x, y)], {"model": model, "opt": opt})

    return make


def item_in_a_condition(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    if loss.item() > 0:  # HERE
        loss = loss * 2
    return loss


def tensor_in_a_condition(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    if loss > 0:  # HERE
        loss = loss * 2
    return loss


def nan_check(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    assert not torch.isnan(loss)  # HERE
    return loss


def allclose(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    return loss * 2 if torch.allclose(model.fc1(x), torch.zeros(())) else loss  # HERE


def equal(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    return loss * 2 if torch.equal(model.fc1(x), x) else loss  # HERE


def printed(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    print(loss)  # HERE
    return loss


def formatted(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    model.fc1.name = f"{loss:.3f}"  # HERE
    return loss


def formatted_number(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    model.fc1.name = f"{loss.item():.3f}"  # HERE
    return loss


def as_list(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits.sum() * len(logits.tolist())  # HERE


def as_numpy(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits.sum() * float(logits.detach().numpy().sum())  # HERE


def as_range(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    for _ in range(int(y.max() + 1)):  # HERE
        loss = loss + 1
    return loss


def as_shape(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) + torch.zeros(int(y.max()) + 1).sum()  # HERE


def as_index(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) + [1.0, 2.0, 3.0, 4.0][y[0]]  # HERE


def boolean_mask(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits[logits > 0].sum()  # HERE


def nonzero(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    return logits.sum() + (y > 1).nonzero().shape[0]  # HERE


def unique(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) + torch.unique(y).float().mean()  # HERE


DATA_DEPENDENT = (
    item_in_a_condition,
    tensor_in_a_condition,
    nan_check,
    allclose,
    equal,
    printed,
    formatted,
    formatted_number,
    as_list,
    as_numpy,
    as_range,
    as_shape,
    as_index,
    boolean_mask,
    nonzero,
    unique,
)


@pytest.mark.parametrize("forward", DATA_DEPENDENT, ids=lambda f: f.__name__)
def test_data_dependent(forward: Callable[..., Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    error = assert_refused(training(forward), DataDependentError)
    assert marked_line(forward) in str(error)
    assert "to do" in str(error)
    assert capsys.readouterr().out == ""


def operator_without_fake_rule(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(no_fake(x), y)  # HERE


def test_operator_without_fake_rule() -> None:
    error = assert_refused(training(operator_without_fake_rule), UnsupportedError)
    assert marked_line(operator_without_fake_rule) in str(error)
    assert "no_fake" in str(error)


def kept_in_a_global_list(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    KEPT.append(loss.detach())  # HERE
    return loss


def test_result_kept_elsewhere() -> None:
    KEPT.clear()
    try:
        error = assert_refused(training(kept_in_a_global_list), LeakError)
    finally:
        KEPT.clear()
    assert "test_bad_input.py" in str(error)


def kept_number(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    KEPT.append(loss.item())  # HERE
    return loss


def test_number_kept_elsewhere() -> None:
    KEPT.clear()
    try:
        error = assert_refused(training(kept_number), LeakError)
    finally:
        KEPT.clear()
    assert "test_bad_input.py" in str(error)


def lbfgs(seed: int) -> World:
    model = MLP()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = model(x, y)
            loss.backward()
            return loss

        return opt.step(closure)  # HERE

    return World(step, labelled(1), {"model": model, "opt": opt})


def test_lbfgs() -> None:
    error = assert_refused(lbfgs, UnsupportedError)
    assert "LBFGS" in str(error)
    assert marked_line(lbfgs) in str(error)


def test_optimizer_over_foreign_parameters() -> None:
    """Parameters that no model of the step uses: they are updated or left exactly as eager does."""

    def make(seed: int) -> World:
        model, other = MLP(), MLP()
        free = nn.Parameter(torch.ones(3))
        opt = torch.optim.Adam([*model.parameters(), *other.parameters(), free])

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y) + free.pow(2).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, labelled(), {"model": model, "other": other, "free": free, "opt": opt})

    assert_same_run(make)


def test_model_on_two_devices() -> None:
    def make(seed: int) -> World:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).sum()
            loss.backward()
            opt.step()
            return loss

        return World(step, [(torch.randn(2, 3),)], {"model": model, "opt": opt})

    error = assert_refused(make, UnsupportedError)
    assert "meta" in str(error)
    assert "cpu" in str(error)
    assert "test_bad_input.py" in str(error)


def on_a_thread(function: Callable[[], Any]) -> Any:
    """Result of a function run on a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    (result,) = results
    return result


def test_calls_on_other_threads() -> None:
    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled = ws.compile(step)
        return lambda *args: on_a_thread(lambda: compiled(*args))

    assert_same_run(training(lambda model, x, y: model(x, y)), compile=compile)


def test_capture_here_and_calls_there() -> None:
    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled, calls = ws.compile(step), []

        def alternate(*args: Any) -> Any:
            calls.append(0)
            return compiled(*args) if len(calls) % 2 else on_a_thread(lambda: compiled(*args))

        return alternate

    assert_same_run(training(lambda model, x, y: model(x, y)), compile=compile)


class UserError(Exception):
    """Raised by the user's own code."""


class FailsBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise UserError


def raising(*_: Any) -> Any:
    raise UserError


def fails_in_forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    raise UserError


def fails_in_a_tensor_hook(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x)
    logits.register_hook(raising)
    return F.cross_entropy(logits, y)


def fails_in_backward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(FailsBackward.apply(model.logits(x)), y)


def wrong_shapes(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return (model.fc1(x) @ model.fc2.weight).sum()


def leaf_written(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    model.fc1.weight.add_(1)
    return model(x, y)


def saved_value_overwritten(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    hidden = model.fc1(x).exp()
    loss = hidden.sum()
    hidden.mul_(2)
    return loss


def backward_twice(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x, y)
    loss.backward()
    return loss


def no_gradient(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y).detach()


FAILING = (
    fails_in_forward,
    fails_in_a_tensor_hook,
    fails_in_backward,
    wrong_shapes,
    leaf_written,
    saved_value_overwritten,
    backward_twice,
    no_gradient,
)


@pytest.mark.parametrize("forward", FAILING, ids=lambda f: f.__name__)
def test_exceptions_are_eagers_own_and_change_nothing(forward: Callable[..., Tensor]) -> None:
    assert_same_failure(training(forward))


def test_exception_in_a_permanent_hook_and_in_an_optimizer_hook() -> None:
    def with_parameter_hook(seed: int) -> World:
        world = training(lambda model, x, y: model(x, y))(seed)
        world.watch["model"].fc1.bias.register_post_accumulate_grad_hook(raising)
        return world

    def with_optimizer_hook(seed: int) -> World:
        world = training(lambda model, x, y: model(x, y))(seed)
        world.watch["opt"].register_step_post_hook(raising)
        return world

    assert_same_failure(with_parameter_hook)
    assert_same_failure(with_optimizer_hook)


def test_exception_on_a_later_call() -> None:
    """Two good calls, then a flag makes the user's code raise."""

    def make(seed: int) -> World:
        def forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y)
            if x.shape[0] == 3:
                raise UserError
            return loss

        world = training(forward)(seed)
        x, y = world.args[0]
        return World(world.step, [(x, y), (x, y), (x[:3], y[:3])], world.watch)

    assert_same_failure(make, calls_before=2)


def test_interrupt_changes_nothing_and_the_step_serves_afterwards() -> None:
    def make(seed: int) -> World:
        trouble = [KeyboardInterrupt, UserError]

        def forward(model: MLP, x: Tensor, y: Tensor) -> Tensor:
            loss = model(x, y)
            if model.trouble:
                raise trouble[len(model.trouble) - 1]
            return loss

        world = training(forward)(seed)
        world.watch["model"].trouble = ""
        return world

    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled, calls = ws.compile(step), []
        model = inspect.getclosurevars(step).nonlocals["model"]

        def troubled(*args: Any) -> Any:
            calls.append(0)
            for trouble, error in (("x", KeyboardInterrupt), ("xx", UserError)):
                model.trouble = trouble if len(calls) in (1, 3) else ""
                if model.trouble:
                    with pytest.raises(error):
                        compiled(*args)
            model.trouble = ""
            return compiled(*args)

        return troubled

    def forgiving(seed: int) -> World:
        world = make(seed)
        world.changing = True
        return world

    assert_same_run(forgiving, compile=compile)


def test_a_refused_step_leaves_an_eager_world_that_trains_on() -> None:
    """After the refusal, the same objects train eagerly as if nothing had been."""

    def make(seed: int) -> World:
        return training(item_in_a_condition)(seed)

    def compile(step: Callable[..., Any]) -> Callable[..., Any]:
        def fallback(*args: Any) -> Any:
            rng = torch.get_rng_state()
            with pytest.raises(DataDependentError):
                ws.compile(step)(*args)
            assert torch.equal(rng, torch.get_rng_state())
            return step(*args)

        return fallback

    assert_same_run(make, compile=compile)


CHANGES: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], str, str]] = {
    "shape": (lambda x, y: (x[:3].clone(), y[:3].clone()), "x", "shape"),
    "dtype": (lambda x, y: (x, y.int()), "y", "dtype"),
    "requires_grad": (lambda x, y: (x.clone().requires_grad_(), y), "x", "requires_grad"),
    "stride": (lambda x, y: (x.t().contiguous().t(), y), "x", "stride"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_arguments_recompile_and_say_why(change: str) -> None:
    alter, source, word = CHANGES[change]

    def make(seed: int) -> World:
        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, y + 1

        x, y = torch.randn(5, 6), torch.arange(5)
        return World(step, [(x, y), (x, y), alter(x, y), (x, y), alter(x, y)])

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


def generator_as_argument(seed: int) -> World:
    generator = torch.Generator().manual_seed(3)

    def step(x: Tensor) -> Tensor:
        return x + torch.randn(3, generator=generator)

    return World(step, [(torch.ones(3),)])


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
    generator_as_argument,
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


def test_time_is_not_baked_in() -> None:
    def step(x: Tensor) -> Tensor:
        return x + time.perf_counter()

    compiled = ws.compile(step)
    x = torch.zeros(1, dtype=torch.float64)
    try:
        first = compiled(x)
    except CaptureError:
        return
    time.sleep(0.01)
    assert compiled(x) > first


def test_mistakes_in_calling_compile() -> None:
    with pytest.raises(TypeError, match="callable"):
        ws.compile(3)
    with pytest.raises(ValueError, match="backend"):
        ws.compile(lambda x: x, backend="nonsense")(torch.ones(1))
    with pytest.raises(TypeError, match="argument"):
        ws.compile(lambda x: x)(torch.ones(1), torch.ones(1))
