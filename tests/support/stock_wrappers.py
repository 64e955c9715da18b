"""Programs that every rank runs: our compilers around torch's wrappers and ours, and inside of them, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.nn.parallel import DistributedDataParallel as StockDDP

import wholestep as ws
from tests.support.spmd_wrappers import stock_group
from wholestep import parallel


def layered(model: nn.Module, shard: Callable[[nn.Module], Any]) -> Any:
    shard(model[0])  # type: ignore[index]
    return shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch's DistributedDataParallel": StockDDP,
    "torch's fully_shard": lambda model: layered(model, stock_fully_shard),
    "torch's FullyShardedDataParallel": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "DistributedDataParallel": parallel.DistributedDataParallel,
    "fully_shard": lambda model: layered(model, parallel.fully_shard),
}
WAYS = [*((name, way) for name in WRAPPERS for way in ("module", "step", "inside")),
        ("torch's DistributedDataParallel", "torch.compile"), ("fully_shard", "torch.compile")]  # fmt: skip


def train(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss  # type: ignore[no-any-return]


def _ends(wrap: Callable[[nn.Module], Any], way: str) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    inner: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    inner = ws.compile(inner) if way == "inside" else inner
    model = wrapped = wrap(inner)
    if way in ("module", "torch.compile"):
        model = ws.compile(wrapped) if way == "module" else torch.compile(wrapped, backend="wholestep")
    step = ws.compile(train) if way == "step" else train
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3 + ws.comm.get_rank())
    left = [step(model, opt, torch.randn(5, 8)).detach().clone() for _ in range(3)]
    left += [getattr(p, "full_tensor", p.detach)().detach().clone() for p in model.parameters()]
    return left, {"module": model, "step": step}.get(way)


def everything(file: str) -> dict[tuple[str, str], Any]:
    """By wrapper and way: why its Python runs at each call; what is wrong, where anything is."""
    found: dict[tuple[str, str], Any] = {}
    with stock_group(file):
        wanted = {name: _ends(wrap, "")[0] for name, wrap in WRAPPERS.items()}
        for name, way in WAYS:
            have, compiled = _ends(WRAPPERS[name], way)
            found[name, way] = "".join(compiled.breaks if compiled is not None else [])
            if not all(map(torch.equal, wanted[name], have)):
                found[name, way] = "not as in eager"
    return found
