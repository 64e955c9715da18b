"""Programs that every rank runs in the local view: ranks that fail, fall behind, or begin with other states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wholestep as ws
from tests.support.spmd_agreement import error
from tests.support.spmd_programs import adamw, mesh
from wholestep import comm

PLAN = ws.DataParallel("dp")


def train(model, opt, x):
    if model.mood == "error":
        raise ValueError("nobody trains this")
    if model.mood == "interrupt":
        raise KeyboardInterrupt
    (model(x).square().mean() * model.scale).backward()
    opt.step()
    opt.zero_grad()


def evaluate(model, x):
    return model(x).sum()


def look_up(table, opt, rows):
    table(rows).square().sum().backward()
    opt.step()
    opt.zero_grad()


def setup(kind: Callable[..., Any] = adamw, plan: Any = PLAN, step: Any = train, fullgraph: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model.mood, model.scale = "good", 1.0
    opt = kind(model)
    torch.manual_seed(1 + comm.get_rank())
    return model, opt, ws.compile(step, mesh=mesh(), plan=plan, fullgraph=fullgraph)


def stopped(call: Callable[[], Any]) -> str:
    try:
        return error(call)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def failing(mood: str, at: int = 2, plan: Any = PLAN, fullgraph: bool = True) -> list[Any]:
    """In one of five calls rank 1's own code raises, and the loop goes on; what each call said, and the weights.

    A rank that was interrupted is a call behind, which it makes at the end.
    """
    model, opt, step = setup(plan=plan, fullgraph=fullgraph)
    said = []
    for number in range(5 + (mood == "interrupt") * comm.get_rank()):
        model.mood, model.scale = mood if number == at and comm.get_rank() else "good", float(number < at)
        said.append(stopped(lambda: step(model, opt, torch.randn(2, 3))))
    steps = opt.state[model[0].weight]["step"].item()
    return [said, steps, [p.detach().clone() for p in model.parameters()]]


def wrong_call() -> list[str]:
    """Rank 1 alone forgets an argument, and both go on."""
    model, opt, step = setup()
    said = []
    for number in range(3):
        given = (model, opt, torch.randn(2, 3))[: 2 if number == 1 and comm.get_rank() else 3]
        said.append(error(lambda given=given: step(*given)))
    return said


def another_step() -> list[str]:
    """Rank 1 has a batch less and goes on with something else, while rank 0 still trains."""
    model, opt, step = setup()
    other = ws.compile(lambda m, o, x: train(m, o, x), mesh=mesh(), plan=PLAN, fullgraph=True)
    x = torch.randn(2, 3)
    said = [error(lambda: step(model, opt, x)), error(lambda: other(model, opt, x))]
    said.append(error(lambda: (other if comm.get_rank() else step)(model, opt, x)))
    return said + [error(lambda: step(model, opt, x)) for _ in range(2)]


def alone() -> list[Any]:
    """Ranks evaluate as often as they like without collectives, and capture for sizes of their own."""
    model, opt, step = setup()
    looked = ws.compile(evaluate, mesh=mesh(), plan=PLAN, fullgraph=True)
    said = []
    for number in range(4):
        rows = 2 + comm.get_rank() * (number == 2)
        said.append(error(lambda rows=rows: step(model, opt, torch.randn(rows, 3))))
        said += [error(lambda: looked(model, torch.randn(2, 3))) for _ in range(1 + number * comm.get_rank())]
    return [said, [p.detach().clone() for p in model.parameters()]]


def last_words(folder: str, program: str) -> None:
    """Writes down what a program says that leaves the ranks' group of no use."""
    said = globals()[program]()
    Path(folder, f"{program} {comm.get_rank()}").write_text(said)


def in_the_kernel() -> str:
    """Rank 1's program itself fails, on an index; which the first call did not."""
    torch.manual_seed(0)
    table = nn.Embedding(4, 2)
    opt = torch.optim.SGD(table.parameters(), lr=0.1)
    step = ws.compile(look_up, mesh=mesh(), plan=PLAN, fullgraph=True)
    step(table, opt, torch.tensor([0, 1]))
    return error(lambda: step(table, opt, torch.tensor([0, 9 * comm.get_rank()])))


def leaves() -> str:
    """Rank 1 ends after two calls."""
    model, opt, step = setup()
    said = ""
    for _ in range(2 if comm.get_rank() else 3):
        said = error(lambda: step(model, opt, torch.randn(2, 3)))
    return said


# Where ranks begin ------------------------------------------------------------------------------------------------


def eager_steps(model: nn.Module, opt: torch.optim.Optimizer, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        train(model, opt, torch.randn(2, 3, generator=generator))


def rank_0s(plan: Any, counts: tuple[int, int]) -> bool:
    """Ranks trained apart, eagerly, so many steps each, and go on as rank 0 would, with both their batches."""
    model, opt, step = setup(plan=plan)
    eager_steps(model, opt, comm.get_rank(), counts[comm.get_rank()])
    expected, single, _ = setup()
    eager_steps(expected, single, 0, counts[0])
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        batch = torch.randn(4, 3, generator=generator)
        step(model, opt, batch.chunk(2)[comm.get_rank()])
        train(expected, single, batch)
    ours, theirs = ws.full_state_dict(model), expected.state_dict()
    states = ws.full_state_dict(opt)["state"], single.state_dict()["state"]
    return all(torch.allclose(ours[k], theirs[k], atol=1e-6) for k in ours) and all(
        torch.allclose(states[0][k][n], states[1][k][n], atol=1e-6) for k in states[0] for n in states[0][k]
    )


def bare_tensors(plan: Any) -> list[list[float]]:
    """Weights that are plain tensors, trained beside a module's: one met in the optimizer alone."""
    start = 1.0 + comm.get_rank()
    scale, held = torch.full((2,), start, requires_grad=True), {"shift": torch.full((2,), start, requires_grad=True)}
    model, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    opt = torch.optim.SGD([*model.parameters(), scale, held["shift"], *unused.parameters()], lr=0.1)

    def step(x):
        (model(x) * scale + opt.param_groups[0]["params"][3]).square().mean().backward()
        opt.step()
        opt.zero_grad()

    compiled = ws.compile(step, mesh=mesh(), plan=plan)
    for _ in range(2):
        compiled(torch.ones(4, 2) * start)
    return [scale.tolist(), model.weight.tolist(), held["shift"].tolist(), unused.weight.tolist()]


def settings(plan: Any) -> dict[str, str]:
    """Optimizers that are set to other things on rank 1, what each step says, and whether anything has changed."""
    rank, found = comm.get_rank(), {}
    makers: dict[str, Callable[[Any], Any]] = {
        "lr": lambda m: torch.optim.SGD(m.parameters(), lr=0.1 + rank),
        "beta": lambda m: torch.optim.Adam(m.parameters(), betas=(0.9, (0.99, 0.999)[rank])),
        "tensor": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1 + rank), foreach=False),
        "kind": lambda m: (torch.optim.RMSprop if rank else torch.optim.Adagrad)(m.parameters()),
        "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=bool(rank)),
        "maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=bool(rank)),
    }
    for name, make in list(makers.items())[: len(makers) if plan is PLAN else 2]:
        model, opt, step = setup(make, plan, fullgraph=False)
        before = copy.deepcopy(model.state_dict())
        found[name] = error(lambda step=step, model=model, opt=opt: step(model, opt, torch.randn(2, 3)))
        found[name] += "" if all(map(torch.equal, before.values(), model.state_dict().values())) else " BUT CHANGED"
    rate = torch.tensor(0.1)
    model, opt, step = setup(lambda m: torch.optim.Adam(m.parameters(), lr=rate, foreach=False), plan, fullgraph=False)
    step(model, opt, torch.randn(2, 3))
    rate.add_(rank)
    return found | {"later": error(lambda: step(model, opt, torch.randn(2, 3)))}


def everything() -> dict[str, Any]:
    return {
        "bare tensors": [bare_tensors(plan) for plan in (PLAN, ws.ShardedOptimizer("dp"))],
        "error": failing("error"),
        "error by default": failing("error", fullgraph=False),
        "first error": failing("error", 0, ws.ShardedOptimizer("dp"), fullgraph=False),
        "interrupt": failing("interrupt"),
        "wrong call": wrong_call(),
        "another step": another_step(),
        "alone": alone(),
        "DataParallel": [rank_0s(PLAN, counts) for counts in ((1, 2), (1, 0), (0, 2))],
        "ShardedOptimizer": [rank_0s(ws.ShardedOptimizer("dp", min_bytes=1), counts) for counts in ((2, 1), (1, 0))],
        "FullyShard": [rank_0s(ws.FullyShard("dp", min_bytes=1), counts) for counts in ((1, 2), (1, 0))],
        "local settings": settings(PLAN),
        "global settings": settings(ws.FullyShard("dp", min_bytes=1)),
    }
