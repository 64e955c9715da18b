"""Results that show memory as elements of another dtype or with other signs: aliases of it, as eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws


def written_through(z: Tensor) -> list[Tensor]:
    w = z * 2
    w.conj().mul_(2j)
    w.conj().imag.add_(3)
    return [w.conj(), w]


class Doubled(torch.autograd.Function):
    """What it gives has a history of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


CASES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "an input's": lambda z: [z.conj(), z.real, z],
    "a value's": lambda z: [(z * 2).conj(), (z * 3).imag],
    "with their base": lambda z: (lambda w: [w, w.real, w.imag, w.conj()])(z * 2),
    "negated": lambda z: [z.conj().imag, (z * 2).conj().imag],
    "parts": lambda z: [(z * 3).mH[1:], z[1:].conj(), torch.view_as_real(z)[..., 0]],
    "complex of real": lambda z: (lambda r: [torch.view_as_complex(r), r])(torch.view_as_real(z) * 2),
    "a part of it": lambda z: [torch.view_as_complex(torch.view_as_real(z * 2)[1:])],
    "detached": lambda z: [z.real.detach(), z.detach().conj()],
    "bits": lambda z: (lambda w: [w.view(torch.float32), w.real.view(torch.int32), w])(z * 2),
    "written through": written_through,
}


def facts(tensors: list[Tensor], given: Tensor) -> list[Any]:
    everything = [*tensors, given]
    return [
        [t.shape, t.dtype, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg(), t._is_view(), t.requires_grad,
         t.is_leaf, t._version, [t._base is u for u in everything],
         [t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr() for u in everything],
         t.detach().resolve_conj().resolve_neg().tolist()]
        for t in everything
    ]  # fmt: skip


def outcome(fn: Callable[[Tensor], list[Tensor]], leaf: bool) -> list[Any]:
    """What is seen of the results, of a write to each of them, and of their gradients."""
    torch.manual_seed(0)
    start = torch.randn(3, 2, dtype=torch.complex64, requires_grad=leaf)
    z = start * 1
    results = fn(z)
    seen = [facts(results, z)]
    for tensor in results:
        if tensor.dtype != torch.int32:
            tensor.mul_(2)
    seen.append(facts(results, z))
    losses = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in results if t.requires_grad]
    if losses:
        (grad,) = torch.autograd.grad([loss.sum() for loss in losses], start, allow_unused=True)
        seen.append(grad.resolve_conj().tolist())
    return seen


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_results_of_another_kind_are_views(name: str, leaf: bool) -> None:
    compiled = ws.compile(CASES[name], fullgraph=True)
    for _ in range(2):
        assert outcome(compiled, leaf) == outcome(CASES[name], leaf)


def test_a_view_of_another_dtype_with_a_history_of_its_own() -> None:
    def step(z: Tensor) -> tuple[Tensor, Tensor]:
        w = z * 2
        return Doubled.apply(w.real), Doubled.apply(w)[1:]  # type: ignore[no-untyped-call]

    found = []
    for run in (step, ws.compile(step, fullgraph=True)):
        z = torch.arange(6.0).add(1j).view(3, 2).requires_grad_()
        real, rows = run(z)
        (real.sum() + rows.abs().sum()).backward()
        assert z.grad is not None
        facts = [(t.tolist(), t.stride(), t.storage_offset(), t._is_view()) for t in (real, rows)]
        found.append([*facts, z.grad.tolist()])
    assert found[0] == found[1]


INPUT_VIEWS = {
    "slice": lambda x: x[:, -5:-1:2], "turned piece": lambda x: x[1:].t()[2:, 0], "expand": lambda x: x[0].expand(3, 6),
    "split": lambda x: x.split(2)[1], "strided": lambda x: x.as_strided((2, 2), (1, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUT_VIEWS)
def test_gradients_inside_reach_an_input_through_a_view_of_it_by_its_own_operator(name):
    def step(whole, view):
        (gradient,) = torch.autograd.grad((view * view).sum(), whole)
        return (view * 2).sum() + whole.square().sum(), gradient

    found, compiled = [], ws.compile(step)
    for function in (step, compiled):
        x = torch.arange(24.0).reshape(4, 6).requires_grad_()
        whole = x * 1
        loss, gradient = function(whole, INPUT_VIEWS[name](whole))
        loss.backward()
        found.append((x.grad, gradient, gradient._is_view(), gradient.stride()))
    (eager, *facts), (ours, *other) = found
    assert torch.equal(eager, ours) and torch.equal(facts[0], other[0]) and facts[1:] == other[1:]
    assert "has a history, and is a view of a tensor that the step can see" in compiled.breaks[0]  # its Python runs
