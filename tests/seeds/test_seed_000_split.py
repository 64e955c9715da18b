"""Seed 000's splits at the bounds of buckets: `split="buckets"` gives a backend a graph for each, by the seed's counts.

The seed's layers have 25 million parameters; these a hundredth, in buckets a hundredth as large. Gradients are those of
the wrapper in eager, bit for bit, with a backend that counts and with our own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForMaskedLM, BertConfig

import wholestep as ws
from wholestep import comm
from wholestep.parallel import DistributedDataParallel as DDP
from wholestep.testing import CompileCounter


@pytest.fixture(autouse=True)
def one_rank() -> None:
    comm.init_process_group("thread", store=comm.HashStore(), rank=0, world_size=1)


class Toy(nn.Module):
    def __init__(self, sizes: Sequence[int] = (10, 500, 500, 500, 5), context: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.context = context
        pairs = zip(sizes, sizes[1:], strict=False)
        self.net = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())))

    def forward(self, inputs: Tensor) -> Tensor:
        with self.context():
            return self.net(inputs)  # type: ignore[no-any-return]


class CustomLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.mm(x, self.weight.t())
        return product + torch.where(product < 0.5, 0.3, 0.6)


class Custom(nn.Module):
    """Operators without parameters before the first layer, which alone would be a graph."""

    def __init__(self, ignored: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), CustomLinear(), nn.ReLU(), nn.Linear(512, 512))
        DDP._set_params_and_buffers_to_ignore_for_model(self, [*ignored])

    def forward(self, x: Tensor) -> Tensor:
        return self.seq(x + x)  # type: ignore[no-any-return]


class Checkpoints(Toy):
    """With dropout, which a checkpoint's second forward draws as the first has."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        first = nn.functional.dropout(self.net[:2](inputs), 0.2)
        second = checkpoint(lambda x: nn.functional.dropout(self.net[2:6](x), 0.5), first, use_reentrant=self.reentrant)
        return self.net[6:](torch.cos(second))  # type: ignore[no-any-return]


class Tied(Toy):
    """The second layer's weight is the fourth's, too, where torch's split refuses it or gets it wrong."""

    def __init__(self) -> None:
        super().__init__((100, 100, 100, 100, 100))
        self.net[2].weight = self.net[6].weight


VECTORS, WIDE = torch.rand(20, 10), torch.rand(8, 512)
CASES: dict[str, tuple[Callable[[], nn.Module], float, Tensor, int]] = {
    "test_no_split": (lambda: Toy((10, 5, 5, 5, 5)), 250, VECTORS, 1),
    "test_graph_split": (Toy, 0.25, VECTORS, 3),
    "test_custom_layer": (Custom, 1, WIDE, 3),
    "test_ignored_parameters": (lambda: Custom(("seq.2.weight", "seq.4.bias")), 25, WIDE, 2),
    "test_higher_order_op": (lambda: Checkpoints(False), 0.25, VECTORS, 3),
    "test_higher_order_op, reentrant": (lambda: Checkpoints(True), 0.25, VECTORS, 3),
    "tied weights": (Tied, 0.035, torch.rand(20, 100), 3),
}


def left_by(model: nn.Module, call: Callable[[Any], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_a_graph_for_each_bucket(name: str) -> None:
    make, cap, x, count = CASES[name]
    model = make()
    wrapped = DDP(model, bucket_cap_mb=cap, static_graph=name.endswith("reentrant"))
    want = left_by(model, wrapped, x)
    counter = CompileCounter()
    compiled = ws.compile(wrapped, backend=counter, split="buckets", fullgraph=True)
    for _ in range(2):
        assert all(map(torch.equal, want, left_by(model, compiled, x)))
    forwards = counter.frame_count - len([1 for gm in counter.graphs if "tangent" in gm.code])
    assert counter.graphs and forwards >= count
    assert compiled.explain(x).graph_count == (2 * count if count > 1 else 1) or "higher" in name
    counter.clear()
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(compiled(x), want[0])
    assert counter.frame_count == count
    ours = ws.compile(wrapped, split="buckets", fullgraph=True)
    assert all(map(torch.equal, want, left_by(model, ours, x)))


CONTEXTS = [
    (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16, True),
    (torch.enable_grad, torch.float32, True),
    (torch.no_grad, torch.float32, False),
]


@pytest.mark.parametrize(("context", "dtype", "requires_grad"), CONTEXTS)
def test_graph_split_ctx_manager(context: Callable[[], Any], dtype: torch.dtype, requires_grad: bool) -> None:
    model = Toy((100, 100, 100, 100, 100), context)
    counter, x = CompileCounter(), torch.rand(20, 100)
    compiled = ws.compile(DDP(model, bucket_cap_mb=0.035), backend=counter, split="buckets", fullgraph=True)
    found = compiled(x)
    assert torch.equal(found, model(x)) and (found.dtype, found.requires_grad) == (dtype, requires_grad)
    told = compiled.explain(x)
    assert told.graph_count == told.graph_break_count + 1 == (8 if requires_grad else 4)
    assert counter.frame_count == told.graph_count


def test_empty_graph() -> None:
    counter = CompileCounter()
    compiled = ws.compile(lambda: (comm.get_world_size(),), backend=counter, split="buckets")
    assert compiled() == compiled() == (1,)


def test_a_whole_step_is_split_where_its_communication_starts() -> None:
    """A graph for each bucket of the forward and of the backward; the update is with the last."""
    model = Toy()
    other = copy.deepcopy(model)

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    counter = CompileCounter()
    compiled = ws.compile(step, backend=counter, split="buckets", fullgraph=True)
    for one, run in ((DDP(model, bucket_cap_mb=0.25), compiled), (DDP(other, bucket_cap_mb=0.25), step)):
        opt = torch.optim.AdamW(one.parameters())
        for _ in range(3):
            run(one, opt, VECTORS)
    assert all(map(torch.equal, model.parameters(), other.parameters())) and counter.frame_count == 6
    updates = ["param_groups" in gm.code for gm in counter.graphs]
    assert updates[:5] == [False] * 5 and updates[5]


def test_hf_bert_split() -> None:
    """Three layers with dropout; without a wrapper, buckets are of 1 and of 25 MiB."""
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    model = AutoModelForMaskedLM.from_config(config).train()
    given = {key: torch.randint(0, 60, (2, 8)) for key in ("input_ids", "labels")}
    alone, unwrapped = CompileCounter(), copy.deepcopy(model)
    ws.compile(unwrapped, backend=alone, split="buckets", fullgraph=True)(**given)
    assert alone.frame_count == 2
    wrapped, counter = DDP(model, bucket_cap_mb=0.01), CompileCounter()
    found = []
    for run in (wrapped, ws.compile(wrapped, backend=counter, split="buckets", fullgraph=True)):
        found.append(left_by(model, lambda x, run=run: run(**x).loss, given))  # type: ignore[arg-type,misc]
    assert all(map(torch.equal, *found)) and counter.frame_count >= 6


def test_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match='split is "buckets" or None, found \'layers\''):
        ws.compile(Toy(), split="layers")
