"""What ranks run for the tests of wrappers: training beside torch's own wrapper, and beside the naive form."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join as StockJoin
from torch.distributed.device_mesh import init_device_mesh as init_stock_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as StockDDP

import wholestep as ws
from tests.support.parallel_models import (
    Branches,
    Checkpointed,
    Halves,
    MixedDtypes,
    Net,
    RowsRead,
    SharedGradients,
    Sparse,
    Tied,
    loss_of,
    rows,
)
from wholestep import comm, parallel
from wholestep.comm import torch_backend
from wholestep.parallel import DistributedDataParallel, GradBucket, PowerSGDState, bucket_reduction

SMALL = 0.0005  # MiB: buckets of a layer each
# from which size on gradients are sent from where they lie, and whether at the end or beside the backward
WAYS = [(2**20, False), (0, True), (0, False)]

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Net, {}),
    "many buckets": (Net, {"bucket_cap_mb": SMALL}),
    "views": (Net, {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}),
    "two backwards": (Halves, {"bucket_cap_mb": SMALL}),
    "no buffers": (Net, {"broadcast_buffers": False}),
    "tied": (Tied, {"bucket_cap_mb": SMALL}),
    "shared gradients": (SharedGradients, {"bucket_cap_mb": 0.0001}),
    "sparse": (Sparse, {}),
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


def reduced_by(large_bytes: int, busy: bool) -> Any:
    """One of `WAYS`."""
    return patch.multiple(bucket_reduction, LARGE_BYTES=large_bytes, cores_are_busy=lambda _: busy)


@contextmanager
def stock_world(store: str) -> Iterator[None]:
    """torch.distributed beside ours, on Gloo."""
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mean_of_squares(model: nn.Module, x: torch.Tensor) -> Any:
    model(x).square().mean().backward()
    return model.weight.grad


def in_the_world_of_torch(store: str) -> list[bool]:
    """Whether gradients are torch's in scripts that have made its process group alone."""
    x, model, found = torch.full((2, 3), comm.get_rank() + 1.0), nn.Linear(3, 2), []
    nn.init.constant_(model.weight, 0.5)
    with stock_world(store):
        comm.destroy_process_group()
        for wrap in (DistributedDataParallel, parallel.fully_shard):
            ours, stock = copy.deepcopy(model), copy.deepcopy(model)
            for one in (StockDDP(stock), wrap(ours)):
                one(x).square().mean().backward()
            rows = slice(None) if wrap is DistributedDataParallel else slice(dist.get_rank(), dist.get_rank() + 1)
            found.append(torch.equal(ours.weight.grad, stock.weight.grad[rows]))
            comm.destroy_process_group()
        whole = DistributedDataParallel(copy.deepcopy(model), process_group=dist.group.WORLD)
        for one in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
            one(x).square().mean().backward()
            found.append(torch.equal(one.module.weight.grad, stock.weight.grad))
        mesh = init_stock_mesh("cpu", (2,), mesh_dim_names=("dp",))
        planned = ws.compile(_mean_of_squares, mesh=mesh, plan=ws.DataParallel("dp"), fullgraph=True)
        for _ in range(2):
            found.append(torch.equal(planned(copy.deepcopy(model), x), stock.weight.grad))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]  # of Gloo, as all of this world
        for wrapped in (DistributedDataParallel(copy.deepcopy(model), process_group=alone) for _ in range(2)):
            own = copy.deepcopy(model)
            for one in (own, wrapped):
                one(x).square().mean().backward()
            found.append(torch.equal(wrapped.module.weight.grad, own.weight.grad))
        comm.destroy_process_group()
    assert torch_backend.dist is dist  # whose import registers the backend
    dist.init_process_group("shm", store=dist.FileStore(f"{store}.shm", 2), rank=int(x[0, 0]) - 1, world_size=2)
    whole = DistributedDataParallel(copy.deepcopy(model), process_group=dist.new_group())
    whole(x).square().mean().backward()
    own = DistributedDataParallel(copy.deepcopy(model))  # on our group; torch's optimizer is on its own, of these ranks
    with parallel.Join([own, ZeroRedundancyOptimizer(own.parameters(), torch.optim.SGD, lr=0.1)]):
        own(x).square().mean().backward()
    dist.destroy_process_group()
    return [*found, *(torch.equal(one.module.weight.grad, stock.weight.grad) for one in (whole, own))]


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
                loss_of(wrapped(batch.flip(0), *(one + 1 for one in choice))).backward()
        outputs = wrapped(batch, *choice)
        losses = [loss_of(one) for one in (outputs if isinstance(outputs, list) else [outputs])]
        for loss in losses:
            loss.backward()
        grads = [torch.zeros(1) if p.grad is None else p.grad.to_dense().clone() for p in wrapped.parameters()]
        seen += [losses[0].detach(), *grads]
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
    found.append(beside_naive(record, {"find_unused_parameters": True}))
    with patch.object(comm, "empty", side_effect=comm.DistBackendError("/dev/shm is full")):
        return [*found, beside_naive(Net, {})]


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

    def stepping() -> None:
        model = nn.Linear(8, 2)
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        DistributedDataParallel(model)(torch.ones(2, 8)).sum().backward()

    def used_twice(*times: int, say: bool = False, **settings: Any) -> None:
        wrapped = DistributedDataParallel(Checkpointed(True), **settings)
        if say:
            wrapped._set_static_graph()
        for wrapped.module.times in times:
            loss_of(wrapped(torch.ones(2, 8))).backward()

    def late() -> None:
        wrapped = DistributedDataParallel(nn.Linear(8, 2))
        wrapped(torch.ones(2, 8)).sum().backward()
        wrapped._set_static_graph()

    def made_sparse() -> None:
        wrapped = DistributedDataParallel(RowsRead(), broadcast_buffers=False)
        wrapped(torch.tensor([1, 2])).sum().backward()

    def changed(change: Callable[[nn.Module], Any], **settings: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2).requires_grad_(False)).double()
        wrapped = DistributedDataParallel(model, **settings)
        change(model)
        for _ in range(2):
            loss_of(wrapped(torch.ones(2, 8, dtype=next(model.parameters()).dtype))).backward()

    def loaded(model: nn.Module) -> None:
        model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)

    rank = comm.get_rank()
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    note("sparse", lambda: sparse.register_comm_hook(None, parallel.allreduce_hook))
    note("parts", lambda: DistributedDataParallel(parallel.fully_shard(nn.Linear(2, 3))))
    note("made sparse", made_sparse)
    note("differ", lambda: DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + rank))))
    note("fewer", lambda: DistributedDataParallel(nn.Linear(2, 3, bias=rank == 0)))
    note("frozen", lambda: DistributedDataParallel(nn.Linear(2, 3).requires_grad_(False)))
    note("meta", lambda: DistributedDataParallel(nn.Linear(2, 3, device="meta")))
    note("device_ids", lambda: DistributedDataParallel(nn.Linear(2, 3), device_ids=[0]))
    note("unused", unused)
    note("used twice", lambda: used_twice(2))
    note("not static", lambda: used_twice(1, 1, 2, static_graph=True))
    note("not static, as said", lambda: used_twice(1, 1, 2, say=True, find_unused_parameters=True))
    note("said late", late)
    note("optimizer", stepping)
    note("later twice", lambda: used_twice(1, 1, 2))
    note("loaded", lambda: changed(loaded))
    note("loaded, unused", lambda: changed(loaded, find_unused_parameters=True))
    note("converted", lambda: changed(nn.Module.float))
    note("unfrozen", lambda: changed(lambda model: model[1].weight.requires_grad_()))
    note("no hook", lambda: DistributedDataParallel(nn.Linear(8, 2)).register_comm_hook(None, 3))
    return found


def raising(state: Any, bucket: GradBucket) -> torch.futures.Future:
    raise ValueError(f"no more of bucket {bucket.index()}")


def short(state: Any, bucket: GradBucket) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer()[:3])
    return future


HOOKS_THAT_FAIL: dict[str, tuple[Any, Any]] = {  # those of rank 0 and of rank 1
    "raises": (raising, raising),
    "raises on one": (parallel.allreduce_hook, raising),
    "shape": (short, short),
    "short on one": (parallel.allreduce_hook, short),
    "no future": (lambda state, bucket: bucket.buffer(),) * 2,
}


def failing_hook(name: str) -> str:
    """The error where a hook fails that sends over a group of its own."""
    wrapped, others = DistributedDataParallel(nn.Linear(8, 2)), comm.new_group()
    wrapped.register_comm_hook(others, HOOKS_THAT_FAIL[name][comm.get_rank()])
    try:
        loss_of(wrapped(torch.ones(2, 8))).backward()
    except (RuntimeError, TypeError, ValueError) as error:
        comm.destroy_process_group()  # all groups have ended with it
        return f"{type(error).__name__}: {error}"
    return "no error"


def ignores_and_saves() -> list[Any]:
    """An ignored parameter's gradient and value; whether own and foreign states of the wrapper load; a later buffer."""
    rank = comm.get_rank()
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2))
    model.register_buffer("early", torch.zeros(1))
    nn.init.constant_(model[1].bias, rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    wrapped = DistributedDataParallel(model)
    model[0].register_buffer("later", torch.tensor([7.0 - rank]))
    del model.early
    (wrapped(torch.ones(1, 8)) * (rank + 1)).sum().backward()
    state = {name: torch.full_like(one, 2.0) for name, one in model.state_dict().items()}
    result = [model[1].bias.tolist(), model[1].bias.grad.tolist(), list(wrapped.state_dict())[0]]
    result.append(model[0].later.tolist())
    wrapped.load_state_dict(state)
    wrapped.load_state_dict(wrapped.state_dict())
    return [*result, model[0].weight.unique().tolist()]


def asked_for_gradients() -> list[Any]:
    """What `torch.autograd.grad` gives through wrappers, and a backward after it."""
    x, found = torch.full((1, 8), comm.get_rank() + 1.0), []
    for settings in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        wrapped = DistributedDataParallel(nn.Linear(8, 2), **settings)
        (own,) = torch.autograd.grad(wrapped(x).sum(), wrapped.module.weight)
        wrapped(x).sum().backward()
        found += own.unique().tolist(), wrapped.module.weight.grad.unique().tolist()
    return found


def used_around() -> list[Any]:
    """Gradients where a parameter that the forward does not use is used outside of it: on no rank, on both, on one."""
    x, rank, found = torch.full((1, 8), comm.get_rank() + 1.0), comm.get_rank(), []
    for ranks in ((), (0, 1), (0,)):
        module = nn.Linear(8, 2)
        module.register_parameter("other", nn.Parameter(torch.ones(3)))
        wrapped = DistributedDataParallel(module, find_unused_parameters=True)
        for _ in range(2):
            wrapped.zero_grad()
            around = (module.other * (rank + 1)).sum() if rank in ranks else torch.zeros(())
            (wrapped(x).sum() + around).backward()
        found += module.weight.grad.unique().tolist(), module.other.grad is not None and module.other.grad.tolist()
    return found


def as_stock(store: str) -> dict[str, list[bool]]:
    """For each case and each way to send: whether all that is seen of it has the bits of torch's wrapper."""
    found: dict[str, list[bool]] = {}
    with stock_world(store):
        for name, (make, settings) in CASES.items():
            stock = trained(lambda one, s=settings: StockDDP(one, **s), make)
            for large_bytes, busy in WAYS:
                with reduced_by(large_bytes, busy):
                    ours = trained(lambda one, s=settings: DistributedDataParallel(one, **s), make)
                same = len(stock) == len(ours) and all(map(torch.equal, stock, ours))
                found.setdefault(name, []).append(same)
    return found


def logs_as_stock(store: str) -> list[dict[str, tuple[Any, Any]]]:
    """For each wrapper: the fields that torch's gives, before and after four iterations, with its value and ours.

    Without those of times, of Gloo, and of the number of iterations, which torch's counts now and then.
    """
    found = []
    with stock_world(store):
        for make, settings in ((Net, {"bucket_cap_mb": SMALL}), (MixedDtypes, {}), CASES["unused"], CASES["static"]):
            both = [wrapper(make(), **settings) for wrapper in (StockDDP, DistributedDataParallel)]
            for one in both:
                if settings:
                    one._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
            for iterations in (0, 4):
                for one in both:
                    for iteration in range(iterations):
                        loss_of(one(rows(0, iteration))).backward()
                stock, ours = (one._get_ddp_logging_data() for one in both)
                left = [name for name in stock if "time" in name or name.startswith("gloo") or name == "iteration"]
                found.append({name: (stock[name], ours.get(name)) for name in stock if name not in left})
                found[-1] |= {name: (0, ours.get(name, "missing") and 0) for name in left if "time" in name}
    return found


# model, settings, and each rank's number of batches
UNEVEN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[int]]] = {
    "plain": (Net, {}, [5, 2, 3, 5]),
    "many buckets": (Net, {"bucket_cap_mb": SMALL}, [2, 5, 1, 3]),
    "no batch": (Net, {"bucket_cap_mb": SMALL}, [0, 4, 3, 0]),
    "views": (Net, {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL}, [3, 1, 3, 1]),
    "unused": (Branches, {"find_unused_parameters": True}, [4, 2, 3, 4]),
    "static": (partial(Checkpointed, unused=True), {"static_graph": True, "bucket_cap_mb": SMALL}, [1, 4, 4, 2]),
}


def trained_unevenly(
    wrap: Callable[[nn.Module], Any], make: Callable[[], nn.Module], batches: list[int], join: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Losses on the way, parameters and buffers at the end. Each third iteration accumulates.

    Args:
        join: the context manager for the wrapper beside torch's optimizer that takes part, too.
    """
    rank = comm.get_rank()
    torch.manual_seed(rank)
    wrapped = wrap(make().double())
    kind = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD) if join else torch.optim.SGD
    opt: Any = kind(wrapped.parameters(), lr=0.1)
    seen = []
    with join([wrapped, opt], **options) if join else wrapped.join(**options):
        for iteration in range(batches[rank]):
            batch = rows(rank, iteration).double()
            choice = (iteration + 2 * rank,) if isinstance(wrapped.module, Branches) else ()
            with wrapped.no_sync() if iteration % 3 == 1 else nullcontext():
                loss = loss_of(wrapped(batch, *choice))
                loss.backward()
            seen.append(loss.detach())
            opt.step()
            opt.zero_grad(set_to_none=False)
    return seen + [one.clone() for one in wrapped.state_dict().values()]


def uneven_as_stock(store: str) -> dict[str, list[float]]:
    """The largest difference from torch's wrapper, for each way to divide and to send."""
    found: dict[str, list[float]] = {}
    with stock_world(store):
        for name, (make, settings, batches) in UNEVEN.items():
            for initial in (True, False):
                stock = trained_unevenly(
                    lambda one, s=settings: StockDDP(one, **s), make, batches, divide_by_initial_world_size=initial
                )
                for large_bytes, busy in WAYS:
                    with reduced_by(large_bytes, busy):
                        ours = trained_unevenly(
                            lambda one, s=settings: DistributedDataParallel(one, **s), make, batches,
                            divide_by_initial_world_size=initial,
                        )  # fmt: skip
                    pairs = zip(stock, ours, strict=True)
                    found.setdefault(name, []).append(max(float((a - b).abs().max()) for a, b in pairs))
        ways = (StockDDP, StockJoin), (DistributedDataParallel, parallel.Join)
        pairs = zip(*(trained_unevenly(wrap, Net, [2, 4, 3, 4], join) for wrap, join in ways), strict=True)
        found["beside torch's optimizer"] = [max(float((a - b).abs().max()) for a, b in pairs)]
    return found


class Counter(parallel.Joinable, parallel.JoinHook):
    """Counts the iterations of all ranks, by an all-reduce in each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last = [], None
        self.join_device, self.join_process_group = torch.device("cpu"), comm.get_group(None)

    join_device, join_process_group = None, None  # type: ignore[assignment]

    def join_hook(self, **options: Any) -> parallel.JoinHook:
        self.options = options
        return self

    def step(self, mine: int = 1) -> None:
        if mine:
            parallel.Join.notify_join_context(self)
        total = torch.tensor(mine)
        comm.all_reduce(total)
        self.seen.append(int(total))

    def main_hook(self) -> None:
        self.step(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.last = is_last_joiner


def joins() -> dict[str, Any]:
    """What else `Join` does: several joinables, evaluation inside, its errors."""
    rank, found, counter = comm.get_rank(), {}, Counter()
    wrapped = DistributedDataParallel(Net())
    with parallel.Join([wrapped, counter], divide_by_initial_world_size=False, more=3):
        for iteration in range(2 + rank):
            loss_of(wrapped(rows(rank, iteration))).backward()
            counter.step()
    sparse = DistributedDataParallel(Sparse())
    with sparse.join():  # torch's fails with sparse gradients
        for iteration in range(2 + rank):
            loss_of(sparse(rows(rank, iteration))).backward()
    with wrapped.join():
        for iteration in range(2 + rank):
            loss_of(wrapped(rows(rank, iteration))).backward()
            with torch.no_grad():
                wrapped(rows(rank, iteration))
    found["counted"], found["last"], found["options"] = counter.seen, counter.last, counter.options
    counter.step()
    found["after"] = counter.seen[-1]

    def early() -> None:
        with wrapped.join(throw_on_early_termination=True):
            for iteration in range(2 + rank):
                loss_of(wrapped(rows(rank, iteration))).backward()

    def groups() -> None:
        other = DistributedDataParallel(nn.Linear(2, 2), process_group=comm.new_group([0, 1]))
        parallel.Join([wrapped, other])

    def without() -> None:
        plain = DistributedDataParallel(nn.Linear(8, 2))
        for iteration in range(2 + rank):
            loss_of(plain(rows(rank, iteration))).backward()
        comm.barrier()

    for name, call in {"early": early, "groups": groups, "none": lambda: parallel.Join([]), "without": without}.items():
        try:
            call()
            found[name] = "no error"
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
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


def local_sgd(module: Any, **settings: Any) -> tuple[Any, Any]:
    group = comm.get_group(None) if module is parallel else dist.group.WORLD
    return module.PostLocalSGDState(None, group, 3, **settings), module.post_localSGD_hook


# name -> what makes state and hook, of a module that has them by torch's names; and how near results are
HOOKS: dict[str, tuple[Callable[[Any], tuple[Any, Any]], float]] = {
    "allreduce_hook": (lambda module: (None, module.allreduce_hook), 0),
    "fp16_compress_hook": (lambda module: (None, module.fp16_compress_hook), 0),
    "bf16_compress_hook": (lambda module: (None, module.bf16_compress_hook), 0),
    "fp16_compress_wrapper": (lambda module: (None, module.fp16_compress_wrapper(module.allreduce_hook)), 0),
    "bf16_compress_wrapper": (lambda module: (None, module.bf16_compress_wrapper(module.allreduce_hook)), 0),
    "noop_hook": (lambda module: (None, module.noop_hook), 0),
    "post_localSGD_hook": (lambda module: local_sgd(module), 0),
    "post_localSGD_hook, alone": (lambda module: local_sgd(module, post_local_gradient_allreduce=False), 0),
    "PowerSGD": (lambda module: power_sgd(module, "powerSGD_hook"), 1e-6),
    "PowerSGD, rank 4": (lambda module: power_sgd(module, "powerSGD_hook", matrix_approximation_rank=4), 1e-6),
    "PowerSGD, plain": (
        lambda module: power_sgd(module, "powerSGD_hook", use_error_feedback=False, warm_start=False), 1e-6,
    ),
    "PowerSGD, batches": (
        lambda module: power_sgd(module, "powerSGD_hook", batch_tensors_with_same_shape=True), 1e-6,
    ),
}  # fmt: skip
STOCK = debugging_hooks, default_hooks, post_localSGD_hook, powerSGD_hook, quantization_hooks
STOCK_HOOKS = SimpleNamespace(**{name: one for module in STOCK for name, one in vars(module).items()})


def hooks_as_stock(store: str) -> dict[str, list[bool]]:
    """For each hook: whether ours on our wrapper, torch's on ours and ours on torch's train as torch's on its own."""
    found: dict[str, list[bool]] = {}

    def with_hook(cap: float, wrapper: Any, hooks: Any, make_hook: Any) -> Callable[[nn.Module], Any]:
        def wrap(module: nn.Module) -> Any:
            wrapped = wrapper(module, bucket_cap_mb=cap)
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
            for cap in (25, 0.002) if "PowerSGD" in name else (0.002,):
                # torch's PowerSGD in torch's wrapper hangs with several buckets
                some = ways[1:] if "PowerSGD" in name and cap < 25 else ways
                first, *others = (trained(with_hook(cap, *way, make_hook), Wide, 6) for way in some)
                found.setdefault(name, []).extend(
                    all(torch.allclose(a, b, rtol=near, atol=near) for a, b in zip(first, other, strict=True))
                    for other in others
                )
    return found


def quantized() -> dict[str, bool]:
    """For each hook: whether a bucket has the bits that torch's observers and the arithmetic of its hooks give.

    (These read futures as NCCL has them, and do not run on Gloo.)
    """
    found = {}
    gradients = [
        torch.randn(1200, generator=torch.Generator().manual_seed(rank)) * rank for rank in range(comm.get_world_size())
    ]  # rank 0's are zeros
    ways = [("tensor", MinMaxObserver, 1200), ("channel", PerChannelMinMaxObserver, 512)]
    for kind, observer, length in ways:
        quantize = getattr(quantization_hooks, f"_quantize_per_{kind}_backend")
        restore = getattr(quantization_hooks, f"_dequantize_per_{kind}_backend")
        total = torch.zeros(1200)
        for one in gradients:
            channels = nn.functional.pad(one, (0, -1200 % length)).view(-1, length)
            given = channels.view(-1) if kind == "tensor" else channels
            watch = observer()
            watch(given)
            step, zero = (number.float() for number in watch.calculate_qparams())
            total += restore(quantize(given, step, zero), step, zero).flatten()[:1200]
        bucket = GradBucket(0, True, gradients[comm.get_rank()].clone(), [])
        result = getattr(parallel, f"quantization_per{kind}_hook")(None, bucket).wait()
        found[kind] = torch.equal(result, total / len(gradients))
    return found


def averaged() -> dict[str, Any]:
    """After which steps ranks have equal weights: post-local SGD averages every second one after the first."""
    rank = comm.get_rank()
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    state = parallel.PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, parallel.post_localSGD_hook)
    averager = parallel.PeriodicModelAverager(2, warmup_steps=1)
    opt = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    optimizers = importlib.import_module("torch.distributed.optim")  # half a second, which no other test needs
    stock = optimizers.PostLocalSGDOptimizer(opt, averager)  # takes an averager of ours
    equal = []
    for iteration in range(5):
        (wrapped(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        if iteration % 2:
            stock.step()
        else:
            opt.step()
            averager.average_parameters(wrapped.parameters())
        opt.zero_grad()
        every = [torch.empty(1, 2) for _ in range(comm.get_world_size())]
        comm.all_gather(every, wrapped.module.weight.detach())
        equal.append(all(torch.equal(one, every[0]) for one in every))
    within_host = parallel.PostLocalSGDState(None, None, 0)
    parallel.post_localSGD_hook(within_host, GradBucket(0, True, torch.ones(2), [])).wait()
    return {"equal": equal, "step": averager.step, "host": within_host.subgroup.size()}


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
