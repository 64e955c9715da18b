"""Inputs that a step gives another shape in place (`t_`, `unsqueeze_`, …): its Python runs, as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import UnsupportedError

RESHAPES: dict[str, Any] = {
    "t_": lambda x: (x.t_(), x.sum()),
    "alone": lambda x: (x.t_(), None)[1],
    "then_written": lambda x: x.transpose_(0, 1).mul_(2) + 1,
    "written_before": lambda x: (x.mul_(3), x.t_(), x.add_(1), x * 2),
    "unsqueeze_": lambda x: (x.unsqueeze_(0), x.exp())[1],
    "squeeze_": lambda x: (x.unsqueeze_(0).squeeze_(), x * 2),
    "as_strided_": lambda x: (x.as_strided_((2, 2), (1, 2)), x + 1)[1],
    "twice": lambda x: x.t_().t_() * 3,
    "views": lambda x: (x.t_(), x[0], x.reshape(-1)),
    "read_before": lambda x: (x * 2, x.t_() * 3),
}


def looks(fn: Any, inputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> list[Any]:
    """What is seen of inputs and results after a call, and the gradients of leaves."""
    out = fn(*inputs)
    tensors = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    seen: list[Any] = [t.detach().clone() for t in (*inputs, *tensors)]
    seen += [(t.stride(), t.requires_grad, t.is_leaf, t._version, t._is_view()) for t in (*inputs, *tensors)]
    seen.append([t is inputs[0] for t in tensors])
    wanted = [t.sum() for t in (*tensors, *inputs) if t.requires_grad]
    return seen + (list(torch.autograd.grad(wanted, leaves, allow_unused=True)) if wanted else [])


def assert_alike(one: list[Any], two: list[Any]) -> None:
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("history", [False, True], ids=["plain", "history"])
@pytest.mark.parametrize("name", RESHAPES)
def test_as_in_eager(name: str, history: bool) -> None:
    fn, leaf = RESHAPES[name], torch.randn(3, 4, requires_grad=True)
    compiled = ws.compile(fn)
    for _ in range(4):
        eager, ours = (looks(f, (leaf * 1 if history else leaf.detach() + 1,), (leaf,)) for f in (fn, compiled))
        assert_alike(eager, ours)
    assert len(compiled.breaks) == 1 and "changes the shape of L['x']" in compiled.breaks[0]


def test_another_input_that_shares_its_memory_stays_as_it_was() -> None:
    def fn(part: Tensor, whole: Tensor) -> Tensor:
        part.t_().mul_(2)
        return whole + 1

    compiled, seen = ws.compile(fn), []
    for f in (fn, compiled, compiled):
        whole = torch.arange(16.0).view(4, 4)
        seen.append(looks(f, (whole[:3], whole), ()))
        assert whole.shape == (4, 4)
    assert_alike(seen[0], seen[1])
    assert_alike(seen[0], seen[2])


def test_a_buffer_turns_at_each_call() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(12.0).view(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x[: self.table.t_().shape[0]] @ self.table

    one, two, x = Turning(), Turning(), torch.randn(4)
    compiled = ws.compile(two)
    for _ in range(6):
        assert torch.equal(one(x), compiled(x)) and one.table.shape == two.table.shape


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_replay_of_it_is_refused_and_leaves_the_shape(requires_grad: bool) -> None:
    x = torch.randn(3, 4, requires_grad=requires_grad)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"changes the shape of L\['x'\]") as caught:
        ws.compile(lambda x: x.t_(), fullgraph=True)(x)
    assert "use the form that returns a view" in str(caught.value) and f"{__file__}:" in str(caught.value)
    assert x.shape == (3, 4) and x.stride() == (4, 1) and x._version == 0


def test_a_leaf_that_requires_grad_is_refused_in_eagers_words() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        ws.compile(lambda x: x.t_(), fullgraph=True)(x)
