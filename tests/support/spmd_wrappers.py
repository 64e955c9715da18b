"""Programs that every rank runs: wrapped modules, averages of weights, gradients that no plan reduces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholestep as ws
from tests.support.spmd_agreement import error
from tests.support.spmd_programs import mesh, stock_group
from wholestep import comm


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def fsdp2() -> nn.Module:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DistributedDataParallel": lambda: DistributedDataParallel(net()),
    "inside": lambda: nn.Sequential(DistributedDataParallel(net()), nn.Linear(4, 2)),
    "subclass": lambda: type("Own", (DistributedDataParallel,), {})(net()),
    "FSDPModule": fsdp2,
    "FullyShardedDataParallel": lambda: FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
}
COMPILED: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: torch.compile(net(), backend="aot_eager"),
    "inside": lambda: nn.Sequential(torch.compile(net(), backend="aot_eager"), nn.Dropout(0.5)),
    "in place": lambda: (model := net(), model.compile(backend="aot_eager"))[0],
}


def train(model, opt, x):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()


def wrapped() -> dict[str, str]:
    found = {}
    for name, make in WRAPPED.items():
        model = make()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = ws.compile(train, fullgraph=True)
        found[name] = error(lambda model=model, opt=opt, whole=whole: whole(model, opt, torch.randn(2, 8)))
        found[f"{name}, alone"] = error(lambda model=model: ws.compile(model, fullgraph=True)(torch.randn(2, 8)))
    return found


def compiled() -> dict[str, bool]:
    """Modules under `torch.compile` inside of a compiled step: as without it."""
    found = {}
    for name, make in COMPILED.items():
        ends = []
        for step in (train, ws.compile(train, fullgraph=True)):
            model = make()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(3)
            for _ in range(2):
                step(model, opt, torch.randn(2, 8))
            ends.append([p.detach() for p in model.parameters()])
        found[name] = all(map(torch.equal, *ends))
    return found


def lerp(averages, model, opt):
    for old, new in zip(averages.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 0.1)


def mul_add(averages, model, opt):
    for old, new in zip(averages.parameters(), model.parameters(), strict=True):
        old.mul_(0.9).add_(new, alpha=0.1)


def foreach(averages, model, opt):
    torch._foreach_lerp_(list(averages.parameters()), list(model.parameters()), 0.1)


def difference(averages, model, opt):
    for old, new in zip(averages.parameters(), model.parameters(), strict=True):
        old.sub_((old - new) * 0.1)


def through_data(averages, model, opt):
    for old, new in zip(averages.parameters(), model.parameters(), strict=True):
        old.data.copy_(new.data * 0.5)


def in_the_state(averages, model, opt):
    for parameter, old in zip(model.parameters(), averages.parameters(), strict=True):
        opt.state[parameter].setdefault("average", torch.zeros_like(parameter)).mul_(0.9).add_(parameter, alpha=0.1)
        old.add_(opt.state[parameter]["average"])


def of_each_other(averages, model, opt):
    """A trained parameter that changes by another one's new value."""
    model[0].bias.add_(model[0].weight.sum(1), alpha=0.1)


def averaged(averages, model, opt):
    averages.update_parameters(model)


AVERAGES = [lerp, mul_add, foreach, difference, through_data, in_the_state, of_each_other, averaged]


def averages() -> dict[str, bool]:
    """Averages of the weights under a sharded optimizer, against `DataParallel`, bit for bit."""
    found = {}
    for average in AVERAGES:

        def step(averages, model, opt, x, average=average):
            train(model, opt, x)
            with torch.no_grad():
                average(averages, model, opt)
            return [p.detach().norm() for p in model.parameters()]

        ends = []
        for plan in (ws.DataParallel("dp"), ws.ShardedOptimizer("dp", min_bytes=1)):
            model = net()
            kept = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if average is averaged else None
            kept = kept or copy.deepcopy(model)
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)
            run = ws.compile(step, mesh=mesh(), plan=plan, fullgraph=True)
            torch.manual_seed(5 + comm.get_rank())
            for _ in range(3):
                norms = run(kept, model, opt, torch.randn(2, 8))
            ends.append([*model.state_dict().values(), *kept.state_dict().values(), *norms])
        found[average.__name__] = all(map(torch.equal, *ends))
    return found


def refused() -> dict[str, str]:
    found = {}
    for plan in (ws.DataParallel("dp"), ws.ShardedOptimizer("dp"), ws.FullyShard("dp", min_bytes=1)):
        name = type(plan).__name__
        model = ws.compile(net(), mesh=mesh(), plan=plan, fullgraph=True)
        found[f"{name}, backward"] = error(lambda model=model: model(torch.randn(2, 8)).sum().backward())
        if plan.axis and name != "FullyShard":
            ours = ws.parallel.DistributedDataParallel(net())
            opt = torch.optim.SGD(ours.parameters(), lr=0.1)
            for whole in (True, False):
                step = ws.compile(train, mesh=mesh(), plan=plan, fullgraph=whole)
                found[f"{name}, {'replayed' if whole else 'co-run'} wrapper"] = error(
                    lambda step=step, ours=ours, opt=opt: step(ours, opt, torch.randn(2, 8))
                )
        table = nn.Embedding(10, 4, sparse=True)
        opt = torch.optim.SGD(table.parameters(), lr=0.1)
        step = ws.compile(train, mesh=mesh(), plan=plan, fullgraph=True)
        found[f"{name}, sparse"] = error(lambda step=step, table=table, opt=opt: step(table, opt, torch.tensor([1, 2])))
    return found


def everything(file: str) -> dict[str, Any]:
    with stock_group(file):
        found: dict[str, Any] = {"wrapped": wrapped()}
    return found | {"compiled": compiled(), "averages": averages(), "refused": refused()}
