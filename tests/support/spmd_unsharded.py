"""Programs that every rank runs: steps in the global view, expanded the naive way, beside one device's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import wholestep as ws
from tests.support.spmd_naive import naive_expand
from tests.support.spmd_programs import accumulated, adamw, clipped, kept, plain, sgd, tensors
from tests.zoo.nets import GPT, MLP
from wholestep import comm
from wholestep.ir import StepGraph
from wholestep.spmd import ParameterPlan, Replicate, Shard
from wholestep.spmd.expand.expand import expand
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.plans.global_view import PlacementOf, state_placements
from wholestep.tensor_parts import part_of


def by_rules(step: StepGraph, *, group: AxisGroup, placement_of: PlacementOf) -> StepGraph:
    """Expansion by its rules."""
    return expand(step, group=group, placements=state_placements(step, placement_of, group))


@dataclass(frozen=True)
class Cut(ParameterPlan):
    """Cuts parameters along a dimension, or along the first where they have no such one.

    Attributes:
        how: makes the step of one rank.
        least: elements of the smallest that is cut.
    """

    axis: str = "dp"
    dim: int = 0
    batch: Any = field(default_factory=lambda: Shard(0))
    least: int = 1

    how: Callable[..., StepGraph] = naive_expand

    def passes(self, mesh: ws.DeviceMesh) -> list[Callable[[StepGraph], StepGraph]]:
        return [partial(self.how, group=mesh.axis_group(self.axis), placement_of=self.placement_of)]

    def place(self, source: str, value: Tensor) -> Any:
        return Shard(self.dim if value.dim() > self.dim else 0) if value.numel() >= self.least else Replicate()


@dataclass
class Case:
    """A step, a model with its optimizer, whole batches for four rows, and the plan.

    Attributes:
        before: eager steps before the first compiled one, which leave optimizer state behind.
        fullgraph: see `ws.compile`.
    """

    step: Callable[..., Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    plan: Any = field(default_factory=Cut)
    before: int = 0
    fullgraph: bool = True


def rows(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 6, generator=g, dtype=torch.float64), torch.randint(4, (12,), generator=g)


def tokens(g: torch.Generator) -> tuple[Tensor, Tensor]:
    whole = torch.randint(19, (4, 9), generator=g)
    return whole[:, :-1], whole[:, 1:]


def looks(model, opt, x, y):
    """Python and autograd see whole shapes, whatever the rank holds."""
    assert x.shape == (12, 6) and len(y) == 12 and model.fc1.weight.shape == (10, 6)
    scale = x.shape[0] / model.fc1.weight.numel()
    opt.zero_grad()
    out = model.logits(x)
    (nn.functional.cross_entropy(out, y) * scale).backward()
    assert model.fc1.weight.grad.shape == (10, 6)
    with torch.no_grad():
        model.fc1.weight.grad *= 2
    opt.step()
    assert all(value.shape in ((), p.shape) for p, held in opt.state.items() for value in held.values())
    return {"out": out.detach(), "rows": x[:2], "weight": model.fc1.weight.detach()[0], "count": x.shape[0]}


def with_history(model, opt, x, y):
    """A result that autograd follows to the parameters, and that lives while the next step is captured."""
    plain(model, opt, x, y)
    return sum(p.norm() for p in model.parameters())


def looked_at(model, opt, x, y):
    """Python reads the loss before its backward, in which weights' gradients are whole: they come of a sort."""
    opt.zero_grad()
    loss = model(x, y) + sum(p.flatten().sort()[0][:5].square().sum() for p in model.parameters())
    if float(loss.detach()) > 0:
        loss.backward()
    opt.step()
    return loss.detach()


def by_hand(model, opt, x, y):
    opt.zero_grad()
    loss = model(x, y)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= getattr(p, "rate", 0.1) * p.grad
    return loss.detach()


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Columns(nn.Module):
    """A layer of which the last rank has one row, of the shape of its state for columns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.fc(x), y % 3)


class Spare(MLP):
    """With a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class Wide(MLP):
    """With a layer that is large enough for collectives over shared memory to work in place; its rows are 97."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 97)), nn.Linear(97, 4)


class Uneven(nn.Module):
    """An MLP whose parameters do not divide, one of which is for one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.scale = nn.Linear(6, 3), nn.Linear(3, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.fc2(torch.tanh(self.fc1(x))) * self.scale, y)


class Row(nn.Module):
    """One rank has its only parameter, the others nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * self.scale).square().mean()


CASES = {
    "mlp": Case(plain, MLP, adamw, rows),
    "mlp by columns": Case(plain, MLP, adamw, rows, Cut(dim=1, least=7)),
    "mlp, whole batch": Case(plain, MLP, adamw, rows, Cut(batch=Replicate())),
    "mlp, state from before": Case(plain, MLP, adamw, rows, before=2),
    "momentum": Case(plain, MLP, sgd, rows),
    "looks": Case(looks, MLP, adamw, rows),
    "with history": Case(with_history, MLP, adamw, rows),
    "wide": Case(plain, Wide, adamw, rows),
    "sorted": Case(looked_at, MLP, fused, rows, fullgraph=False),
    "one row": Case(by_hand, Row, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), rows),
    "columns": Case(plain, Columns, lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1), rows),
    "spare": Case(plain, Spare, adamw, rows),
    "uneven": Case(plain, Uneven, lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1), rows),
    "accumulated": Case(accumulated, MLP, sgd, rows),
    "kept": Case(kept, MLP, adamw, rows),
    "gpt": Case(clipped, lambda: GPT(dropout=0.0), adamw, tokens),
    "gpt with dropout": Case(clipped, lambda: GPT(layers=1, dropout=0.2), adamw, tokens),
}


def mesh() -> ws.DeviceMesh:
    return ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))


def mine(whole: Tensor) -> Tensor:
    """This rank's rows, in their own order of memory."""
    return whole.chunk(comm.get_world_size())[comm.get_rank()]


def close(one: Any, two: Any) -> bool:
    pairs = list(zip(tensors(one), tensors(two), strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in pairs)


def against_one_device(case: Case, seed: int, steps: int = 5) -> dict[str, Any]:
    """Steps on this rank's rows beside eager steps on the whole batch."""
    g = torch.Generator().manual_seed(seed)
    reference = case.model().double()
    for p in reference.parameters():  # not from the generator that ranks share when they are threads
        p.data = torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.3
    opts = [case.optimizer(reference)]
    for _ in range(case.before):
        case.step(reference, opts[0], *case.batch(g))
    model = copy.deepcopy(reference)
    opts.append(case.optimizer(model))
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    if comm.get_rank():  # rank 0's are taken
        for p in model.parameters():
            p.data += 1
    step = ws.compile(case.step, mesh=mesh(), plan=case.plan, fullgraph=case.fullgraph)
    wrong: list[str] = []
    for number in range(steps):
        batch = case.batch(g)
        local = batch if case.plan.batch == Replicate() else tuple(map(mine, batch))
        before, given = torch.get_rng_state(), [t.shape for t in local]
        expected = case.step(reference, opts[0], *batch)
        torch.set_rng_state(before)
        result = step(model, opts[1], *local)
        pairs = {
            "result": (result, expected),
            "model": (ws.full_state_dict(model), reference.state_dict()),
            "state": (ws.full_state_dict(opts[1])["state"], opts[0].state_dict()["state"]),
            "grads": (gradients(model), gradients(reference, model)),
        }
        wrong += [f"step {number}: {name}" for name, both in pairs.items() if not close(*both)]
        wrong += [f"step {number}: batch" for t, shape in zip(local, given, strict=True) if t.shape != shape]
    return {
        "wrong": wrong,
        "parts": [part_of(p) for p in model.parameters()],
        "bytes": (held(model, opts[1]), held(reference, opts[0])),
        "recompiles": step.recompiles,
        "captures": step.captures,
    }


def gradients(model: nn.Module, like: nn.Module | None = None) -> list[Tensor]:
    """What is in `.grad`; of each the part that another model's parameter is."""
    parts = [part_of(p) for p in (like or nn.Module()).parameters()] or [None] * len([*model.parameters()])
    pairs = zip(model.parameters(), parts, strict=True)
    return [p.grad[part.slices] if part else p.grad for p, part in pairs if p.grad is not None]


def held(model: nn.Module, opt: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state."""
    return sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *tensors(opt.state_dict()["state"])])


def run_cases(names: list[str], expanded: bool = False) -> dict[str, Any]:
    cases = {name: CASES[name] for name in names}
    if expanded:
        cases = {name: replace(case, plan=replace(case.plan, how=by_rules)) for name, case in cases.items()}
    return {name: against_one_device(case, 7) for name, case in cases.items()}
