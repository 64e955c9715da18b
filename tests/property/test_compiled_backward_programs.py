"""Programs drawn at random, their backwards captured, against eager: gradients, hooks' effects and errors."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from wholestep.autograd import compiled_backward


class Scaled(torch.autograd.Function):
    """Keeps a tensor, an output and a number."""

    @staticmethod
    def forward(ctx, x, factor):
        y = x * factor
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * ctx.factor + x * y, None


OPERATORS = {
    "sin": lambda x, y: x.sin(),
    "exp": lambda x, y: x.tanh().exp(),
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + 2 * y,
    "matmul": lambda x, y: x @ y,
    "transpose": lambda x, y: x.t(),
    "rows": lambda x, y: torch.cat([x[1:], y[:1]]),
    "view": lambda x, y: x.reshape(-1).view(2, 8).reshape(4, 4),
    "softmax": lambda x, y: x.softmax(-1),
    "write": lambda x, y: x.clone().mul_(y),
    "write part": lambda x, y: x.clone().index_fill_(0, torch.tensor([1]), 0.5),
    "write row": lambda x, y: _write_row(x, y),
    "function": lambda x, y: Scaled.apply(x, 1.5),
    "same": lambda x, y: x.view_as(x),
    "number": lambda x, y: x * 0.25,
    "unused": lambda x, y: x.detach(),
}


def _write_row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[2] = y[0]
    return z


class Program:
    """Leaves, a counter and a history that hooks write; the same lists of draws give the same program."""

    def __init__(self, steps: list[tuple[str, int, int]], hooks: list[tuple[str, int]], ends: list[str]) -> None:
        self.steps, self.hooks, self.ends = steps, hooks, ends
        generator = torch.Generator().manual_seed(0)
        self.leaves = [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2)]
        self.count, self.scale, self.seen = torch.zeros(()), torch.ones(()), {"calls": 0}

    def hook(self, kind: str, value: torch.Tensor) -> Any:
        local = value.detach().mean()
        if kind == "scale":
            return lambda grad: grad * self.scale + local
        if kind == "count":
            return lambda grad: (self.count.add_(grad.sum()), None)[1]
        if kind == "keep":
            return lambda grad: self.seen.__setitem__("last", grad)
        if kind == "in place":
            return lambda grad: (grad.mul_(2), None)[1]
        return lambda grad: grad.clone()

    def run(self, time: int) -> list[Any]:
        values: list[torch.Tensor] = list(self.leaves)
        hooks = {index % (2 + len(self.steps)): kind for kind, index in self.hooks}
        self.scale.fill_(time)
        for name, i, j in self.steps:
            values.append(OPERATORS[name](values[i % len(values)], values[j % len(values)]))
        for index, kind in hooks.items():
            if values[index].requires_grad and not values[index].is_leaf and kind != "post":
                values[index].register_hook(self.hook(kind, values[index]))
        result: list[Any] = []
        loss = sum((v * (k + 1)).sum() for k, v in enumerate(values[-3:]))
        for end in self.ends:
            try:
                if end == "grad":
                    result += torch.autograd.grad(loss, self.leaves, retain_graph=True, allow_unused=True)
                elif end == "zero":
                    self.leaves[0].grad = None
                else:
                    loss.backward(retain_graph=end == "retain", inputs=self.leaves[:1] if end == "first" else None)
            except RuntimeError as error:
                result.append(str(error)[:60])
        result += [self.count, *(leaf.grad for leaf in self.leaves), self.seen.get("last")]
        return [r.clone() if isinstance(r, torch.Tensor) else r for r in result]


INDEX = st.sampled_from(range(8))
STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), INDEX, INDEX), min_size=1, max_size=7)
HOOKS = st.lists(st.tuples(st.sampled_from(["scale", "count", "keep", "in place", "clone"]), INDEX), max_size=3)
ENDS = st.lists(st.sampled_from(["retain", "free", "grad", "zero", "first"]), min_size=1, max_size=3)


@given(STEPS, HOOKS, ENDS)
def test_programs_have_eager_gradients(steps, hooks, ends):
    eager, ours = Program(steps, hooks, ends), Program(steps, hooks, ends)
    context = compiled_backward("naive")
    for time in range(3):
        expected = eager.run(time)
        with context:
            found = ours.run(time)
        for left, right in zip(expected, found, strict=True):
            assert type(left) is type(right)
            if isinstance(left, torch.Tensor):
                assert torch.equal(left, right) and left.stride() == right.stride()
            else:
                assert left == right
