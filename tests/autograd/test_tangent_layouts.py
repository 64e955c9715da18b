"""Gradients that arrive in any layout, or do not; views among results as eager makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.autograd import aot_function, compiled_backward, min_cut_partition

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda out: (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(),
    "expanded": lambda out: out.sum() * 0.3,
    "one dimension expanded": lambda out: (out.sum(0) * torch.linspace(0, 1, out[0].numel()).view(out[0].shape)).sum(),
    "turned": lambda out: (out.transpose(0, -1).exp() * 0.1).mT.contiguous().pow(2).sum(),
    "gapped": lambda out: torch.view_as_real(torch.complex(out, out * 2)).sin().sum(),
    "channels last": lambda out: (out * torch.linspace(0, 1, out.numel()).view(2, 5, 5, 6).permute(0, 3, 1, 2)).sum(),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5)),
    "batch": lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
    "group": lambda: nn.GroupNorm(3, 6),
    "instance": lambda: nn.InstanceNorm2d(6),
    "reshaped": lambda: nn.Sequential(nn.Flatten(0, 2), nn.Linear(5, 5), nn.Unflatten(0, (2, 6, 5))),
}


def gradients(run: Any, module: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    out = run(x)
    return list(torch.autograd.grad(loss(out), [x, *module.parameters()]))


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_each_layout_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 6, 5, 5, requires_grad=True)
    runs = [aot_function(module, "aten"), aot_function(module, "aten", partition_fn=min_cut_partition)]
    for loss in (*LOSSES.values(), *LOSSES.values()):
        expected = gradients(module, module, x, loss)
        for run in runs:
            found = gradients(run, module, x, loss)
            assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(expected, found, strict=True))
    for run in runs:
        assert run.recompiles == [] and 0 < len(run.backwards) < len(LOSSES)  # type: ignore[attr-defined]
        assert any("0, 0]" in reason for reason in run.backwards)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fn", [
    lambda x: torch.fft.ifft(x, dim=-3), lambda x: torch.fft.fft(x, dim=0).conj(),
    lambda x: torch.fft.fft(x, dim=0).imag, lambda x: torch.view_as_real(torch.fft.fft(x, dim=0)),
    lambda x: torch.view_as_complex(x.exp()[..., :2].clone()),
])  # fmt: skip
def test_results_that_show_their_memory_otherwise_pass_gradients_on_as_eagers(fn: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 6, 7, dtype=torch.float64, generator=generator)
    expected = fn(values)
    coming = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    found = []
    for run in (fn, ws.compile(fn, fullgraph=True)):
        x = values.clone().requires_grad_()
        out = run(x)
        found.append((torch.autograd.grad(out, x, coming)[0], type(out.grad_fn), out.stride()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]


@pytest.mark.parametrize("fn", [
    lambda x: x + 1, lambda x: x.sum(0), lambda x: torch.cat([x, x], 1), lambda x: x.t().contiguous(),
    lambda x: (x + 1, x * 2)[0], lambda x: x.view(2, 3, 6).permute(1, 0, 2) * 2, lambda x: x[1:] + 0,
])  # fmt: skip
def test_gradients_lie_as_eagers_when_they_reach_what_was_before(fn: Any) -> None:
    compiled, x = ws.compile(fn, fullgraph=True), torch.randn(6, 6, requires_grad=True)
    for loss in (torch.sum, lambda out: (out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum()):
        one, two = (torch.autograd.grad(loss(run(x)), x)[0] for run in (fn, compiled))
        assert torch.equal(one, two) and one.stride() == two.stride()
        one, two = (torch.autograd.grad(loss(run(x)), x, create_graph=True)[0] for run in (fn, compiled))
        assert torch.equal(one, two) and one.requires_grad == two.requires_grad


def test_a_gradient_that_does_not_arrive_is_no_zero() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sqrt()

    compiled, x = ws.compile(fn, fullgraph=True), torch.zeros(3, requires_grad=True)
    (found,) = torch.autograd.grad(compiled(x)[0].sum(), x)
    assert torch.equal(found, torch.full((3,), 2.0))  # zeros times the infinite derivative of the other were NaN
    assert compiled.backwards == [
        "gradient of output 0: expected strides [1], found strides [0]; "
        "gradient of output 1: expected strides [1], found none"
    ]


def test_one_graph_is_asked_for_gradients_of_several_layouts() -> None:
    torch.manual_seed(0)
    module, x = nn.LayerNorm(5), torch.randn(4, 3, 5, requires_grad=True)
    compiled: Any = ws.compile(module, fullgraph=True)
    one, two = module(x), compiled(x)
    for weights in (torch.ones(()).expand(4, 3, 5), torch.randn(4, 3, 5), torch.randn(5, 3, 4).permute(2, 1, 0)):
        pairs = [torch.autograd.grad(out, [x, *module.parameters()], weights, retain_graph=True) for out in (one, two)]
        assert all(map(torch.equal, *pairs))
    assert not compiled.recompiles and len(compiled.backwards) == 2


def test_sizes_that_are_symbols_and_captured_backwards() -> None:
    torch.manual_seed(0)
    module = MODULES["layer"]()
    flexible, fixed = ws.compile(module, dynamic=True, fullgraph=True), ws.compile(module, fullgraph=True)
    for run, around in ((flexible, None), (fixed, compiled_backward)):
        for size in (4, 7):
            x, seen = torch.randn(size, 3, 5), []
            for call in (module, run):
                module.zero_grad()
                out = call(x)
                if around is not None and call is run:
                    with around() as captured:
                        out.sum().backward()
                    assert not captured.eager
                else:
                    out.sum().backward()
                seen.append([p.grad.clone() for p in module.parameters()])
            assert all(map(torch.equal, *seen))


def test_many_gradients_at_once_sparse_ones_and_transforms() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * x

    compiled, x = ws.compile(fn, fullgraph=True), torch.randn(3, 3, requires_grad=True)
    rows = torch.eye(9).view(9, 3, 3)
    one, two = (torch.autograd.grad(run(x), x, rows, is_grads_batched=True)[0] for run in (fn, compiled))
    assert torch.equal(one, two)
    one, two = (torch.autograd.grad(run(x), x, torch.eye(3).to_sparse())[0] for run in (fn, compiled))
    assert one.layout is two.layout and torch.equal(one.to_dense(), two.to_dense())
    for transform in (lambda f: torch.func.vmap(f), lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.jacrev):
        assert torch.equal(transform(fn)(x.detach()), transform(compiled)(x.detach()))


def test_a_compiler_of_the_users_is_given_the_layout_that_it_compiled_for() -> None:
    seen: list[list[tuple[int, ...]]] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append([a.stride() for a in args])
            return gm(*args)

        return run

    run, x = aot_function(lambda x: x.exp(), "aten", compiler), torch.randn(3, 4, requires_grad=True)
    for loss in (LOSSES["dense"], LOSSES["expanded"]):
        loss(run(x)).backward()
    assert seen == [[(4, 1), (4, 1)]] * 2 and run.backwards == []  # type: ignore[attr-defined]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda y: y.split(2),
    "unbind": lambda y: y.unbind(1),
    "chunk": lambda y: y.chunk(2, 1),
    "split, then written": lambda y: (y.split(2), y.mul_(3))[0],
    "written, then split": lambda y: y.mul_(3).split(2),
    "of one of several": lambda y: tuple(part.t() for part in y.split(2)),
    "chain": lambda y: (y.view(6, 4).t(), y[1:, ::2].unsqueeze(0), y[:]),
    "outdated": lambda y: (v := y.view(-1), v.view(3, 8), y.mul_(2), v.view(2, 12))[:2],
    "without gradients": lambda y: tuple(torch.no_grad()(y.split)(2)),
}


@pytest.mark.parametrize("inside", [True, False], ids=["of a result", "of an input"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_known_by_eagers_operators(name: str, inside: bool) -> None:
    def fn(x: Tensor) -> Any:
        return VIEWS[name](x * 2 if inside else x)

    compiled, x = ws.compile(fn, fullgraph=True), torch.randn(4, 6, requires_grad=True)
    for place in (0, 1):
        seen = []
        for run in (fn, compiled):
            torch.manual_seed(0)
            view = run(x if inside else x * 1)[place]
            seen.append([_or_error(functools.partial(_name, view)), _or_error(lambda view=view: view.mul_(2).shape)])
        assert seen[0] == seen[1]


def _name(view: Tensor) -> str:
    return type(view.grad_fn).__name__


def _or_error(act: Callable[[], Any]) -> str:
    try:
        return str(act())
    except RuntimeError as error:
        return str(error)


class TiedTable(nn.Module):
    """Its table is read by rows and as a whole: one gradient is sparse, the sum is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) @ self.table.weight.t()


@pytest.mark.parametrize("make", [
    lambda: nn.Embedding(10, 4, sparse=True),
    lambda: nn.EmbeddingBag(10, 4, sparse=True, mode="sum"),
    lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1)),
    TiedTable,
])  # fmt: skip
@pytest.mark.parametrize("accumulate", [False, True])
def test_sparse_gradients_of_a_compiled_module(make: Callable[[], nn.Module], accumulate: bool) -> None:
    found = []
    for c in (lambda module: module, functools.partial(ws.compile, fullgraph=True)):
        torch.manual_seed(0)
        model, seen = make(), list[Any]()
        opt, call = torch.optim.SGD(model.parameters(), 0.1), c(model)
        for _ in range(3):
            call(torch.tensor([[1, 2, 1], [3, 1, 9]])).square().sum().backward()
            for p in model.parameters():
                assert p.grad is not None
                rows = (p.grad._nnz(), p.grad.is_coalesced()) if p.grad.is_sparse else None
                seen += [p.grad.layout, rows, p.grad.to_dense().tolist()]
            if not accumulate:
                opt.step()
                opt.zero_grad()
        found.append(seen)
    assert found[0] == found[1]
