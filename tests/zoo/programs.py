"""Small random programs of views, writes, gradients and outputs, drawn by hypothesis.

A program is data: input descriptions, instructions over a growing list of tensors, and the positions that
it returns. `run` interprets it, eagerly or under a tracer. Every number in an instruction is reduced to
the shape at hand (a dimension modulo the rank…), which keeps nearly all programs valid; the ones that
eager refuses are as welcome, since a compiled program must refuse them alike. Nothing depends on values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.equal import World

SHAPES: list[tuple[int, ...]] = [(), (3,), (4,), (2, 3), (3, 3), (2, 2, 3), (1, 3), (0, 3)]


class InputSpec(NamedTuple):
    """One input: fresh memory, or (``of`` >= 0) a view or a second name of an earlier input."""

    shape: int
    dtype: int
    requires_grad: bool
    of: int
    how: int


class Instruction(NamedTuple):
    """One operator on positions ``a``, ``b`` with small numbers ``i``, ``j``; in ``torch.no_grad()`` or not."""

    op: str
    a: int
    b: int
    i: int
    j: int
    no_grad: bool


class Program(NamedTuple):
    """A whole program; ``outputs`` are positions in the list of tensors."""

    inputs: tuple[InputSpec, ...]
    body: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __repr__(self) -> str:
        lines = [f"  {spec}" for spec in self.inputs]
        lines += [
            f"  {n}: {op}(a={a}, b={b}, i={i}, j={j}){' no_grad' if no_grad else ''}"
            for n, (op, a, b, i, j, no_grad) in enumerate(self.body)
        ]
        return "Program:\n" + "\n".join(lines) + f"\n  return {list(self.outputs)}"


_notes: list[str] | None = None


@contextmanager
def questionable() -> Iterator[list[str]]:
    """Collects what programs that run eagerly do, and what eager has no one answer to."""
    global _notes
    _notes = found = []
    try:
        yield found
    finally:
        _notes = None


def _dim(x: Tensor, i: int) -> int:
    return i % max(x.ndim, 1)


def _place(x: Tensor, dim: int, j: int) -> int:
    return j % max(x.shape[dim], 1)


def _narrow(x: Tensor, i: int, j: int) -> Tensor:
    dim = _dim(x, i)
    start = _place(x, dim, j)
    return x.narrow(dim, start, x.shape[dim] - start)


def _as_strided(x: Tensor, i: int, j: int) -> Tensor:
    n = min(x.numel(), 2 + i % 2)
    step = 1 if x.numel() < 2 * n else 1 + j % 2
    if _notes is not None and n and not {k * step for k in range(n)} <= _places(x):
        _notes.append("as_strided reaches elements that its tensor does not have: their gradients are lost on the way")
    return x.as_strided((n,), (step,), x.storage_offset())


def _places(x: Tensor) -> set[int]:
    """Where a tensor's elements lie, from the first."""
    ways = (range(0, size * stride, stride) if stride else [0] * size
            for size, stride in zip(x.shape, x.stride(), strict=True))
    return set(map(sum, itertools.product(*ways)))


def _unfold(x: Tensor, i: int, j: int) -> Tensor:
    dim = _dim(x, i)
    return x.unfold(dim, min(2, x.shape[dim]), 1 + j % 2)


def _slice(x: Tensor, i: int, j: int) -> Tensor:
    return x[i % 2 :: 1 + j % 2]


def _expand(x: Tensor, i: int, j: int) -> Tensor:
    return x.unsqueeze(0).expand(2, *x.shape)


VIEWS: dict[str, Callable[[Tensor, int, int], Any]] = {
    "select": lambda x, i, j: x.select(_dim(x, i), _place(x, _dim(x, i), j)),
    "slice": _slice,
    "slice_last": lambda x, i, j: x[..., i % 2 :],
    "narrow": _narrow,
    "transpose": lambda x, i, j: x.transpose(_dim(x, i), _dim(x, j)),
    "t": lambda x, i, j: x.t(),
    "permute": lambda x, i, j: x.permute([(d + i) % x.ndim for d in range(x.ndim)]),
    "view_flat": lambda x, i, j: x.view(-1),
    "reshape_flat": lambda x, i, j: x.reshape(-1),
    "view_same": lambda x, i, j: x.view(x.shape),
    "expand": _expand,
    "diagonal": lambda x, i, j: x.diagonal(i % 2),
    "as_strided": _as_strided,
    "unsqueeze": lambda x, i, j: x.unsqueeze(i % (x.ndim + 1)),
    "squeeze": lambda x, i, j: x.squeeze(),
    "unfold": _unfold,
    "chunk": lambda x, i, j: x.chunk(2, _dim(x, i))[-(j % 2)],
    "split": lambda x, i, j: x.split(2, _dim(x, i))[0],
    "unbind": lambda x, i, j: x.unbind(_dim(x, i))[-1],
    "detach": lambda x, i, j: x.detach(),
    "data": lambda x, i, j: x.data,
    "alias": lambda x, i, j: x[...],
    "contiguous": lambda x, i, j: x.contiguous(),
    "to_same": lambda x, i, j: x.to(x.dtype),
    "same": lambda x, i, j: x,
}


def _fits(source: Tensor, target: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(source.shape, target.shape) == target.shape
    except RuntimeError:
        return False


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share some memory, unless each element lies where the other's does."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or not x.numel() or not y.numel():
        return False
    if (x.shape, x.stride(), x.storage_offset()) == (y.shape, y.stride(), y.storage_offset()):
        return False
    (a, b), (c, d) = ((t.storage_offset(), t.storage_offset() + _reach(t)) for t in (x, y))
    return a <= d and c <= b


def _reach(x: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _other(x: Tensor, y: Tensor) -> Tensor | float:
    """``y`` where it may be written into ``x``, else a number."""
    if _notes is not None and _fits(y, x) and _overlap(x, y):
        _notes.append("a call reads some of the memory that it writes: what was there before or after, as it comes")
    return y if _fits(y, x) and torch.can_cast(y.dtype, x.dtype) else 2.0 if x.is_floating_point() else 2


def _setitem(x: Tensor, y: Tensor, i: int, j: int) -> None:
    x = x.view(1) if x.ndim == 0 else x
    keys: list[Any] = [0, slice(1, None), ..., slice(None, None, 2), torch.tensor([0]), x > 0]
    key = keys[i % len(keys)]
    x[key] = _other(x[key], y) if i % len(keys) < 4 else 1 + j


def _out(x: Tensor, y: Tensor, i: int, j: int) -> None:
    torch.mul(x.detach(), 1 + j, out=x) if i % 2 else torch.add(x.detach(), _as_tensor(_other(x, y), x), out=x)


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.full_like(like, value).detach()


def _foreach(x: Tensor, y: Tensor, i: int, j: int) -> None:
    if _notes is not None and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
        _notes.append("one call writes a memory twice: autograd then has views go back to the first write alone")
    torch._foreach_add_([x, y], 1 + j)


def _copy(x: Tensor, y: Tensor, i: int, j: int) -> None:
    source = _other(x, y)
    x.copy_(source) if isinstance(source, Tensor) else x.fill_(source)


WRITES: dict[str, Callable[[Tensor, Tensor, int, int], Any]] = {
    "add_": lambda x, y, i, j: x.add_(1 + j),
    "mul_": lambda x, y, i, j: x.mul_(2 + j),
    "add_other_": lambda x, y, i, j: x.add_(_other(x, y)),
    "copy_": _copy,
    "setitem": _setitem,
    "out": _out,
    "zero_": lambda x, y, i, j: x.zero_(),
    "fill_": lambda x, y, i, j: x.fill_(j),
    "clamp_": lambda x, y, i, j: x.clamp_(min=j - 1),
    "relu_": lambda x, y, i, j: torch.relu_(x),
    "masked_fill_": lambda x, y, i, j: x.masked_fill_(x > j, 3),
    "index_fill_": lambda x, y, i, j: x.index_fill_(_dim(x, i), torch.arange(min(1, x.numel())), j),
    "foreach_add_": _foreach,
    "data_add_": lambda x, y, i, j: x.data.add_(1 + j),
    "augmented": lambda x, y, i, j: x.__iadd__(1 + j),
    "bernoulli_": lambda x, y, i, j: x.bernoulli_(0.5),
}
PURE: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "add": lambda x, y, i, j: x + _other(x, y),
    "mul": lambda x, y, i, j: x * _other(x, y),
    "square": lambda x, y, i, j: x * x,
    "clone": lambda x, y, i, j: x.clone(),
    "sum": lambda x, y, i, j: x.sum(),
    "sum_dim": lambda x, y, i, j: x.sum(_dim(x, i), keepdim=bool(j % 2)),
    "relu": lambda x, y, i, j: x.relu(),
    "where": lambda x, y, i, j: torch.where(x > j, x, torch.zeros_like(x)),
    "cat": lambda x, y, i, j: torch.cat([x.reshape(-1), y.reshape(-1)]),
    "stack": lambda x, y, i, j: torch.stack([x, x]),
    "dropout": lambda x, y, i, j: torch.dropout(x, 0.5, True),
    "double": lambda x, y, i, j: x.double(),
    "zeros_like": lambda x, y, i, j: torch.zeros_like(x),
    "new_full": lambda x, y, i, j: torch.full((2, 3), float(j)),
}
RESHAPES: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(),
    "detach_": lambda x: x.detach_(),
}


def _gradient(op: str, x: Tensor, y: Tensor, i: int) -> Tensor | None:
    """Operators on gradients; programs without any gradient pass through."""
    if op == "requires_grad_" and x.is_floating_point() and x.is_leaf:
        x.requires_grad_()
    elif op in ("backward", "autograd_grad") and x.requires_grad:
        with torch.enable_grad():
            loss = x.sum()
        if op == "backward":
            loss.backward(retain_graph=i > 0)
        elif y.requires_grad:
            return torch.autograd.grad(loss, y, retain_graph=True, allow_unused=True)[0]
    elif x.is_leaf and x.grad is not None:
        if op == "grad_write":
            x.grad.mul_(2)
        elif op == "grad_none":
            x.grad = None
        elif op == "grad_read":
            return x.grad
        elif op == "grad_assign":
            x.grad = x.grad * 2
    return None


GRADIENTS = (
    "requires_grad_",
    "backward",
    "backward",
    "autograd_grad",
    "grad_write",
    "grad_none",
    "grad_read",
    "grad_assign",
)


def _belongs_to_a_leaf(x: Tensor) -> bool:
    """True for what autograd only lets you write in no_grad: a leaf with gradient, or a view of one."""
    base = x._base if x._is_view() else x
    return base is not None and base.requires_grad and base.is_leaf


def run(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    """Interprets a program; returns the tensors at its output positions."""
    tensors = list(inputs)
    for op, a, b, i, j, no_grad in program.body:
        x, y = tensors[a % len(tensors)], tensors[b % len(tensors)]
        made = None
        with torch.set_grad_enabled(not (no_grad or (op in WRITES and j < 3 and _belongs_to_a_leaf(x)))):
            if op in VIEWS:
                made = VIEWS[op](x.view(1) if x.ndim == 0 else x, i, j)
            elif op in PURE:
                made = PURE[op](x, y, i, j)
            elif op in WRITES:
                WRITES[op](x, y, i, j)
            elif op in RESHAPES:
                RESHAPES[op](x)
            else:
                if op == "backward":
                    x = next((t for t in reversed(tensors) if t.requires_grad), x)
                made = _gradient(op, x, y, i)
        if isinstance(made, Tensor):
            tensors.append(made)
    return [tensors[position % len(tensors)] for position in program.outputs]


DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64)


def build_inputs(program: Program) -> list[Tensor]:
    """Fresh inputs with small whole values, aliased as described."""
    inputs: list[Tensor] = []
    for spec in program.inputs:
        if spec.of >= 0 and inputs:
            base = inputs[spec.of % len(inputs)].detach()
            name = ("same", "view_same", "t", "slice", "alias", "view_flat")[spec.how % 6]
            if name == "same":
                inputs.append(inputs[spec.of % len(inputs)])
                continue
            if name == "view_flat" and not base.is_contiguous():
                name = "alias"
            inputs.append(VIEWS[name](base if base.ndim else base.view(1), 1, 0) if base.ndim < 3 else base[0])
            continue
        dtype = DTYPES[spec.dtype % len(DTYPES)]
        fresh = torch.randint(-3, 4, SHAPES[spec.shape % len(SHAPES)]).to(dtype)
        inputs.append(fresh.requires_grad_(spec.requires_grad and dtype.is_floating_point))
    return inputs


def world_of(program: Program) -> Callable[[int], World]:
    """The world of a program: the same inputs at every call, so that writes add up.

    Version counters are left out where gradients are summed: eager's engine may do so in place.
    """
    summed = any(i.op in GRADIENTS for i in program.body)

    def make(seed: int) -> World:
        return World(lambda *inputs: run(program, list(inputs)), [tuple(build_inputs(program))], versions=not summed)

    return make


def _instruction(parts: tuple[str, int, int, int, int, bool]) -> Instruction:
    """Views are made with gradients on: what autograd says of others later depends on each write in between."""
    made = Instruction._make(parts)
    return made._replace(no_grad=made.no_grad and made.op not in VIEWS)


def programs(gradients: bool, reshapes: bool = False) -> st.SearchStrategy[Program]:
    """Strategy for programs; with gradients or without; with in-place changes of shape or without."""
    # not `st.integers`, which also draws numbers found in the modules imported so far: each order of tests its own
    small = st.sampled_from(range(4))
    ops = [*VIEWS, *WRITES, *WRITES, *PURE] + (list(RESHAPES) * 2 if reshapes else [])
    ops = ops + list(GRADIENTS) * 4 if gradients else ops
    spec = st.tuples(
        st.sampled_from(range(len(SHAPES))),
        small,
        st.sampled_from([True, True, False]) if gradients else st.just(False),
        st.sampled_from([-1, -1, -1, 0, 1]),
        st.sampled_from(range(6)),
    ).map(InputSpec._make)
    position = st.sampled_from(range(10))
    no_grad = st.booleans() if gradients else st.just(False)
    instruction = st.tuples(st.sampled_from(ops), position, position, small, small, no_grad).map(_instruction)
    backward = Instruction("backward", 0, 0, 1, 0, False)
    ending = st.sampled_from([(backward,), ()]) if gradients else st.just(())
    return st.tuples(
        st.lists(spec, min_size=1, max_size=4).map(tuple),
        st.tuples(st.lists(instruction, min_size=1, max_size=10), ending).map(lambda parts: (*parts[0], *parts[1])),
        st.lists(position, max_size=4).map(tuple),
    ).map(Program._make)
