"""Inputs with a history of their own, which leads to tensors that the compiled function differentiates too."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import LeakError, UnsupportedError

Compile = Callable[[Any], Any]


def leaf() -> Tensor:
    return torch.linspace(0.1, 1.3, 9).clone().view(3, 3).requires_grad_()


def seeded(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    return module


def gradients(module: nn.Module, *more: Tensor) -> list[Any]:
    return [p.grad for p in (*module.parameters(), *more)]


def called_on_its_result(c: Compile) -> list[Any]:
    w, x = seeded(nn.Linear(3, 3)), leaf()
    f = c(w)
    out = f(f(x))
    out.sum().backward()
    return [out, *gradients(w, x)]


def recurrent(c: Compile) -> list[Any]:
    w, x, h = seeded(nn.GRUCell(3, 3)), leaf(), torch.zeros(3, 3)
    f = c(w)
    for _ in range(4):
        h = f(x, h)
    h.square().sum().backward()
    return [h, *gradients(w, x)]


def tied(c: Compile) -> list[Any]:
    embedding, head = seeded(nn.Embedding(5, 3)), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    out = c(head)(c(embedding)(torch.tensor([1, 2, 1])))
    out.sin().sum().backward()
    return [out, *gradients(embedding)]


def with_what_it_is_made_of(c: Compile) -> list[Any]:
    p = leaf()
    h = p * 2
    out = c(lambda h, p: h * p)(h, p)
    (out + h + p).sum().backward()
    return [out, p.grad]


def made_of_one_another(c: Compile) -> list[Any]:
    p = leaf()
    h = p * 2
    k = h.sin()
    out = c(lambda h, k, p: h * k * p)(h, k, p)
    return [out, *torch.autograd.grad(out.sum(), [h, k, p])]


def in_closures(c: Compile) -> list[Any]:
    p = leaf()
    h = p * 2
    out = c(lambda p: h * p)(p)
    out.sum().backward()
    return [out, p.grad]


def written(c: Compile) -> list[Any]:
    p = leaf()
    h = p * 2

    def fn(h: Tensor, p: Tensor) -> Tensor:
        h.mul_(p)
        return h * p

    out = c(fn)(h, p)
    (out + h).sum().backward()
    return [out, h, p.grad]


def views(c: Compile) -> list[Any]:
    p = leaf()
    h = (p * 2).t()
    one, two = c(lambda h, row, p: (h * p, row + h[0]))(h, h[0], p)
    (one.sum() + two.sum()).backward()
    return [one, two, p.grad]


def hooks_outside(c: Compile) -> list[Any]:
    p, seen = leaf(), list[Any]()
    h = p * 2
    h.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    p.register_hook(lambda g: seen.append(g.clone()))
    c(lambda h, p: h * p)(h, p).sum().backward()
    return [p.grad, *seen]


def hooks_on_views(c: Compile) -> list[Any]:
    """Of an input, of a result, and of one another: a view that has a hook is no mere view of what it shows."""
    p, q = leaf(), leaf()

    def fn(p: Tensor, q: Tensor) -> list[Tensor]:
        row, part, last = p[1], (q * 2)[0], q[2]
        row.register_hook(lambda g: g * 0.5)
        part.register_hook(lambda g: g * 3)
        last.grad_fn.register_prehook(lambda g: (g[0] * 5,))
        return [row, row[1:], part, p[2], last]

    f = c(fn)
    for _ in range(2):
        sum(t.sum() for t in f(p, q)).backward()
    return [p.grad, q.grad]


def hooks_of_leaves_not_reached(c: Compile) -> list[Any]:
    """They are not called where a backward begins at results that do not depend on their leaves."""
    p, q, r, seen = leaf(), leaf(), leaf(), list[Any]()
    for name, tensor in {"p": p, "q": q, "r": r}.items():
        tensor.register_hook(lambda g, name=name: seen.append(name) or g * 2)
        tensor.register_post_accumulate_grad_hook(lambda t, name=name: seen.append((name, t.grad.sum().item())))
    f = c(lambda p, q, r: (p * q, p.sin() * r))
    one, two = f(p, q, r)
    one.sum().backward(retain_graph=True)
    two.sum().backward()
    one, two, three = f(p, q, r)[0], f(p, q, r)[1], f(p * 2, q, r)[0]
    (one.sum() + r.sum() + three.sum()).backward()  # two nodes leave it out, and something else leads to it
    two.sum().backward()
    return [p.grad, q.grad, r.grad, *sorted(map(str, seen)), len(r._backward_hooks)]


def retained(c: Compile) -> list[Any]:
    p = leaf()
    before, inside = p * 2, p * 3
    before.retain_grad()

    def fn(before: Tensor, inside: Tensor, p: Tensor) -> Tensor:
        inside.retain_grad()
        return before * inside * p

    f = c(fn)
    for _ in range(2):
        f(before, inside, p).sum().backward(retain_graph=True)
    return [before.grad, inside.grad, p.grad]


def detached_in_place(c: Compile) -> list[Any]:
    """As hidden states are between pieces of a sequence; what was computed before still leads to their history."""
    p, seen = leaf(), list[Any]()

    def fn(h: Tensor, p: Tensor) -> Tensor:
        before = h.sum()
        h.detach_()
        return before + (h * p).sum()

    f = c(fn)
    for _ in range(2):
        h = p * 2
        f(h, p).backward()
        seen += [torch.tensor([h.requires_grad, h.is_leaf, h.grad_fn is None]), h.detach(), p.grad.clone()]
    return seen


def differentiated_inside(c: Compile) -> list[Any]:
    p = leaf()
    h = p * 2

    def fn(h: Tensor, p: Tensor) -> Tensor:
        return torch.autograd.grad((h * h * p).sum(), h, create_graph=True)[0]

    out = c(fn)(h, p)
    out.sum().backward()
    return [out, p.grad]


def leaf_that_is_a_view(c: Compile) -> list[Any]:
    p = torch.arange(6.0).view(2, 3).requires_grad_()
    c(lambda p: (p * p).sum().backward())(p)
    return [p.grad]


def without_grad(c: Compile) -> list[Any]:
    p = leaf()
    h = p * 2

    def fn(h: Tensor, p: Tensor) -> list[Any]:
        h.mul_(3)
        with torch.enable_grad():
            inner = h * p
        return [inner, h * p, h[0], h.requires_grad, h.is_leaf]

    with torch.no_grad():
        out = c(fn)(h, p)
    out[0].sum().backward()
    return [*out, h, h.requires_grad, out[1].requires_grad, p.grad]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # of zeros, where it is given none
        return g * 2


def apart(c: Compile) -> list[Any]:
    """Results that have no input in common: a backward of one leads to nothing behind the other, and frees nothing."""
    towers, p, q, log = nn.ModuleList([seeded(nn.Linear(3, 3)), seeded(nn.Linear(3, 3))]), leaf(), leaf(), []
    x, y = p * 2, Twice.apply(q)
    y.register_hook(lambda g: log.append(float(g.sum())))
    one, other, both = c(lambda x, y: (towers[0](x).tanh(), towers[1](y).tanh(), towers[1](y + 1).exp()))(x, y)
    one.sum().backward()
    seen = [q.grad, *log, p.grad.clone()]  # type: ignore[union-attr]
    other.sum().backward(retain_graph=True)
    both.sum().backward()
    return [one, other, *seen, *log, *gradients(towers, p, q)]


def freed_beside(c: Compile) -> list[Any]:
    """An adversary looks at a batch whose graph is not kept: of its results, one does not depend on that."""
    p, q = leaf(), leaf()
    x, y = p.exp(), q.exp()
    y.sum().backward()
    real, _ = c(lambda x, y: (x.sin(), y.cos()))(x, y)
    real.sum().backward()
    return [p.grad, q.grad]


@pytest.mark.parametrize("program", [
    apart, freed_beside, called_on_its_result, recurrent, tied, with_what_it_is_made_of, made_of_one_another,
    in_closures, written, views, hooks_outside, hooks_on_views, hooks_of_leaves_not_reached, retained,
    detached_in_place, differentiated_inside, leaf_that_is_a_view, without_grad,
])  # fmt: skip
def test_inputs_whose_history_leads_to_other_inputs(program: Callable[[Compile], list[Any]]) -> None:
    expected = program(lambda fn: fn)
    found = program(functools.partial(ws.compile, fullgraph=True))
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_histories_apart_die_with_their_results() -> None:
    f = ws.compile(lambda x, y: (x.sin().cos(), y.exp(), x.exp()), fullgraph=True)
    for _ in range(3):
        x, y = leaf(), leaf()
        results = [x, y, *f(x, y)]
        seen = [weakref.ref(t) for t in results]
        del x, y, results[:]
        assert [ref() for ref in seen] == [None] * 5


def backward(h: Tensor, p: Tensor) -> None:
    (h * p).sum().backward()


def backward_to_inputs(h: Tensor, p: Tensor) -> None:
    (h * p).sum().backward(inputs=[p])


def gradient_through_both(h: Tensor, p: Tensor) -> Any:
    return torch.autograd.grad((h * p).sum(), [h, p])


@pytest.mark.parametrize("fn", [backward, backward_to_inputs, gradient_through_both])
def test_a_backward_inside_that_leads_to_what_was_computed_before_is_refused(fn: Any) -> None:
    p = leaf()
    h = p * 2
    with pytest.raises(UnsupportedError, match=r"leads into the computation that made L\['h'\]") as error:
        ws.compile(fn, fullgraph=True)(h, p)
    assert f"{__file__}:{fn.__code__.co_firstlineno + 1}" in str(error.value)
    assert p.grad is None
    h.sum().backward()  # nothing was freed


def test_a_hook_added_inside_to_an_input_with_a_history_is_refused() -> None:
    def fn(h: Tensor) -> Tensor:
        h.register_hook(lambda g: g * 3)
        return h * 2

    p = leaf()
    with pytest.raises(LeakError, match=r"a hook was added to L\['h'\] in the step"):
        ws.compile(fn, fullgraph=True)(p * 2)


def test_an_input_that_is_given_a_history_of_the_functions_own_has_eagers() -> None:
    def fn(x: Tensor, p: Tensor) -> Tensor:
        x.mul_(torch.full((3,), 2.0, requires_grad=True))
        return p * 2

    eager, ours = torch.ones(3), torch.ones(3)
    compiled = ws.compile(fn)
    assert torch.equal(compiled(ours, leaf()), fn(eager, leaf()))
    assert torch.equal(ours, eager) and ours.requires_grad and not ours.is_leaf
    ours.sum().backward()
    assert "changed in place by a value that requires grad" in compiled.breaks[0]
