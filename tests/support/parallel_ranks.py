"""What ranks run for the tests of wrappers: training beside torch's own wrapper, and beside the naive form."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

from tests.support.parallel_models import Branches, Checkpointed, MixedDtypes, Net, SharedGradients, Tied, loss_of, rows
from wholestep import comm, parallel
from wholestep.parallel import DistributedDataParallel, GradBucket, PowerSGDState, reducer

SMALL = 0.0005  # MiB: buckets of a layer each
# from which size on gradients are sent from where they lie, and whether at the end or beside the backward
WAYS = [(2**20, False), (0, True), (0, False)]

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Net, {}),
    "many buckets": (Net, {"bucket_cap_mb": SMALL}),
    "views": (Net, {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}),
    "no buffers": (Net, {"broadcast_buffers": False}),
    "tied": (Tied, {"bucket_cap_mb": SMALL}),
    "shared gradients": (SharedGradients, {"bucket_cap_mb": 0.0001}),
    "mixed dtypes": (MixedDtypes, {"bucket_cap_mb": SMALL}),
    "mixed dtypes, views": (MixedDtypes, {"gradient_as_bucket_view": True}),
    "unused": (Branches, {"find_unused_parameters": True, "bucket_cap_mb": SMALL}),
    "unused, views": (Branches, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "static": (Net, {"static_graph": True}),
    "static, unused": (partial(Checkpointed, unused=True), {"static_graph": True, "gradient_as_bucket_view": True}),
    "checkpoint": (Checkpointed, {}),
    "checkpoint, reentrant": (partial(Checkpointed, reentrant=True), {"bucket_cap_mb": SMALL}),
    "checkpoint twice": (partial(Checkpointed, times=2, unused=True), {"find_unused_parameters": True}),
    "checkpoint twice, shared": (
        partial(Checkpointed, True, times=2, shared=True), {"static_graph": True, "bucket_cap_mb": SMALL},
    ),
}  # fmt: skip


@contextmanager
def stock_world(store: str) -> Iterator[None]:
    """torch.distributed beside ours, on Gloo."""
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(wrap: Callable[[nn.Module], Any], make: Callable[[], nn.Module], iterations: int = 4) -> list[torch.Tensor]:
    """All parameters, gradients, buffers and losses on the way; each second iteration accumulates first."""
    rank = comm.get_rank()
    torch.manual_seed(rank)  # others at the start, too: rank 0's count
    wrapped = wrap(make())
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    seen: list[torch.Tensor] = []
    for iteration in range(iterations):
        batch = rows(rank, iteration)
        choice = (iteration + 2 * rank,) if isinstance(wrapped.module, Branches) else ()
        if iteration % 2:
            with wrapped.no_sync():
                loss_of(wrapped(batch.flip(0), *choice)).backward()
        loss = loss_of(wrapped(batch, *choice))
        loss.backward()
        grads = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in wrapped.parameters()]
        seen += [loss.detach(), *grads]
        opt.step()
        opt.zero_grad(set_to_none=iteration < 2)
        seen += [one.clone() for one in wrapped.state_dict().values()]
    return seen


def naive_gradients(module: nn.Module) -> None:
    """The oracle: after the backward, one all-reduce for each parameter; those that nobody used keep what they have."""
    for one in module.parameters():
        grad = torch.zeros_like(one) if one.grad is None else one.grad
        used = torch.tensor(float(one.grad is not None))
        comm.all_reduce(grad)
        comm.all_reduce(used)
        one.grad = grad / comm.get_world_size() if used else None


def beside_naive(make: Callable[[], nn.Module], settings: dict[str, Any], iterations: int = 3) -> float:
    """The largest difference of gradients from the naive form's; infinite where one has a gradient and one has none."""
    rank, worst = comm.get_rank(), 0.0
    torch.manual_seed(rank)
    ours = DistributedDataParallel(make().double(), **settings)
    naive = copy.deepcopy(ours.module)
    for iteration in range(iterations):
        choice = (iteration + 2 * rank,) if isinstance(naive, Branches) else ()
        for module in (naive, ours):
            module.zero_grad()
            loss_of(module(rows(rank, iteration).double(), *choice)).backward()
        naive_gradients(naive)
        for one, other in zip(naive.parameters(), ours.parameters(), strict=True):
            if one.grad is None or other.grad is None:
                worst = worst if one.grad is other.grad is None else math.inf
            else:
                worst = max(worst, float((one.grad - other.grad).abs().max()))
    return worst


def as_naive() -> list[float]:
    record = partial(Branches, record=True)
    found = [beside_naive(Net, {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": view}) for view in (False, True)]
    return [*found, beside_naive(record, {"find_unused_parameters": True})]


def mistakes() -> dict[str, str]:
    """The error that each mistake gets."""
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "no error"
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def unused() -> None:
        wrapped = DistributedDataParallel(Branches(), broadcast_buffers=False)
        for _ in range(2):
            loss_of(wrapped(torch.ones(2, 8), 1)).backward()

    def used_twice() -> None:
        wrapped = DistributedDataParallel(Checkpointed(True, times=2))
        loss_of(wrapped(torch.ones(2, 8))).backward()

    def hooked(hook: Any) -> None:
        wrapped = DistributedDataParallel(nn.Linear(8, 2))
        wrapped.register_comm_hook(None, hook)
        loss_of(wrapped(torch.ones(2, 8))).backward()

    def short(state: Any, bucket: GradBucket) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer()[:3])
        return future

    rank = comm.get_rank()
    note("differ", lambda: DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + rank))))
    note("fewer", lambda: DistributedDataParallel(nn.Linear(2, 3, bias=rank == 0)))
    note("frozen", lambda: DistributedDataParallel(nn.Linear(2, 3).requires_grad_(False)))
    note("meta", lambda: DistributedDataParallel(nn.Linear(2, 3, device="meta")))
    note("device_ids", lambda: DistributedDataParallel(nn.Linear(2, 3), device_ids=[0]))
    note("unused", unused)
    note("used twice", used_twice)
    note("shape", lambda: hooked(short))
    note("no future", lambda: hooked(lambda state, bucket: bucket.buffer()))
    note("no hook", lambda: hooked(3))
    return found


def ignores_and_saves() -> list[Any]:
    """An ignored parameter's gradient and value; whether own and foreign states of the wrapper load."""
    rank = comm.get_rank()
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2))
    nn.init.constant_(model[1].bias, rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    wrapped = DistributedDataParallel(model)
    (wrapped(torch.ones(1, 8)) * (rank + 1)).sum().backward()
    state = {name: torch.full_like(one, 2.0) for name, one in model.state_dict().items()}
    result = [model[1].bias.tolist(), model[1].bias.grad.tolist(), list(wrapped.state_dict())[0]]
    wrapped.load_state_dict(state)
    wrapped.load_state_dict(wrapped.state_dict())
    return [*result, model[0].weight.unique().tolist()]


def as_stock(store: str) -> dict[str, list[bool]]:
    """For each case and each way to send: whether all that is seen of it has the bits of torch's wrapper."""
    found: dict[str, list[bool]] = {}
    with stock_world(store):
        for name, (make, settings) in CASES.items():
            stock = trained(lambda one, s=settings: StockDDP(one, **s), make)
            for large_bytes, busy in WAYS:
                with patch.multiple(reducer, LARGE_BYTES=large_bytes, cores_are_busy=lambda _, busy=busy: busy):
                    ours = trained(lambda one, s=settings: DistributedDataParallel(one, **s), make)
                same = len(stock) == len(ours) and all(map(torch.equal, stock, ours))
                found.setdefault(name, []).append(same)
    return found


class Wide(nn.Module):
    """Matrices that are worth compressing, of which two have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def power_sgd(module: Any, hook: str, **settings: Any) -> tuple[Any, Any]:
    state = module.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1, **settings)
    return state, getattr(module, hook)


# name -> what makes state and hook, of a module that has them by torch's names; and how near results are
HOOKS: dict[str, tuple[Callable[[Any], tuple[Any, Any]], float]] = {
    "allreduce_hook": (lambda module: (None, module.allreduce_hook), 0),
    "fp16_compress_hook": (lambda module: (None, module.fp16_compress_hook), 0),
    "bf16_compress_hook": (lambda module: (None, module.bf16_compress_hook), 0),
    "fp16_compress_wrapper": (lambda module: (None, module.fp16_compress_wrapper(module.allreduce_hook)), 0),
    "bf16_compress_wrapper": (lambda module: (None, module.bf16_compress_wrapper(module.allreduce_hook)), 0),
    "noop_hook": (lambda module: (None, module.noop_hook), 0),
    "PowerSGD": (lambda module: power_sgd(module, "powerSGD_hook"), 1e-6),
    "PowerSGD, rank 4": (lambda module: power_sgd(module, "powerSGD_hook", matrix_approximation_rank=4), 1e-6),
    "PowerSGD, plain": (
        lambda module: power_sgd(module, "powerSGD_hook", use_error_feedback=False, warm_start=False), 1e-6,
    ),
    "PowerSGD, batches": (
        lambda module: power_sgd(module, "powerSGD_hook", batch_tensors_with_same_shape=True), 1e-6,
    ),
}  # fmt: skip
STOCK_HOOKS = SimpleNamespace(**(vars(debugging_hooks) | vars(default_hooks) | vars(powerSGD_hook)))


def hooks_as_stock(store: str) -> dict[str, list[bool]]:
    """For each hook: whether ours on our wrapper, torch's on ours and ours on torch's train as torch's on its own."""
    found: dict[str, list[bool]] = {}

    def with_hook(name: str, wrapper: Any, hooks: Any, make_hook: Any) -> Callable[[nn.Module], Any]:
        def wrap(module: nn.Module) -> Any:
            # with several buckets, torch's PowerSGD waits in Gloo's threads for what these are to do
            wrapped = wrapper(module, bucket_cap_mb=25 if "PowerSGD" in name else 0.002)
            state, hook = make_hook(hooks)
            # torch's wrapper refuses hooks by the names of those in bfloat16, which Gloo once had not
            wrapped.register_comm_hook(
                state, (lambda state, bucket: hook(state, bucket)) if "bf16" in hook.__name__ else hook
            )
            return wrapped

        return wrap

    with stock_world(store):
        for name, (make_hook, near) in HOOKS.items():
            ways = [(StockDDP, STOCK_HOOKS), (DistributedDataParallel, parallel)]
            ways += [(DistributedDataParallel, STOCK_HOOKS), (StockDDP, parallel)]
            stock, *others = (trained(with_hook(name, *way, make_hook), Wide, 6) for way in ways)
            found[name] = [
                all(torch.allclose(a, b, rtol=near, atol=near) for a, b in zip(stock, other, strict=True))
                for other in others
            ]
    return found


def many_power_sgd_buckets(hook: str) -> tuple[list[float], list[float], PowerSGDState]:
    """Losses with a bucket for each layer, compressed or not, and the state."""
    losses, states = [], []
    for start in (2, 1_000):
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(Wide(), bucket_cap_mb=SMALL)
        state = PowerSGDState(None, 4, start, min_compression_rate=1)
        wrapped.register_comm_hook(state, getattr(parallel, hook))
        opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for iteration in range(8):
            loss = loss_of(wrapped(rows(comm.get_rank(), iteration % 2)))
            loss.backward()
            opt.step()
            opt.zero_grad()
            total = loss.detach().clone()
            comm.all_reduce(total)
            losses.append(total.item())
        states.append(state)
    return losses[:8], losses[8:], states[0]
