"""`dynamic=True`: one capture for many sizes, with eager's results bit for bit at each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.sized_models import convnet, gpt, mlp, own_loss, pictures, rows, same, tokens, train
from wholestep.autograd import aot_function, min_cut_partition
from wholestep.capture_call import capture
from wholestep.errors import CaptureError
from wholestep.ir import StepGraph
from wholestep.runtime.program_cache import MAX_SIZES
from wholestep.trace.numbers.dynamic_shapes import Templates

F = nn.functional


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss with sizes in Python's arithmetic."""
    return (model(x) - y).square().sum() / (x.shape[0] * len(y[0])) * (1 / x.shape[0])


@pytest.mark.parametrize(
    ("make", "batch", "loss_of"),
    [(mlp, rows, mean), (convnet, pictures, mean), (gpt, lambda size: tokens(2, size), own_loss)],
    ids=["mlp", "convnet", "gpt"],
)
def test_whole_steps_of_varying_sizes(make: Any, batch: Any, loss_of: Any) -> None:
    torch.manual_seed(0)
    models = [make(), make()]
    models[1].load_state_dict(models[0].state_dict())
    batches = [batch(size) for size in (6, 4, 6, 12, 3, 4)]
    _, expected = train(models[0], batches, loss_of, None)
    step, found = train(models[1], batches, loss_of, {"dynamic": True})
    assert same(expected, found)
    if make is not gpt or torch.__version__ >= "2.13":  # before, torch's matmul asks in C++ for the numbers
        assert step.recompiles == []


def test_a_trace_at_other_sizes_is_the_capture_of_those_sizes() -> None:
    model = convnet()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    templates = Templates(capture)
    look = ws.pipeline.Snapshot
    for size in (6, 4, 9):
        batch = pictures(size)
        _, made = templates(step, batch, {}, frozenset(), False, False, look)
        _, captured = capture(step, batch, {}, differentiable=False)
        assert made.fingerprint == captured.fingerprint
        assert (made.aliases, made.versions) == (captured.aliases, captured.versions)
    assert templates.captures == 1


@pytest.mark.parametrize("compile", [lambda m: ws.compile(m, dynamic=True, fullgraph=True),
                                     lambda m: aot_function(m, "aten", partition_fn=min_cut_partition, dynamic=True)])
def test_a_module_inside_of_ordinary_autograd(compile: Any) -> None:
    torch.manual_seed(0)
    model = mlp(dropout=0.0)
    compiled = compile(model)
    for size in (6, 3, 6, 5):
        inputs = [torch.randn(size, 8, requires_grad=True) for _ in range(2)]
        inputs[1] = inputs[0].detach().clone().requires_grad_()
        found = []
        for run, x in zip((model, compiled), inputs, strict=True):
            loss = run(x).sin().sum()
            found.append([loss, *torch.autograd.grad(loss, [x, *model.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert compiled.recompiles == []


def test_sizes_in_arithmetic_and_results() -> None:
    def fn(batch: dict[str, Any]) -> Any:
        x, (y,) = batch["x"], batch["rest"]
        n = x.shape[0]
        scaled = x * math.sqrt(n) + y[: n // 2].sum() * (1.0 / n) - n**0.5
        return scaled, n, x.numel() * 2, [torch.full((n,), 1 / (n + 1)), x.new_zeros(2 * n, 3)], x[-1], x.flatten()

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for size in (6, 5, 9):
        batch = {"x": torch.randn(size, 3), "rest": [torch.randn(size)]}
        expected, found = fn(batch), compiled(batch)
        assert found[1:3] == expected[1:3]
        for a, b in zip((expected[0], *expected[3], *expected[4:]), (found[0], *found[3], *found[4:]), strict=True):
            assert torch.equal(a, b)
        assert found[4]._base is batch["x"]
    assert compiled.recompiles == [] and compiled.captures == 1


def test_batches_that_are_views_of_the_data() -> None:
    data = torch.randn(20, 4)

    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x.t() @ x

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for start, stop in ((0, 5), (3, 12), (2, 4)):
        copy = data.clone()
        expected = fn(copy[start:stop])
        assert torch.equal(compiled(data[start:stop]), expected) and torch.equal(data, copy)
    assert compiled.recompiles == []


def test_a_branch_on_a_size_is_a_guard() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 8 else x + 1

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for size in (4, 6, 10, 20, 3):
        x = torch.randn(size, 2)
        assert torch.equal(compiled(x), fn(x))
    assert compiled._capturer.known.templates.captures == 2
    (reason,) = compiled.recompiles
    assert reason.startswith("L['x'].shape[0] <= 8: expected True, found False, as L['x'].shape[0] is 10 (decided at")
    assert "test_dynamic_shapes.py" in reason


def test_a_size_that_only_one_value_serves_is_named() -> None:
    def fn(x: Tensor) -> Tensor:
        return sum((x[i] for i in range(x.shape[0])), torch.zeros(2))

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    assert all(torch.equal(compiled(x), fn(x)) for x in (torch.randn(3, 2), torch.randn(3, 2), torch.randn(4, 2)))
    assert compiled.specialized[0].startswith("L['x'].shape[0] is 3 (decided at") and len(compiled.recompiles) == 1
    assert "L['x'].shape[0] == 3: expected True, found False, as L['x'].shape[0] is 4" in compiled.recompiles[0]


def test_two_sizes_that_must_be_equal() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for shapes in ((4, 4), (6, 6), (6, 1), (1, 1), (5, 5)):
        x, y = torch.randn(shapes[0], 2), torch.randn(shapes[1], 2)
        assert torch.equal(compiled(x, y), fn(x, y))
    with pytest.raises(RuntimeError, match="must match the size"):
        compiled(torch.randn(4, 2), torch.randn(3, 2))
    assert torch.equal(compiled(x, y), fn(x, y))
    assert compiled.recompiles[0] == "L['y'].shape[0]: expected 2 or more, found 1"


def test_what_has_no_symbols_is_captured_for_each_size() -> None:
    def fn(x: Tensor) -> Tensor:
        sizes = {x.shape: 2.0}
        return x * sizes[x.shape]

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for size in (4, 6, 4):
        x = torch.randn(size, 2)
        assert torch.equal(compiled(x), fn(x))
    assert compiled.specialized and all(s.startswith("all sizes, as symbols ended in") for s in compiled.specialized)
    assert len(compiled.recompiles) == 1


def test_what_torch_gives_no_symbols_is_named() -> None:
    lstm = nn.LSTM(4, 5)

    def fn(x: Tensor) -> Tensor:
        return lstm(x)[0]

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for size in (3, 4):
        x = torch.randn(2, size, 4)
        assert torch.equal(compiled(x), fn(x))
    (reason,) = compiled.specialized
    assert "UnsupportedError: torch's own lstm asks for sizes as plain numbers" in reason and __file__ in reason


def unchanged(step: StepGraph) -> StepGraph:
    """A pass of the user's own, which is given plain numbers: each size has a program of its own."""
    return step


def use_backward(x: Tensor) -> Tensor:
    (x * x).sum().backward()
    return x * 2


def use_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 3)
    return x * 2


def use_attribute(x: Tensor) -> Tensor:
    x.note = "seen"  # type: ignore[attr-defined]
    return x * 2


def use_flag(x: Tensor) -> Tensor:
    x.requires_grad_()
    return x * 2


@pytest.mark.parametrize("fn", [use_backward, use_hook, use_attribute, use_flag])
def test_what_happens_to_the_tensor_itself_is_as_in_eager(fn: Any) -> None:
    def run(call: Any, size: int) -> list[Any]:
        x = torch.arange(float(size)).requires_grad_(fn is not use_flag)
        try:
            result = call(x)
            result.sum().backward()
        except ws.errors.WholestepError as error:
            return [type(error)]
        except RuntimeError as error:
            return [str(error)[:40], x.grad]
        return [result.detach(), x.grad, getattr(x, "note", None), x.requires_grad]

    def same(one: list[Any], two: list[Any]) -> bool:
        pairs = zip(one, two, strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)

    ways = [ws.compile(fn, dynamic=dynamic, fullgraph=True) for dynamic in (False, None, True)]
    for size in (4, 6):
        static, *others = (run(way, size) for way in ways)
        assert all(same(static, other) for other in others)


def test_many_sizes_leave_a_bounded_number_of_programs() -> None:
    compiled = ws.compile(lambda x: x * 2, dynamic=True, fullgraph=True, passes=[unchanged])
    for size in range(2, 80):
        compiled(torch.ones(size))
    assert compiled.captures == MAX_SIZES == len(compiled._capturer.known.programs) and compiled.recompiles == []


def test_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="dynamic=True is for one process"):
        ws.compile(lambda x: x, mesh=ws.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), dynamic=True)


def test_a_module_that_meets_ever_new_sizes_is_told_of_it() -> None:
    static, dynamic = (ws.compile(mlp(dropout=0.0), dynamic=way, fullgraph=True) for way in (False, True))
    with pytest.raises(CaptureError, match="captured 32 times in .* calls; .*shape: expected") as error:
        for size in range(2, 80):
            static(torch.ones(size, 8))
    assert static.captures == 32 and "dynamic=None" in str(error.value)  # type: ignore[comparison-overlap]
    for size in range(2, 40):
        dynamic(torch.ones(size, 8))
    assert dynamic.recompiles == [] and "shape[1] is 8" in dynamic.specialized[0]  # type: ignore[comparison-overlap]


def test_distributions_check_what_they_are_given_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # off once Dynamo was imported

    def fn(x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, x.exp()).log_prob(x + 1).sum(1)

    compiled = ws.compile(fn, dynamic=True, fullgraph=True)
    for size in (4, 6):
        x = torch.randn(size, 3)
        assert torch.equal(compiled(x), fn(x))
    assert compiled.captures == 1 and not compiled.specialized
    with pytest.raises(ValueError, match="within its constraint"):
        compiled(torch.full((5, 3), torch.nan))


@pytest.mark.parametrize("fn", [
    lambda x: x ** (x.size(0) / 2), lambda x: x * float(f"{x.size(0) * 1.0}"), lambda x: x.norm(x.size(0) * 1.0),
    lambda x: x * int(x.size(0) * 0.5),
], ids=["power", "text", "norm", "integer"])  # fmt: skip
def test_numbers_of_sizes_that_python_or_a_backward_needs_are_those_of_each_call(fn: Any) -> None:
    compiled = ws.compile(fn, dynamic=True)
    for size in (3, 4, 5, 4):
        ends = []
        for form in (fn, compiled):
            leaf = torch.linspace(0.5, 1.5, size).requires_grad_()
            y = form(leaf)
            y.sum().backward()
            ends.append((y.detach(), leaf.grad))
        assert all(map(torch.equal, *ends))


def test_sizes_and_numbers_from_tensors_in_one_expression() -> None:
    def step(w: Tensor, x: Tensor, n: Tensor) -> Any:
        k, size = int(w.shape[0]) + n.item(), x.shape[1]
        scale = (size - k) + (size + k) * (k - size) + size * k + size % k + k % size + size // k + k // size
        loss = (w * x).sum() * scale
        loss.backward()
        gradient, w.grad = w.grad, None
        return loss, gradient, torch.tensor(size - k)

    compiled, w = ws.compile(step, dynamic=True), torch.ones(1, requires_grad=True)
    for rows_, size, n in ((3, 4, 2), (5, 4, 3), (6, 7, 3), (4, 12, 7)):
        args = w, torch.ones(rows_, size), torch.tensor(n)
        assert all(map(torch.equal, step(*args), compiled(*args)))
    assert compiled.captures == 1 and not compiled.specialized and not compiled.breaks
