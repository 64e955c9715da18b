"""Compiled backward against eager: the same values, bit for bit, from programs that were captured once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep.autograd import CompiledBackward, compiled_backward
from wholestep.errors import UnsupportedError
from wholestep.lower.fusion import chains
from wholestep.testing import CompileCounter


def compare(make: Callable[[], Any], run: Callable[[Any, int], Any], times: int = 4) -> CompiledBackward:
    """Runs a function several times on equal beginnings, eagerly and with compiled backwards."""
    results = []
    compiled = compiled_backward(CompileCounter())
    for function in (run, compiled(run)):
        torch.manual_seed(0)
        made = make()
        results.append([pytree.tree_map_only(torch.Tensor, _copy, function(made, i)) for i in range(times)])
    for eager, ours in zip(*map(pytree.tree_leaves, results), strict=True):
        if isinstance(eager, torch.Tensor):
            assert torch.equal(eager, ours) and eager.stride() == ours.stride()
        else:
            assert eager == ours
    return compiled


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def test_two_programs_serve_gradients_that_are_unset_and_set():
    def run(model, i):
        model(torch.randn(3, 4)).sum().backward()
        return [p.grad for p in model.parameters()]

    make = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))  # noqa: E731
    compiled = compare(make, run)
    assert compiled.captures == 2 and compiled.eager == {}


def test_a_program_is_kept_between_contexts_of_one_backend():
    backend = CompileCounter()
    x = torch.randn(3, requires_grad=True)
    for _ in range(4):
        with compiled_backward(backend):
            x.sin().sum().backward()
    assert backend.frame_count == 2


def test_numbers_saved_by_a_node_are_constants_of_the_program():
    def run(x, i):
        (x * (0.5 + i % 2)).sum().backward()
        return x.grad

    compiled = compare(lambda: torch.randn(3, requires_grad=True), run)
    assert compiled.captures == 3


def test_leaf_hooks_and_hooks_after_accumulation():
    def make():
        model = nn.Linear(3, 3)
        model.weight.register_hook(lambda g: g * 3)

        def after(parameter):
            parameter.grad.mul_(2)
            model.seen = parameter.grad.sum()

        model.bias.register_post_accumulate_grad_hook(after)
        return model

    def run(model, i):
        model(torch.randn(2, 3)).pow(2).sum().backward()
        if i == 2:
            model.zero_grad()
        return [p.grad for p in model.parameters()], model.seen, model.weight.grad is not None

    assert compare(make, run).eager == {}


def test_a_graph_is_freed_unless_it_is_retained():
    def run(model, i):
        loss = model(torch.randn(2, 3)).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
        return model.weight.grad, model.weight.grad._version, model.bias.grad._version

    compare(lambda: nn.Linear(3, 2), run)


def test_functions_keep_tensors_and_numbers_for_their_backward():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            y = x * factor
            ctx.save_for_backward(x, y)
            ctx.factor, ctx.exponential = factor, x.exp()
            return y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * ctx.factor + x * y + ctx.exponential, None

    def run(x, i):
        Scale.apply(Scale.apply(x, 2.0 if i < 3 else 3.0).sin(), 4.0).sum().backward()
        return x.grad

    compiled = compare(lambda: torch.randn(3, requires_grad=True), run)
    assert compiled.recompiles == ["L['hooks'][1].factor: expected 2.0, found 3.0"]


def test_gradients_of_chosen_inputs():
    def run(x, i):
        y = x.sin()
        z = (y * y).sum()
        found = torch.autograd.grad(z, [x, y], retain_graph=True)
        unused = torch.autograd.grad(z, [torch.zeros(2, requires_grad=True)], retain_graph=True, allow_unused=True)
        z.backward(inputs=[x])
        return found, unused, [g.requires_grad for g in found], x.grad

    assert compare(lambda: torch.randn(3, requires_grad=True), run).eager == {}


def test_in_place_writes_of_the_forward():
    def run(x, i):
        y = x * 2
        y[1:3].mul_(3)
        y[0] = 5
        y.view(-1)[2:4].add_(1)
        y.relu_().sum().backward()
        return x.grad

    assert compare(lambda: torch.randn(4, 3, requires_grad=True), run).eager == {}


def test_hooks_that_pack_saved_tensors():
    def run(x, i):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = x.sin().exp()
        y.sum().backward()
        return x.grad

    compiled = compare(lambda: torch.randn(3, requires_grad=True), run)
    assert compiled.captures == 2 and compiled.eager == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_dropout(reentrant):
    def run(made, i):
        model, x = made
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        return x.grad, model[0].weight.grad

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3))
        return model, torch.randn(2, 3, requires_grad=True)

    assert compare(make, run).eager == {}


def test_each_shape_has_a_program():
    def run(model, i):
        model(torch.randn(2 + i % 2, 3)).log_softmax(-1).sum().backward()
        return model.weight.grad

    assert compare(lambda: nn.Linear(3, 2), run, 6).eager == {}


def test_what_cannot_be_captured_is_left_to_eager_with_a_reason():
    def run(x, i):
        y = x.sin()
        y.retain_grad()
        z = x.clone()
        z.register_hook(lambda g: torch.from_numpy(g.numpy() * 2))
        (y * 3).sum().backward()
        z.sum().backward()
        return x.grad, y.grad

    compiled = compare(lambda: torch.randn(3, requires_grad=True), run)
    assert compiled.captures == 0
    first, second = compiled.eager
    assert "retain_grad()" in first and "test_compiled_backward.py" in second and compiled.eager[first] == 4


def test_an_error_in_a_hook_is_the_users():
    x = torch.randn(3, requires_grad=True)
    y = x * 2

    def refuse(grad):
        raise KeyError("mine")

    y.register_hook(refuse)
    with pytest.raises(KeyError, match="mine"), compiled_backward():
        y.sum().backward()
    assert x.grad is None


def test_second_derivatives_are_refused():
    x = torch.randn(3, requires_grad=True)
    with compiled_backward(), pytest.raises(UnsupportedError, match=r"create_graph=True[^$]*test_compiled_backward.py"):
        torch.autograd.grad(x.sin().sum(), x, create_graph=True)


def test_nested_backward_inside_of_a_hook():
    def run(made, i):
        x, w = made
        y = x * 2

        def hook(grad):
            with torch.enable_grad():
                v = w.detach().requires_grad_()
                (extra,) = torch.autograd.grad((v * v).sum(), v)
            return grad + extra

        y.register_hook(hook)
        y.sum().backward()
        return x.grad

    make = lambda: (torch.randn(3, requires_grad=True), torch.randn(3))  # noqa: E731
    assert compare(make, run).eager == {}


def test_threads_capture_their_own_backwards_and_leave_others_alone():
    ready, done = threading.Barrier(3), threading.Barrier(3)
    failures: list[str] = []

    def work(capturing: bool, seed: int) -> None:
        x = torch.full((8,), float(seed), requires_grad=True)
        context = compiled_backward() if capturing else nullcontext()
        try:
            ready.wait()
            with context:
                for _ in range(100):
                    x.grad = None
                    (x * x.detach()).sum().backward()
                    if not torch.equal(x.grad, x.detach()):
                        failures.append(f"{seed}: {x.grad}")
            done.wait()
        except Exception as error:
            failures.append(f"{seed}: {error!r}")
            done.abort()

    threads = [threading.Thread(target=work, args=(seed < 3, seed)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert torch.autograd.backward.__globals__["_engine_run_backward"].__module__ == "torch.autograd.graph"


def test_ever_new_shapes_are_left_to_eager_in_the_end(monkeypatch):
    monkeypatch.setattr(sys.modules[CompiledBackward.__module__], "MAX_STRUCTURES", 3)

    def run(model, i):
        model.zero_grad()
        model(torch.randn(2 + i, 3)).sum().backward()
        return model.weight.grad

    compiled = compare(lambda: nn.Linear(3, 2), run, 6)
    assert compiled.captures == 3
    assert compiled.eager == {"3 structures and shapes were captured, and this is another": 3}


ALIVE: list[Callable[[], bool]] = []
COUNTED: list[int] = []


@torch.library.custom_op("wholestep_tests::count_alive", mutates_args=())
def count_alive(x: torch.Tensor) -> torch.Tensor:
    COUNTED.append(sum(is_alive() for is_alive in ALIVE))
    return x.clone()


count_alive.register_fake(torch.empty_like)


class CountsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return count_alive(grad)


def test_what_the_forward_saved_is_freed_as_the_backward_goes():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: _watch(out))

    def step() -> list[int]:
        ALIVE.clear()
        COUNTED.clear()
        model[3:](CountsInBackward.apply(model[:3](torch.randn(4, 8)))).sum().backward()
        return list(COUNTED)

    eager, compiled = step(), compiled_backward()
    with compiled:
        counts = [step() for _ in range(3)]
    assert eager == [3] and counts[1:] == [[3], [3]] and compiled.eager == {}


def _watch(out: torch.Tensor) -> None:
    storage = StorageWeakRef(out.untyped_storage())
    ALIVE.append(lambda: not storage.expired())


def test_a_backward_that_is_lowered_while_another_is_captured_tries_its_kernels() -> None:
    """Lowering is no part of the step: trials of kernels draw from generators of their own."""
    chains._FOUND.clear()
    step = ws.compile(lambda x: x.sin().cos(), fullgraph=True)
    with compiled_backward(CompileCounter()) as context:
        x = torch.ones(2, 3, requires_grad=True)
        step(x).sum().backward()  # its gradient repeats one number, which is another layout than the first one's
    assert context.eager == {} and context.captures == 1
    assert torch.equal(x.grad, -x.detach().sin().sin() * x.detach().cos())


def test_a_hook_on_a_saved_parameter_counts_in_an_object_of_its_own() -> None:
    """Which the call reaches by way of the parameter alone."""
    class Shapes:
        def __init__(self) -> None:
            self.seen: list[torch.Size] = []

        def hook(self, parameter: torch.Tensor) -> None:
            self.seen.append(parameter.shape)

    shapes, model, context = Shapes(), nn.Linear(4, 4), compiled_backward()
    model.weight.register_post_accumulate_grad_hook(shapes.hook)
    for _ in range(3):
        with context:
            model(torch.randn(2, 4)).square().sum().backward()
    assert shapes.seen == [model.weight.shape] * 3 and context.eager == {}
