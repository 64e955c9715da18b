"""What ranks run for the tests of SyncBatchNorm: beside BatchNorm on the batch of all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from tests.support.parallel_ranks import stock_world
from wholestep import comm
from wholestep.parallel import DistributedDataParallel, SyncBatchNorm

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d, long": (lambda: nn.BatchNorm1d(3, momentum=None), (3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3, eps=0.01, momentum=0.3), (3, 2, 4)),
    "3d": (lambda: nn.BatchNorm3d(3, affine=False), (3, 2, 2, 3)),
    "no statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 4)),
    "neither": (lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False), (3,)),
}
SHARES = {2: ([3, 4], [0, 5], [1, 1]), 4: ([2, 0, 1, 3], [0, 0, 2, 0])}  # rows of each rank


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return float((one.detach().double() - other.detach().double()).abs().max()) if one.numel() else 0.0


def beside_whole_batch(
    make: Callable[[], nn.Module], shape: tuple[int, ...], rows: list[int], group: comm.ProcessGroup,
    dtype: torch.dtype = torch.float64, channels_last: bool = False, needs_grad: bool = True,
) -> float:  # fmt: skip
    """The largest difference of outputs, gradients and buffers in three steps, the last in evaluation."""
    random = torch.Generator().manual_seed(0)  # ranks may be threads
    mine = slice(sum(rows[: group.rank()]), sum(rows[: group.rank() + 1]))
    whole, worst = make().to(torch.float64 if dtype is torch.float64 else torch.float32), 0.0
    if whole.weight is not None:
        nn.init.uniform_(whole.weight, generator=random)
        nn.init.uniform_(whole.bias, generator=random)
    synced = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole), group)
    for step in range(3 if whole.track_running_stats else 2):  # without, evaluation is by each rank's own
        for module in (whole, synced):
            module.zero_grad()
            module.train(step < 2)
        batch, factors = ((5 + torch.randn(sum(rows), *shape, generator=random)).to(dtype) for _ in range(2))
        inputs = [batch.clone(), batch[mine].clone()]
        if channels_last:
            inputs = [one.contiguous(memory_format=torch.channels_last) for one in inputs]
        outputs = [m(x.requires_grad_(needs_grad)) for m, x in zip((whole, synced), inputs, strict=True)]
        for output, factor in zip(outputs, (factors, factors[mine]), strict=True):
            if output.requires_grad:
                (output * factor).sum().backward()
        assert outputs[1].is_contiguous(memory_format=torch.channels_last) or not channels_last
        worst = max(worst, difference(outputs[0][mine], outputs[1]))
        if needs_grad:
            worst = max(worst, difference(inputs[0].grad[mine], inputs[1].grad))
        for one, other in zip(whole.parameters(), synced.parameters(), strict=True):
            comm.all_reduce(other.grad, group=group)
            worst = max(worst, difference(one.grad, other.grad))
        for one, other in zip(whole.buffers(), synced.buffers(), strict=True):
            worst = max(worst, difference(one, other))
    return worst


def cases() -> dict[str, float]:
    size, group = comm.get_world_size(), comm.get_group()
    found = {
        f"{name} {rows}": beside_whole_batch(make, shape, rows, group)
        for name, (make, shape) in LAYERS.items()
        for rows in SHARES[size]
        if sum(rows) > 2 or len(shape) > 1
    }
    make, shape = LAYERS["2d"]
    uneven = SHARES[size][0]
    found["channels last"] = beside_whole_batch(make, shape, uneven, group, channels_last=True)
    found["first layer"] = beside_whole_batch(make, shape, uneven, group, needs_grad=False)
    for dtype in (torch.bfloat16, torch.float16):  # to two units in the last place of the largest
        bound = 16 * torch.finfo(dtype).eps
        found[f"{dtype}"] = 1e-10 * beside_whole_batch(make, shape, uneven, group, dtype) / bound
    if size == 4:
        halves = [comm.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        mine = next(one for one in halves if one.rank() >= 0)
        found["groups"] = beside_whole_batch(make, shape, [2, 3], mine)
    return found


def seed_cases() -> list[float]:
    """The models of the seed's two tests: gradients where some ranks' inputs are empty, and all."""
    rank, found = comm.get_rank(), []
    models = nn.Sequential(nn.BatchNorm2d(2)), nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(28, 2))
    for model, shape, rows in zip(models, ((2, 11, 13), (2, 30, 30)), (1, 3), strict=True):
        wrapped = SyncBatchNorm.convert_sync_batchnorm(DistributedDataParallel(model))
        for own in (rows if rank else 0, 0):
            for needs_grad in (True, False):
                loss = wrapped(torch.zeros(own, *shape, requires_grad=needs_grad)).sum()
                loss.backward()
                found.append(float(loss.detach()) + sum(float(p.grad.sum()) for p in wrapped.parameters()))
    return found


def in_torchs_wrapper(store: str) -> list[float]:
    """Differences of gradients and statistics between torch's wrapper and ours around a converted model."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(4, 4) + comm.get_rank()
    with stock_world(store):
        results = []
        for wrapper in (StockDDP, DistributedDataParallel):
            wrapped = wrapper(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)))
            for _ in range(2):
                wrapped(x).square().sum().backward()
            results.append([*(p.grad for p in wrapped.parameters()), *(b.double() for b in wrapped.buffers())])
    return [difference(one, other) for one, other in zip(*results, strict=True)]


def mistakes() -> dict[str, str]:
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "no error"
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    class Activated(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    rank = comm.get_rank()
    note("one value", lambda: SyncBatchNorm(2)(torch.ones(rank, 2)))
    note("1d", lambda: SyncBatchNorm(2)(torch.ones(2)))
    note("no channels", lambda: SyncBatchNorm(0)(torch.ones(2, 0)))
    note("channels", lambda: SyncBatchNorm(2)(torch.ones(2, 3)))
    note("differ", lambda: SyncBatchNorm(2 + rank)(torch.ones(2, 2 + rank)))
    note("forward", lambda: SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Activated(2))))
    x = torch.randn(2, 2, requires_grad=True)
    note("twice", lambda: torch.autograd.grad(SyncBatchNorm(2)(x)[0, 0], x, create_graph=True))
    return found
