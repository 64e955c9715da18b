"""Programs that every rank runs: ranks of the global view that do, or do not, agree on what to run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.spmd_programs import adamw, mesh, plain
from tests.support.spmd_unsharded import Cut, close, mine, rows
from tests.zoo.nets import MLP, ConvNet
from wholestep import comm
from wholestep.spmd import Replicate
from wholestep.tensor_parts import part_of


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as found:  # noqa: BLE001 - whatever it says is looked at
        return f"{type(found).__name__}: {found}"
    return ""


def setup(step: Callable[..., Any] = plain, plan: Any = None) -> SimpleNamespace:
    g = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    model = MLP().double()
    opt = adamw(model)
    return SimpleNamespace(
        model=model,
        opt=opt,
        step=ws.compile(step, mesh=mesh(), plan=plan or Cut(), fullgraph=step is not printing),
        batch=lambda: rows(g),
    )


def image(model: nn.Module) -> list[Tensor]:
    return copy.deepcopy([p.detach() for p in model.parameters()])


def other_batches() -> dict[str, Any]:
    """Rank 1 alone has a shorter batch: at the first call, later, and when it captured that one before."""
    run, found = setup(), {}
    x, y = map(mine, run.batch())
    short = slice(0, 6 - comm.get_rank())
    found["first"] = error(lambda: run.step(run.model, run.opt, x[short], y[short]))
    found["good"] = error(lambda: run.step(run.model, run.opt, x, y))
    before = image(run.model)
    found["later"] = error(lambda: run.step(run.model, run.opt, x[short], y[short]))
    found["untouched"] = all(map(torch.equal, before, image(run.model)))
    found["both short"] = error(lambda: run.step(run.model, run.opt, x[:5], y[:5]))
    before = image(run.model)
    found["again"] = error(lambda: run.step(run.model, run.opt, x[short], y[short]))
    found["untouched"] &= all(map(torch.equal, before, image(run.model)))
    found["goes on"] = error(lambda: run.step(run.model, run.opt, x, y))
    found["captures"] = run.step.captures
    return found


def named(model, opt, x, y):
    if model.name == "nobody":
        raise ValueError("nobody trains this")
    return plain(model, opt, x, y)


def alone() -> dict[str, Any]:
    """Rank 1 alone captures anew, with the same program; then it cannot."""
    run, found = setup(named), {}
    x, y = map(mine, run.batch())
    run.model.name = "a"
    run.step(run.model, run.opt, x, y)
    run.step(run.model, run.opt, x, y)
    run.model.name = "ab"[comm.get_rank()]
    found["captures alone"] = error(lambda: run.step(run.model, run.opt, x, y))
    found["captures"] = run.step.captures
    before = image(run.model)
    run.model.name = ("a", "nobody")[comm.get_rank()]
    found["cannot"] = error(lambda: run.step(run.model, run.opt, x, y))
    found["untouched"] = all(map(torch.equal, before, image(run.model)))
    run.model.name = "a"
    found["goes on"] = error(lambda: run.step(run.model, run.opt, x, y))
    return found


def other_models() -> dict[str, str]:
    """Another activation, another layer, and rank 1 alone without parts."""
    found = {}
    for name, make in {
        "code": lambda: nn.Sequential(nn.Linear(6, 4), (nn.ReLU(), nn.GELU())[comm.get_rank()], nn.Linear(4, 4)),
        "shape": lambda: nn.Sequential(nn.Linear(6, 4 + comm.get_rank()), nn.ReLU()),
    }.items():
        model = make()
        step = ws.compile(lambda m, x: m(x).sum(), mesh=mesh(), plan=Cut(), fullgraph=True)
        found[name] = error(lambda model=model, step=step: step(model, torch.ones(2, 6)))
    return found


def other_plans() -> dict[str, str]:
    """Another plan, in the local view and in the global one; another optimizer; another mesh."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    first = comm.get_rank() == 0
    adam = torch.optim.AdamW(model.parameters()) if first else torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).sum().backward()
        opt.step()

    plans = ws.FullyShard("dp") if first else ws.DataParallel("dp")
    step = ws.compile(lambda m, x: m(x).sum(), mesh=mesh(), plan=plans, fullgraph=True)
    found = {"plan": error(lambda: step(model, x))}
    trained = ws.compile(train, mesh=mesh(), plan=ws.FullyShard("dp"), fullgraph=True)
    found["optimizer"] = error(lambda: trained(model, adam, x))
    ranks = [0, 1] if first else [1, 0]
    found["mesh"] = error(lambda: ws.DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)))
    return found


def randomness() -> bool:
    """Rank 0's random numbers on both ranks, which began with their own."""
    model = MLP(dropout=0.5).double()
    for p in model.parameters():
        p.data.fill_(0.5)
    x = torch.ones(6, 6, dtype=torch.float64)
    torch.manual_seed(100)
    expected = [model.logits(torch.cat([x, x])).sum() for _ in range(3)]
    torch.manual_seed(100 + comm.get_rank())
    step = ws.compile(lambda m, x: m.logits(x).sum(), mesh=mesh(), plan=Cut(), fullgraph=True)
    return all(close(step(model, x), one) for one in expected)


def other_randomness() -> dict[str, str]:
    """Rank 1 alone draws a number between two steps: seen before the third, and when it captures anew."""
    model, found = MLP(dropout=0.5).double(), {}
    step = ws.compile(lambda m, x: m.logits(x).sum(), mesh=mesh(), plan=Cut(), fullgraph=True)
    still = ws.compile(lambda m, x: m.fc1(x).sum(), mesh=mesh(), plan=Cut(), fullgraph=True)
    x = torch.ones(6, 6, dtype=torch.float64)
    found["good"] = error(lambda: [step(model, x) for _ in range(2)])
    torch.rand(comm.get_rank())
    found["drawn"] = error(lambda: step(model, x))
    found["captured anew"] = error(lambda: step(model, x[:3]))
    found["without randomness"] = error(lambda: [still(model, x) for _ in range(2)])
    torch.manual_seed(0)
    found["seeded"] = error(lambda: step(model, x))
    return found


def other_values() -> dict[str, str]:
    """Rank 1 alone has another number, or another batch where all have the whole one."""

    def train(model, x, scale):
        model.scale = scale
        return (model.fc1(x) * scale).sum()

    found = {}
    for name, plan in {"rows": Cut(), "whole": Cut(batch=Replicate())}.items():
        model, x = MLP().double(), torch.ones(6, 6, dtype=torch.float64) + comm.get_rank()
        step = ws.compile(train, mesh=mesh(), plan=plan, fullgraph=True)
        found[name] = error(lambda step=step, model=model, x=x: step(model, x, 1.0))
    step = ws.compile(train, mesh=mesh(), plan=Cut(), fullgraph=True)
    rank = comm.get_rank()
    found["numbers"] = error(lambda: [step(model, x, scale) for scale in (1.0, 2.0)])
    found["number"] = error(lambda: ws.compile(train, mesh=mesh(), plan=Cut(), fullgraph=True)(model, x, 1.0 + rank))
    found["other later"] = error(lambda: step(model, x, 3.0 + rank))
    for name, settings in {"rates": {}, "rates of DDP": {"plan": ws.DataParallel("dp")}, "rates read": {}}.items():
        run = setup(plain if name != "rates read" else printing, **settings)
        rates = [0.1, 0.2, 0.3, 0.3, 0.3 + rank]
        before, found[name] = [], ""
        for rate in rates:
            assert not found[name]
            run.opt.param_groups[0]["lr"], before = rate, image(run.model)
            found[name] = error(lambda run=run: run.step(run.model, run.opt, *map(mine, run.batch())))
        found[name] += "" if all(map(torch.equal, before, image(run.model))) else " BUT the model has changed"
    return found


class Scaled(nn.Module):
    """A layer with a buffer, and a tensor that is not registered."""

    def __init__(self):
        super().__init__()
        self.layer, self.free = nn.Linear(6, 4), torch.ones(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.layer(x) * self.scale * self.free


def replaced() -> dict[str, Any]:
    """Rank 1 alone replaces a buffer, or a tensor that is none, by other values and by the same; then both ranks do."""

    def replayed(model, x):
        return model(x).sum()

    def read(model, x):
        print(end="")
        return model(x).sum()

    found: dict[str, Any] = {}
    for step, name in [(step, name) for step in (replayed, read) for name in ("scale", "free")]:
        model, x = Scaled(), torch.ones(2, 6)
        compiled = ws.compile(step, mesh=mesh(), plan=Cut(), fullgraph=step is replayed)
        compiled(model, x)
        said = []
        for value in (1.0 + comm.get_rank(), 1.0, 2.0):
            if comm.get_rank() or value == 2.0:
                setattr(model, name, torch.full((4,), value))
            said.append(error(lambda model=model, x=x, compiled=compiled: compiled(model, x)))
        found[f"{step.__name__} {name}"] = said
    model.free = torch.ones(4) + comm.get_rank()
    found["free at first"] = error(lambda: ws.compile(replayed, mesh=mesh(), plan=Cut(), fullgraph=True)(model, x))
    return found


def printing(model, opt, x, y):
    print(end="")
    return plain(model, opt, x, y)


def refusals() -> dict[str, str]:
    """What needs a whole tensor that no rank has; all is as before afterwards."""

    def decides(model, x):
        return [model.logits(x) for _ in range(x.sum().long().item())]

    def resizes(model, x):
        model.fc1.weight.untyped_storage().resize_(0)

    def writes(model, x, y):
        x.add_(1)
        return y.sum()

    def counts(model, x, y):
        y.add_(1)
        return x.sum()

    found = {}
    for name, function in {"decides": decides, "resizes": resizes, "writes": writes, "counts": counts}.items():
        run = setup(function)
        x = mine(run.batch()[0]).clone()
        x = x if name != "counts" else x.long()
        before, shapes = image(run.model), [p.shape for p in run.model.parameters()]
        args = (x, x[:, 1:]) if name in ("writes", "counts") else (x,)
        found[name] = error(lambda run=run, args=args: run.step(run.model, *args))
        same = all(map(torch.equal, before, image(run.model))) and [p.shape for p in run.model.parameters()] == shapes
        found[name] += "" if same and x.shape == (6, 6) else " BUT SOMETHING CHANGED"
    return found


def layouts() -> dict[str, Any]:
    """Weights in channels_last, batches in containers that require gradients, several steps on one model."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    whole = ConvNet().double().to(memory_format=torch.channels_last)
    model = copy.deepcopy(whole)
    images = torch.randn(4, 3, 8, 8, generator=g, dtype=torch.float64)

    def train(model, batch, scale):
        x = batch["images"]
        loss = (model(x) * scale).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
        return loss.detach()

    step = ws.compile(train, mesh=mesh(), plan=Cut(), fullgraph=True)
    found: dict[str, Any] = {"wrong": []}
    for number in range(3):
        x = images.clone().to(memory_format=torch.channels_last).requires_grad_()
        part = mine(images).clone().to(memory_format=torch.channels_last).requires_grad_()
        expected = train(whole, {"images": x}, 0.5)
        if not close(step(model, {"images": part}, 0.5), expected) or not close(part.grad, mine(x.grad)):
            found["wrong"].append(number)
    found["model"] = close(ws.full_state_dict(model), whole.state_dict())
    logits = ws.compile(lambda m, x: m.eval()(x), mesh=mesh(), plan=Cut(), fullgraph=True)
    found["another step"] = close(logits(model, mine(images)), whole.eval()(images))
    found["no plan"] = error(lambda: ws.compile(lambda m, x: m(x), fullgraph=True)(model, images))
    columns = ws.compile(train, mesh=mesh(), plan=Cut(dim=1), fullgraph=True)
    found["another plan"] = error(lambda: columns(model, {"images": images}, 1.0))
    found["parts"] = sum(part_of(p) is not None for p in model.parameters())
    return found


def everything() -> dict[str, Any]:
    """All of this file, in one world."""
    programs = (other_batches, alone, other_models, other_plans, randomness, other_randomness, other_values, replaced,
                refusals, layouts)  # fmt: skip
    return {program.__name__: program() for program in programs}


def nested() -> bool:
    """Two axes that cut the same dimension, on four ranks: one device's model again."""
    grid = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    g = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    whole = MLP().double()
    model = copy.deepcopy(whole)
    opts = adamw(whole), adamw(model)
    step = ws.compile(plain, mesh=grid, plan=[Cut("a"), Cut("b")], fullgraph=True)
    good = True
    for _ in range(3):
        batch = rows(g)
        good &= close(step(model, opts[1], *map(mine, batch)), plain(whole, opts[0], *batch))
    weight = part_of(model.fc1.weight)
    assert weight is not None and weight.spans[0] == ((0, 3), (3, 5), (5, 8), (8, 10))[comm.get_rank()]
    same = close(ws.full_state_dict(model), whole.state_dict())
    return good and same and close(ws.full_state_dict(opts[1])["state"], opts[0].state_dict()["state"])
