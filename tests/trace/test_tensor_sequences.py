"""Lists that C++ reads, of numbers and of tensors, in constructors and indices: each call has values of its own."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import wholestep as ws
from wholestep.errors import CaptureError

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def _written(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


SERVED: dict[str, Step] = {
    "numbers of items": lambda s, x, i: torch.tensor([s.item(), i.item() + 1, 2]),
    "nested numbers": lambda s, x, i: torch.tensor([[s.item(), 1j], (2, s.item() * 3)]),
    "one number": lambda s, x, i: torch.as_tensor(s.item() / 3, dtype=torch.double),
    "new of a size": lambda s, x, i: x.new(i + 1, 2).fill_(1),
}
RUN: dict[str, Step] = {
    "tensor": lambda s, x, i: torch.tensor([s, 2.0]),
    "of values of the step": lambda s, x, i: torch.tensor([x.sum(), x.mean(), s]),
    "nested": lambda s, x, i: torch.tensor([[s, 2.0], (x.sum(), i)]),
    "rows of a tensor": lambda s, x, i: torch.tensor([[*row] for row in x]),
    "deque": lambda s, x, i: torch.tensor(collections.deque([s, s])),
    "tensors of one element": lambda s, x, i: torch.tensor([x[:1, 0], x[0, :1]]),
    "parameter and double": lambda s, x, i: torch.tensor([torch.nn.Parameter(s), s.double()]),
    "numbers of items": lambda s, x, i: torch.tensor([s.item(), s, i.item(), 2]),
    "integers": lambda s, x, i: torch.tensor([i, 2, i > 1]),
    "large integers as floats": lambda s, x, i: torch.tensor([i * 16777217 * 4097, 2.0]),
    "booleans": lambda s, x, i: torch.tensor([i - 1, i, 0], dtype=torch.bool),
    "complex": lambda s, x, i: torch.tensor([s, 1j, i]),
    "half": lambda s, x, i: torch.tensor([s.double() * 1.0009, i], dtype=torch.half),
    "by name": lambda s, x, i: torch.tensor(data=[s, i], dtype=torch.double),
    "with gradient": lambda s, x, i: torch.tensor([s, s], requires_grad=True).mul(2).detach(),
    "as_tensor": lambda s, x, i: torch.as_tensor([s, i], dtype=torch.double, device="cpu"),
    "asarray": lambda s, x, i: torch.asarray([s, s]),
    "new_tensor": lambda s, x, i: x.double().new_tensor([s, i]),
    "new": lambda s, x, i: x.new([s, s]),
    "sparse": lambda s, x, i: torch.sparse_coo_tensor([[i], [i]], [s], (4, 4)).to_dense(),
    "sparse values": lambda s, x, i: torch.sparse_coo_tensor([[0], [1]], [s], (4, 4)).to_dense(),
    "index": lambda s, x, i: x[(i, 0), (0, i)],
    "nested index": lambda s, x, i: x[[[i, 0], [1, i]],],
    "index beside others": lambda s, x, i: x[None, ..., [i, 0]],
    "write": lambda s, x, i: _written(x, (slice(None), [i, 0]), s),
    "classes of a loss": lambda s, x, i: F.cross_entropy(x, torch.tensor([0, 1, i])),
    "weights of a loss": lambda s, x, i: F.cross_entropy(x, x.argmax(1), weight=torch.tensor([s, 1.0, 2.0])),
    "legacy integers": lambda s, x, i: torch.LongTensor([[i, 1], [2, i]]),
    "legacy floats": lambda s, x, i: torch.FloatTensor([s, x.sum()]),
    "legacy tensors": lambda s, x, i: torch.Tensor([[s, x.sum()], [1.0, x[0, 1] * 2]]),
    "legacy bools": lambda s, x, i: torch.BoolTensor([x.sum() > 40, s > 1]),
    "mask": lambda s, x, i: x[(s > 1, s > 0, s > 5),],
    "list as index": lambda s, x, i: x[[i, i]],
    "beside a number of NumPy": lambda s, x, i: torch.tensor([s, np.float32(2)]),
    "bytes": lambda s, x, i: torch.tensor([i, 0], dtype=torch.uint8),
    "compressed": lambda s, x, i: torch.sparse_csr_tensor([0, 1, 1], [i - i], [s], (2, 2)).to_dense(),
}  # fmt: skip


def _calls(fn: Step, step: Step) -> None:
    for value in (1.0, 2.0, 1.0):
        s, x, i = torch.tensor(value), torch.arange(9.0).view(3, 3) * value, torch.tensor(int(value))
        expected, found = fn(s, x, i), step(s, x, i)
        assert expected.dtype == found.dtype and torch.equal(expected, found)
        assert expected._version == found._version and expected.requires_grad == found.requires_grad


@pytest.mark.parametrize("name", SERVED)
def test_lists_have_the_values_of_each_call(name: str) -> None:
    step = ws.compile(SERVED[name], fullgraph=True)
    _calls(SERVED[name], step)
    if not name.startswith("new of"):
        assert step.recompiles == []


@pytest.mark.parametrize("name", RUN)
def test_values_that_only_cpp_can_read_are_refused_or_run_python(name: str) -> None:
    with pytest.raises(CaptureError, match="without fullgraph=True") as refused:
        ws.compile(RUN[name], fullgraph=True)(torch.tensor(1.0), torch.ones(3, 3), torch.tensor(1))
    assert __file__ in refused.value.where
    step = ws.compile(RUN[name])
    _calls(RUN[name], step)
    assert len(step.breaks) == 1


@pytest.mark.parametrize("fn", [
    lambda s, x, i: torch.tensor([s, 2.0], dtype=torch.long),
    lambda s, x, i: torch.tensor([x[0], x[1]]),
    lambda s, x, i: x[(s,),],
])  # fmt: skip
def test_lists_that_eager_refuses(fn: Step) -> None:
    given = torch.tensor(1.0), torch.ones(3, 3), torch.tensor(1)
    with pytest.raises((TypeError, ValueError)) as expected:
        fn(*given)
    with pytest.raises(expected.type, match=str(expected.value)[:30]):
        ws.compile(fn)(*given)
