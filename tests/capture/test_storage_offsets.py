"""Where a tensor begins in its memory: what a step computes from it holds for that place alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws

STEPS: dict[str, Callable[..., Any]] = {
    "read by Python": lambda x: x * x.storage_offset(),
    "read of a view": lambda x: x * x[1:].storage_offset(),
    "as_strided": lambda x: torch.as_strided(x, (2, 2), (2, 1), 6) * 2,
    "as_strided before the first element": lambda x: torch.as_strided(x, (2, 2), (2, 1), 1) * 2,
    "as_strided behind the last element": lambda x: torch.as_strided(x, (2, 2), (2, 1), 24) * 2,
    "as_strided after a write": lambda x: (x.add_(1), torch.as_strided(x, (30,), (1,), 0) * 2)[1],
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (2, 2), (2, 1), 6) * 2,
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, torch.zeros(2, 2), (2, 2), (2, 1), 6) * 2,
}


def _at(offset: int) -> tuple[Tensor, Tensor]:
    memory = torch.arange(40.0)
    return memory, memory[offset : offset + 12].view(3, 4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_reads_a_storage_offset_holds_for_that_one(name: str, dynamic: bool) -> None:
    step = STEPS[name]
    compiled = ws.compile(step, dynamic=dynamic, fullgraph=True)
    for offset in (5, 3, 5, 0):
        (one, x), (two, y) = _at(offset), _at(offset)
        assert torch.equal(step(x), compiled(y)) and torch.equal(one, two)
    assert compiled.captures == 3 and "storage offset: expected 5, found 3" in compiled.recompiles[0]


def test_views_without_an_offset_serve_wherever_the_tensor_begins() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.as_strided(x, (2, 2), (4, 1)) * x[1:].t().sum()

    compiled = ws.compile(step, fullgraph=True)
    for offset in (5, 3, 0):
        assert torch.equal(step(_at(offset)[1]), compiled(_at(offset)[1]))
    assert compiled.captures == 1


def test_gradients_of_elements_outside_of_an_input() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.as_strided(x, (3, 3), (4, 1), 2).square()

    grads = []
    for run in (step, ws.compile(step, fullgraph=True)):
        x = _at(5)[1].requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_two_views_of_a_memory_of_which_one_is_written() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    compiled = ws.compile(step, fullgraph=True)
    for offset in (2, 3, 0, 8):
        (one, two), found = (torch.arange(20.0), torch.arange(20.0)), []
        for run, memory in ((step, one), (compiled, two)):
            found.append(run(memory[:4], memory[offset : offset + 4]))
        assert torch.equal(*found) and torch.equal(one, two)


@pytest.mark.parametrize("backend", ["aten", "naive"])
def test_gradients_whose_formula_counts_from_the_start_of_their_memory(backend: str) -> None:
    """Eager's formula of `as_strided_scatter` looks at the memory of the gradient, not at its first element."""

    def step(x: Tensor, part: Tensor) -> Tensor:
        return torch.as_strided_scatter(x, part, (2, 2), (2, 1), 1)

    compiled = ws.compile(step, backend=backend, fullgraph=True)
    for offset in (0, 4, 5, 4):
        grads = []
        for run in (step, compiled):
            x, part = torch.arange(12.0).view(3, 4).requires_grad_(), torch.ones(2, 2, requires_grad=True)
            coming = torch.arange(20.0)[offset : offset + 12].view(3, 4)
            grads.append(torch.autograd.grad(run(x, part), (x, part), coming))
        assert all(map(torch.equal, *grads))


def test_gradients_that_come_as_pieces_of_one() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.as_strided_scatter(x, x[:2, :2], (2, 2), (2, 1), 1) * 1

    grads = []
    for run in (step, ws.compile(step, fullgraph=True)):
        x, y = (torch.arange(12.0).view(3, 4).requires_grad_() for _ in range(2))
        torch.cat([run(x), run(y)]).square().sum().backward()
        grads.append((x.grad, y.grad))
    assert all(map(torch.equal, *grads))


FROM: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda memory: memory[4:20].view(4, 4),
    "transposed": lambda memory: memory[4:20].view(4, 4).t(),
    "each second": lambda memory: memory[::2].view(4, 3),
    "columns": lambda memory: memory.view(4, 6)[:, 2:5],
    "transposed columns": lambda memory: memory.view(4, 6)[:, 2:5].t(),
}
PLACE = (2, 2), (1, 2), 5
OVERLAPPING = (2, 2), (1, 1), 5
SOURCE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def _in_place(x: Tensor) -> Tensor:
    y = x.t()
    y.as_strided_(*PLACE)
    y.mul_(3)
    return y * 2


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda x: x.as_strided(*PLACE).mul_(3) + 0,
    "as_strided_": _in_place,
    "as_strided_copy, out=": lambda x: torch.as_strided_copy(x.t(), *PLACE, out=torch.empty(2, 2)),
    "as_strided_copy after a write": lambda x: (x.mul_(2), torch.as_strided_copy(x, *PLACE))[1],
    "as_strided_scatter": lambda x: x.copy_(torch.as_strided_scatter(x * 2, SOURCE, (2, 2), (1, 1), 1)) + 0,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("view", FROM.values(), ids=FROM)
def test_writes_by_strides_and_offset(view: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> None:
    """All that eager writes, whatever lies between the elements of the input."""
    compiled = ws.compile(write, fullgraph=True)
    for _ in range(2):
        one, two = torch.arange(24.0), torch.arange(24.0)
        assert torch.equal(write(view(one)), compiled(view(two))) and torch.equal(one, two)


@pytest.mark.parametrize("write", [
    lambda x: x.t().as_strided(*OVERLAPPING).fill_(7) + 0, lambda x: x.as_strided(*OVERLAPPING).copy_(SOURCE) + 0,
    lambda x: x.as_strided(*OVERLAPPING).t().copy_(SOURCE) + 0,
    lambda x: (x * 1).as_strided((2, 2), (1, 1), 1).copy_(SOURCE) + 0,
])  # fmt: skip
def test_writes_to_one_place_twice_are_those_of_the_steps_python(write: Callable[[Tensor], Tensor]) -> None:
    compiled = ws.compile(write)
    for _ in range(3):
        one, two = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
        assert torch.equal(write(one), compiled(two)) and torch.equal(one, two)
    assert "several elements in one place" in compiled.breaks[0]


@pytest.mark.parametrize("place", [(2, 2, (1, 2), 1), (2, 2, (1, 1), 1)], ids=["apart", "overlapping"])
@pytest.mark.parametrize("outside", [True, False], ids=["backward outside", "backward inside"])
def test_the_gradient_of_a_scatter_by_strides(place: tuple[Any, ...], outside: bool) -> None:
    *size, stride, offset = place

    def scatter(x: Tensor, source: Tensor) -> Tensor:
        return torch.as_strided_scatter(x * 2, source * 3, size, stride, offset) * torch.arange(16.0).view(4, 4)

    def step(x: Tensor, source: Tensor) -> Tensor:
        scatter(x, source).sum().backward()
        return x.grad

    results = []
    used = scatter if outside else step
    for function in (used, ws.compile(used, fullgraph=stride == (1, 2))):  # else its Python runs
        x, source = torch.ones(4, 4, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        if outside:
            function(x, source).sum().backward()
        else:
            function(x, source)
        results.append((x.grad, source.grad))
    assert all(map(torch.equal, *results))


PARTS: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, 1),
    "unsafe_split": lambda x: (x * 1).unsafe_split(1, 0),
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, x.shape[1] - 1], 1),
    "a part that is written": lambda x: (lambda y: (y.unsafe_chunk(2, 1)[1].mul_(2), y)[1:])(x * 1),
    "what has parts is written": lambda x: (lambda y: (y.unsafe_chunk(2, 1), y.mul_(2))[0])(x * 1),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("view", FROM.values(), ids=FROM)
def test_unsafe_parts_lie_where_eagers_do(view: Callable[[Tensor], Tensor], part: Callable[[Tensor], Any]) -> None:
    def places(parts: Any) -> list[Any]:
        return [(p.tolist(), p.stride(), p.storage_offset(), p._is_view(), p._version) for p in parts]

    compiled = ws.compile(part, fullgraph=True)
    x = view(torch.arange(24.0))
    for _ in range(2):
        assert places(part(x)) == places(compiled(x))
