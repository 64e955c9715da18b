"""Steps of models with buffers of every kind, run in every rank as stock DistributedDataParallel and under plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.support.spmd_programs import differences, mesh, seen, stock_group
from wholestep import comm

# Before torch 2.12, a broadcast of stock DDP's counts as a write to each buffer.
DDP_COUNTS = torch.__version__ < "2.12"


class Statistics(nn.Module):
    """BatchNorm, one of them frozen, and buffers that are integers, bools, halves, transposed, unread, unsaved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.frozen = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
        self.outer = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("scale", torch.rand(3), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("halves", torch.rand(5).to(torch.float16))
        self.register_buffer("unread", torch.rand(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale.mul_(0.9).add_(x.mean() * 0.1)
        return self.outer(self.frozen(self.norm(self.inner(x)).relu())) * self.scale.sum()


def plain(model, opt, x):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()


def pair(model, opt, x):
    """Two forwards for one backward."""
    (model(x[:3]) - model(x[3:])).square().mean().backward()
    opt.step()
    opt.zero_grad()


def accumulated(model, opt, x):
    for i in range(3):
        quiet = i < 2 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if quiet else contextlib.nullcontext():
            model(x[i::3]).square().mean().backward()
    opt.step()
    opt.zero_grad()


def clipped_twice(model, opt, x):
    """Gradients that are read between two backwards that add to them."""
    for i in range(2):
        model(x[i::2]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


def teacher(model, opt, x):
    with torch.no_grad():
        target = model(x) * 2
    (model(x) - target).square().mean().backward()
    opt.step()
    opt.zero_grad()


def looked_at(model, opt, x):
    """The last forward is without gradients, in training mode: the next call's first one does not broadcast."""
    plain(model, opt, x)
    with torch.no_grad():
        return model(x)


def evaluated(model, opt, x):
    model.train()
    plain(model, opt, x)
    model.eval()
    with torch.no_grad():
        return model(x)


def always_eval(model, opt, x):
    model.eval()
    plain(model, opt, x)


STEPS = [plain, accumulated, clipped_twice, teacher, looked_at, evaluated, always_eval]
if not DDP_COUNTS:
    STEPS.append(pair)  # a buffer that the first forward has saved
PLANS = {
    "DataParallel": ws.DataParallel("dp"),
    "ShardedOptimizer": ws.ShardedOptimizer("dp", min_bytes=1),
}


def run(step: Callable[..., Any], plan: Any = None, **ddp: Any) -> tuple[list[dict[str, Any]], Any]:
    """What a rank holds after each of three calls, between which it writes to its own buffers; and the step."""
    kept = not (plan.broadcast_buffers if plan is not None else ddp.get("broadcast_buffers", True))
    torch.manual_seed(0 if plan is None or kept else comm.get_rank())
    model = Statistics()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kept:
        torch.manual_seed(comm.get_rank())
        model.scale.uniform_()  # each rank's own from the start
    ours = step if plan is None else ws.compile(step, mesh=mesh(), plan=plan, fullgraph=True)
    given = DistributedDataParallel(model, **ddp) if plan is None else model
    torch.manual_seed(5 + comm.get_rank())
    found: list[dict[str, Any]] = []
    counted = {name: b._version for name, b in model.named_buffers()}
    for call in range(3):
        result = ours(given, opt, torch.randn(6, 3))
        now = seen(model, opt) | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        if call and not DDP_COUNTS:
            versions = {name: torch.tensor(b._version - counted[name]) for name, b in model.named_buffers()}
            now |= {f"version of {name}": times for name, times in versions.items()}
        found.append({name: one for name, one in (now | {"result": result}).items() if "state" not in name})
        counted = {name: b._version for name, b in model.named_buffers()}
        model.unread.add_(comm.get_rank() + 1)
        model.scale.add_(comm.get_rank())
    return found, ours


def everything(file: str) -> dict[str, Any]:
    with stock_group(file):
        found: dict[str, Any] = {}
        for step in STEPS:
            stock, _ = run(step)
            chosen = PLANS if step in (plain, accumulated) else {"DataParallel": PLANS["DataParallel"]}
            for name, plan in chosen.items():
                ours, compiled = run(step, plan)
                sent = [str(n.target) for n in compiled.graphs[0].graph.nodes if "broadcast" in str(n.target)]
                found[f"{step.__name__}, {name}"] = differences(stock, ours), len(sent)
        kept = {"broadcast_buffers": False}
        ours, compiled = run(plain, ws.DataParallel("dp", **kept))
        found["kept"] = differences(run(plain, **kept)[0], ours), "broadcast" in compiled.graphs[0].code
        torch.manual_seed(0)
        model = Statistics()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        explained = ws.compile(plain, mesh=mesh(), plan=PLANS["DataParallel"], fullgraph=True).explain(
            model, opt, torch.randn(6, 3)
        )
        return found | {"explain": str(explained)}
