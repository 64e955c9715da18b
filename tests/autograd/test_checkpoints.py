"""`torch.utils.checkpoint` with random numbers inside: gradients are eager's, under Dynamo's front end and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import wholestep as ws
from tests.support.spmd_programs import stock_group
from wholestep.autograd import aot_function, dynamo_backend, min_cut_partition
from wholestep.testing import run_ranks

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "in place": lambda x: x * torch.empty_like(x).uniform_(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None].sin(), x[None], dropout_p=0.4)[0],
}
FILLED = {"rrelu": lambda x: F.rrelu(x, training=True)}  # what is saved before the kernel fills it


class Block(nn.Module):
    def __init__(self, draw: str) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return (DRAWS | FILLED)[self.draw](self.linear(x))


class Model(nn.Module):
    """Blocks in checkpoints, one after the other or inside of one another, with other random numbers around them."""

    def __init__(self, draw: str, nested: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(draw) for _ in range(2))
        self.nested, self.options = nested, {"use_reentrant": False, **options}

    def inner(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)  # type: ignore[assignment]
        return x.sin()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, **self.options) if self.nested else self.inner(x)  # type: ignore[assignment]
        return x * F.dropout(x, 0.3)


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.two(F.dropout(self.one(x), 0.5)).sin(), 0.5)


class Normalised(nn.Module):
    """The recomputation writes the buffers once more, after another call has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(impl: CheckpointImpl) -> nn.Module:
    return nn.Sequential(*(checkpoint_wrapper(Block("dropout"), checkpoint_impl=impl) for _ in range(2)))


def train(model: nn.Module, call: Any, x: Tensor, steps: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    seen = []
    for _ in range(steps):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out = call(leaf) + call(leaf * 2)
        out.square().sum().backward()
        seen += [out.detach().clone(), leaf.grad, torch.rand(3)]
        seen += map(torch.clone, model.buffers())
        seen += [p.grad for p in model.parameters() if p.grad is not None]
    return seen


def through_aot_function(gm: Any, inputs: Any) -> Any:
    return aot_function(gm, lambda graph, inputs: graph, partition_fn=min_cut_partition)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{draw: functools.partial(Model, draw) for draw in DRAWS},
    "nested": lambda: Model("dropout", nested=True),
    "reentrant": lambda: Model("dropout", use_reentrant=True),
    "reentrant, filled": lambda: Model("rrelu", use_reentrant=True),
    "reentrant, other numbers again": lambda: Model("dropout", use_reentrant=True, preserve_rng_state=False),
    "reentrant, nested": lambda: Model("rand_like", nested=True, use_reentrant=True),
    "other numbers again": lambda: Model("dropout", nested=True, preserve_rng_state=False),
    "no check": lambda: Model("rand_like", determinism_check="none", early_stop=False),
    "selective": Selective,
    "buffers": Normalised,
    "wrapper": lambda: wrapped(CheckpointImpl.NO_REENTRANT),
    "reentrant wrapper": lambda: wrapped(CheckpointImpl.REENTRANT),
}


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_with_random_numbers(name: str) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name](), torch.randn(4, 8)
    expected = train(model, model, x)
    # a partition that recomputes may save what buffers were, so that autograd refuses the second call's backward
    ways: list[Any] = [dynamo_backend] if name == "buffers" else [dynamo_backend, through_aot_function]
    for backend in ways:
        torch._dynamo.reset()
        found = train(model, torch.compile(model, backend=backend), x)
        assert all(map(torch.equal, found, expected)), backend
    assert all(map(torch.equal, train(model, ws.compile(model, fullgraph=True), x), expected))


def differing(file: str) -> list[str]:
    """The stock wrappers under which gradients differ from eager's."""
    with stock_group(file):
        return list(_differing())


def _differing() -> Iterator[str]:
    dist._DEFAULT_FIRST_BUCKET_BYTES = 200  # type: ignore[attr-defined]
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": lambda m: DistributedDataParallel(m, bucket_cap_mb=0.0003),  # type: ignore[arg-type]
        "fsdp": lambda m: FullyShardedDataParallel(m, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
                                                   device_id=torch.device("cpu")),
    }  # fmt: skip
    x = torch.randn(4, 8)
    for wrapper, wrap in wrappers.items():
        for reentrant in (False, True):
            found = []
            for compiled in (False, True):
                torch._dynamo.reset()
                torch.manual_seed(3)
                model = wrap(Model("dropout", use_reentrant=reentrant))
                found.append(train(model, torch.compile(model, backend=dynamo_backend) if compiled else model, x))
            if not all(map(torch.equal, *found)):
                yield f"{wrapper}, reentrant={reentrant}"


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_with_random_numbers_under_stock_wrappers(tmp_path: Path) -> None:
    assert run_ranks(differing, 2, args=(str(tmp_path / "meet"),)) == [[], []]


class Own(torch.autograd.Function):
    """A checkpoint of a library's own, as memcnn's, which asks how its backward was called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Own is not compatible with .grad(), please use .backward() if possible")
        x, w = ctx.saved_tensors
        return grad * w, grad * x


def test_checkpoints_of_libraries_that_ask_how_their_backward_is_called() -> None:
    def trained(compile: Any) -> Tensor:
        w = torch.ones(3, requires_grad=True)
        compiled = compile(lambda x: Own.apply(x, w) * 2)
        for _ in range(2):
            compiled(torch.full((3,), 2.0)).sum().backward()
        assert w.grad is not None
        return w.grad

    assert torch.equal(trained(lambda function: function), trained(ws.compile))


class Frozen(nn.Module):
    """Embeddings that are not trained, before a part that is: its gradients, or a hook, begin at what is made."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.seen = way, list[Tensor]()
        self.table, self.inner, self.outer = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.table.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x).requires_grad_()
        if self.way == "leaf":
            hidden.register_hook(lambda grad: self.seen.append(grad.clone()))
        later = hidden.sin()
        if self.way == "node":
            later.register_hook(lambda grad: self.seen.append(grad.clone()))
        hidden = Beside.apply(later, self.inner) if self.way == "function" else self.inner(later)
        if self.way == "reentrant":
            hidden = checkpoint(self.inner, later, use_reentrant=True)
        return self.outer(hidden)


class Beside(torch.autograd.Function):
    """A checkpoint of a library's own, as fairscale's, which is not given the weights of what it calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.module(x).backward(grad)
        return x.grad, None


@pytest.mark.parametrize("way", ["reentrant", "function", "leaf", "node"])
def test_what_runs_in_a_backward_and_leads_to_no_input(way: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Frozen(way)
        call = ws.compile(model) if compiled else model
        for _ in range(2):
            call(torch.tensor([1, 5, 2])).square().sum().backward()
        assert not compiled or bool(call.breaks) == (way != "reentrant")
        found.append([*model.inner.parameters(), *model.outer.parameters()])
        found[-1] = [p.grad for p in found[-1]] + model.seen
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


def test_gradients_beside_a_functions_results_in_a_whole_step() -> None:
    found = []
    for compile in (lambda step: step, functools.partial(ws.compile, fullgraph=True)):
        torch.manual_seed(0)
        model = Frozen("function")

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().sum()  # noqa: B023
            loss.backward()
            return loss  # with a history that is gone

        run = compile(step)
        found.append([run(torch.tensor([1, 5, 2])), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == 5 and all(map(torch.equal, *found))


def test_what_a_selective_checkpoint_refuses_is_said_as_in_eager() -> None:
    def keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_all)

    def dropped(x: Tensor) -> Any:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).sin(), x, use_reentrant=False, context_fn=contexts)

    for run in (dropped, ws.compile(dropped, fullgraph=True)):
        with pytest.raises(RuntimeError, match="selective activation checkpoint has been mutated"):
            run(torch.ones(3, requires_grad=True)).sum().backward()
