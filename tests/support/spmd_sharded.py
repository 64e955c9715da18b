"""Steps run in every rank with a sharded optimizer, beside the same steps with DataParallel."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import wholestep as ws
from tests.support.spmd_programs import CASES, MLP, mesh, plain, rows, tensors
from wholestep import comm
from wholestep.errors import CheckpointError, PlanError
from wholestep.tensor_parts import part_of

SHARDED = ws.ShardedOptimizer("dp", min_bytes=1)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
# Without rows of state: sgd has none, adafactor is not elementwise.
WHOLE = ("sgd", "adafactor")


def run(
    model: nn.Module, opt: torch.optim.Optimizer, step: Any, batch: Callable[[], tuple], steps: int = 3
) -> list[dict]:
    """What there is after each step: results, parameters, gradients, whole state."""
    torch.manual_seed(1 + comm.get_rank())
    found: list[dict[str, Any]] = []
    for _ in range(steps):
        result = step(model, opt, *batch())
        state = ws.full_state_dict(opt)["state"]
        grads = [p.grad for p in model.parameters()]
        found.append(copy.deepcopy({"result": result, "model": model.state_dict(), "state": state, "grads": grads}))
    return found


def parts(opt: torch.optim.Optimizer) -> int:
    """How many state tensors are rows of whole ones; each with the rows that it says."""
    count = 0
    for held in opt.state.values():
        for value in held.values():
            part = part_of(value) if isinstance(value, Tensor) else None
            if part is not None:
                assert value.shape == part.size
                assert value.untyped_storage().nbytes() == value.nbytes, "the other rows' memory is free"
                count += 1
    return count


def unlike(one: list[dict], two: list[dict], same: Callable[[Tensor, Tensor], bool] = torch.equal) -> list[str]:
    return [
        f"step {number} {name}"
        for number, (a, b) in enumerate(zip(one, two, strict=True))
        for name in a
        if len(tensors(a[name])) != len(tensors(b[name])) or not all(map(same, tensors(a[name]), tensors(b[name])))
    ]


def both_ways(make: Callable[[], nn.Module], optimizer: Callable, step: Callable, batch: Callable, same: Any) -> tuple:
    """(what differs from DataParallel, state tensors of which the rank has rows)."""
    found, counts = [], []
    for plan in (ws.DataParallel("dp"), SHARDED):
        torch.manual_seed(comm.get_rank())
        model = make()
        opt = optimizer(model)
        found.append(run(model, opt, ws.compile(step, mesh=mesh(), plan=plan, fullgraph=True), batch))
        counts.append(parts(opt))
    assert counts[0] == 0
    return unlike(*found, same), counts[1]


def cases(names: list[str], exact: bool) -> dict[str, tuple]:
    same = torch.equal if exact else torch.allclose
    return {n: both_ways(c.model, c.optimizer, c.step, c.batch, same) for n, c in CASES.items() if n in names}


def optimizers() -> dict[str, tuple]:
    return {
        # torch's fused kernel rounds the ends of a tensor, and so of rows, as it does not round its middle
        name: both_ways(
            MLP, lambda m, make=make: make(m.parameters()), plain, rows,
            torch.allclose if "fused" in name else torch.equal,
        )
        for name, make in OPTIMIZERS.items()
    }  # fmt: skip


def resumed() -> dict[str, Any]:
    """State from eager steps, from another optimizer's whole state, from a file of each rank's own, and to eager."""
    torch.manual_seed(0)
    models = [MLP()]
    opts = [torch.optim.AdamW(models[0].parameters(), lr=0.1)]
    x, y = rows()
    plain(models[0], opts[0], x, y)
    for _ in range(4):
        models.append(copy.deepcopy(models[0]))
        opts.append(torch.optim.AdamW(models[-1].parameters(), lr=0.1))
        opts[-1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    reference = [plain(models[0], opts[0], x, y) for _ in range(3)]
    step = ws.compile(plain, mesh=mesh(), plan=SHARDED, fullgraph=True)
    found: dict[str, Any] = {"eager first": []}
    for number in range(3):
        found["eager first"].append(torch.allclose(step(models[1], opts[1], x, y), reference[number]))
        if number == 0:
            opts[2].load_state_dict(ws.full_state_dict(opts[1], mesh().get_group("dp")))
            models[2].load_state_dict(models[1].state_dict())
            file = io.BytesIO()
            torch.save(opts[1].state_dict(), file)
            file.seek(0)
            opts[3].load_state_dict(torch.load(file, weights_only=True))
            models[3].load_state_dict(models[1].state_dict())
            opts[4].load_state_dict(ws.full_state_dict(opts[1]))
            models[4].load_state_dict(models[1].state_dict())
    found["parts"] = parts(opts[1])
    found["recompiles"] = step.recompiles
    try:
        get_optimizer_state_dict(models[1], opts[1], options=StateDictOptions(full_state_dict=True))
    except CheckpointError as error:
        found["whole by torch"] = str(error)
    for name, which in (("whole", 2), ("file", 3)):
        found[name] = [torch.allclose(step(models[which], opts[which], x, y), r) for r in reference[1:]]
        found[name].append(parts(opts[which]) == found["parts"])
    found["to eager"] = [torch.allclose(plain(models[4], opts[4], x, y), r) for r in reference[1:]]
    try:
        ws.compile(plain, mesh=mesh(), plan=ws.DataParallel("dp"), fullgraph=True)(models[1], opts[1], x, y)
    except PlanError as error:
        found["other plan"] = str(error)
    before = copy.deepcopy([*models[1].parameters()])
    try:
        ws.compile(plain, fullgraph=True)(models[1], opts[1], x, y)
    except PlanError as error:
        found["no plan"] = str(error)
    found["untouched"] = all(map(torch.equal, before, models[1].parameters()))
    return found


def everything() -> dict[str, Any]:
    """All that two ranks do, in one world."""
    return {"cases": cases(list(CASES), exact=True), "optimizers": optimizers(), "resumed": resumed()}
