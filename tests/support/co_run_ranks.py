"""Steps whose Python runs at each call, under plans: as one process runs them."""

from __future__ import annotations

import io
import math
import random
from contextlib import nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.co_run import test_more_steps, test_steps
from wholestep import comm
from wholestep.errors import PlanError

PLANS = {
    "data parallel": ws.DataParallel("dp"),
    "sharded optimizer": ws.ShardedOptimizer("dp", min_bytes=1),
    "fully shard": ws.FullyShard("dp", min_bytes=1, batch=ws.Replicate()),
    "gathered": ws.FullyShard("dp", min_bytes=1, batch=ws.Replicate(), gather="always"),
    "tensor parallel": ws.TensorParallel("dp", {"*first": "column", "*second": "row"}, batch=ws.Replicate()),
}
LOCAL = ("data parallel", "sharded optimizer")
DECIDING = ("skips_when_not_finite", "early_exit", "grad_scaler")  # on bools, on all ranks together
STEPS = {
    "data parallel": ("prints", "grad_scaler", "layer_drop", "threads", "numpy_views"),
    "sharded optimizer": ("skips_when_not_finite", "keeps_tensors", "gradient_penalty"),
    "fully shard": ("prints", "skips_when_not_finite", "masked", "early_exit", "evaluates"),
    "gathered": ("grad_scaler", "saves_when_best"),
    "tensor parallel": ("prints", "early_exit", "threads"),
}


def mesh() -> ws.DeviceMesh:
    return ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))


class Holder(nn.Module):
    """Gives `full_state_dict` tensors of any kind."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def played(served: Any, calls: int = 4) -> tuple[Any, ...]:
    """Everything observable of some calls, whole."""
    run, results, out = test_steps.Run(), [], io.StringIO()
    with redirect_stdout(out):
        for call in range(calls):
            run.call = call
            results.append(served(run, run.batches[call]))
    grads = {f"g{i}": p.grad for i, p in enumerate(run.model.parameters()) if p.grad is not None}
    state = [ws.full_state_dict(one) for one in (run.model, run.opt, Holder(grads))]
    return [*state, run.log, results, run.kept], out.getvalue(), [torch.get_rng_state(), random.random()]


def difference(a: Any, b: Any, tolerance: float) -> str:
    """Where two nested results differ; nothing where they do not."""
    if isinstance(a, torch.Tensor):
        same = a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)
        return "" if same else f": {a} and {b}"
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f": {a.keys()} and {b.keys()}"
        found = [(key, difference(a[key], b[key], tolerance)) for key in a]
    elif isinstance(a, (list, tuple)):
        found = [(i, difference(x, y, tolerance)) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        close = isinstance(a, float) and (abs(a - b) <= tolerance or (a != a and b != b))
        return "" if close or a == b else f": {a} and {b}"
    return next((f".{key}{text}" for key, text in found if text), "")


def steps_as_in_one_process(plan: str) -> dict[str, tuple[str, bool]]:
    """For each step: what differs from eager, and whether its Python runs at each call."""
    torch.set_default_dtype(torch.float32 if plan in LOCAL else torch.float64)
    steps = {step.__name__: step for step in (*test_steps.STEPS, *test_more_steps.STEPS)}
    found = {}
    for name in STEPS[plan]:
        compiled = ws.compile(steps[name], mesh=mesh(), plan=PLANS[plan])
        one, other = played(steps[name]), played(compiled)
        found[name] = difference(one, other, 0 if plan in LOCAL else 1e-9), bool(compiled.breaks)
    return found


class Net(nn.Module):
    """With buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def logging_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, log: list[float]) -> torch.Tensor:
    loss = model(x).square().mean()
    if not math.isfinite(loss.item()):
        raise FloatingPointError
    loss.backward()
    log.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    opt.step()
    opt.zero_grad()
    return loss.detach()


def accumulating_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, log: list[float]) -> torch.Tensor:
    for place, half in enumerate(x.chunk(2)):
        with model.no_sync() if not place and isinstance(model, DistributedDataParallel) else nullcontext():
            loss = model(half).square().mean() / 2
            log.append(loss.item())
            assert log[-1] > 0
            loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    return loss.detach()


def forgetting_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, log: list[float]) -> torch.Tensor:
    """A gradient is gone before others, of which a segment knows that does not read them, are reduced."""
    loss = model(x).square().mean()
    loss.backward()
    assert loss.item() > 0
    next(model.parameters()).grad = None
    log.append(x.square().mean().item())
    assert log[-1] > 0
    opt.step()
    opt.zero_grad()
    return loss.detach()


def watching_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, log: list[float]) -> torch.Tensor:
    """A backward ends with a read, so that nothing is deferred when the step reads next."""
    loss = model(x).square().mean()
    hook = next(model.parameters()).register_hook(lambda grad: log.append(math.ceil(grad.sum())))
    loss.backward()
    hook.remove()
    log.append(float(x.numpy().sum()))
    opt.step()
    opt.zero_grad()
    return loss.detach()


def reading_step(model: Any, opt: Any, x: torch.Tensor, log: list[float]) -> None:
    """Gradients stay when it returns, which a later part than that of the backward has reduced."""
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    print(loss.item())
    opt.step()


def as_stock_ddp(store: str) -> dict[str, bool]:
    """Whether parameters, buffers, gradients and results are DDP's, bit for bit, each rank having its own batch."""
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    found = {}
    for step in (logging_step, accumulating_step, forgetting_step, watching_step, reading_step):
        results = []
        for compiled in (False, True):
            torch.manual_seed(rank)  # others at the start, too: rank 0's count
            model: Any = Net()
            step_of: Any = step
            if compiled:
                step_of = ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"))
            else:
                model = DistributedDataParallel(model)
            opt, log = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
            torch.manual_seed(10 + rank)
            given = [step_of(model, opt, torch.randn(6, 6), log) for _ in range(4)]
            inner = model if compiled else model.module
            left = [p.grad for p in inner.parameters() if p.grad is not None]
            found_there = [one for one in (*given, *left) if one is not None]
            results.append([*found_there, *inner.state_dict().values(), *map(torch.tensor, log)])
        found[step.__name__] = all(map(torch.equal, *results)) and bool(step_of.breaks)
    dist.destroy_process_group()
    return found


def breaks_on_one_rank() -> list[Any]:
    """What only one rank cannot replay has the Python of all run."""
    log: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if comm.get_rank() == 0 and len(log) >= 0:
            print("a step")
        log.append(loss.item())
        return loss.detach()

    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"))
    out = io.StringIO()
    with redirect_stdout(out):
        for _ in range(3):
            compiled(torch.ones(2, 4))
    return [out.getvalue(), log, compiled.breaks[0], model.weight.detach()]


def scaled_on_one_rank() -> list[list[Any]]:
    """A number that the second rank alone has otherwise from the third call on, under each plan of the local view."""

    def played_under(plan: str) -> list[Any]:
        torch.manual_seed(0)
        model, scale, log = Net(), [1.0], []
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @ws.compile(mesh=mesh(), plan=PLANS[plan])
        def step(x: torch.Tensor) -> None:
            opt.zero_grad()
            loss = (model(x) * scale[0]).square().mean()
            loss.backward()
            print("a step")
            opt.step()
            log.append(loss.item() + model.last.bias.sum().item())

        for call in range(4):
            scale[0] = 3.0 if call > 1 and comm.get_rank() else 1.0
            with redirect_stdout(io.StringIO()):
                step(torch.ones(6, 6))
        return [*log, *model.last.weight.flatten().tolist()]

    return [played_under(plan) for plan in LOCAL]


def decides_otherwise() -> str:
    """Ranks that go different ways are told so."""
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        if loss.item() > 1.0:
            loss.backward()

    x = torch.ones(2, 4) * (100 if comm.get_rank() else 1e-3)
    compiled = ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"))
    try:
        compiled(x)
    except PlanError as error:
        return str(error)
    return ""


def stays_in_parts() -> list[Any]:
    """Shapes of what a rank holds after a call in which all is whole, and what a read in it gives."""
    torch.manual_seed(0)
    model, seen = nn.Linear(8, 6), []
    opt = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> Any:
        opt.zero_grad()
        hidden = model(x)
        seen.append((list(x.shape), list(model.weight.shape), hidden.detach().numpy().shape))
        hidden.sum().backward()
        seen.append(round(float(model.weight.grad.numpy().sum()), 4))
        opt.step()
        return hidden.detach()

    compiled = ws.compile(step, mesh=mesh(), plan=ws.FullyShard("dp", min_bytes=1))
    for _ in range(2):
        result = compiled(torch.ones(2, 8))
    state = opt.state[model.weight]["exp_avg"]
    return [seen, *(list(t.shape) for t in (result, model.weight, model.weight.grad, state))]


def on_two_axes() -> dict[str, float]:
    """The largest difference of parameters and gradients from one process, for plans along two axes."""
    grid = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parallel = ws.TensorParallel("b", {"0": "column", "2": "row"}, batch=ws.Replicate())
    found = {}
    for name, plan in {
        "data, data": [ws.DataParallel("a"), ws.DataParallel("b")],
        "data, fully": [ws.DataParallel("a"), ws.FullyShard("b", min_bytes=1)],
        "sharded, tensor": [ws.ShardedOptimizer("a", min_bytes=1), parallel],
        "fully, tensor": [ws.FullyShard("a", min_bytes=1), parallel],
    }.items():
        for step in (halves, leaves_gradients):
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double())
            opts = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
            compiled = ws.compile(step, mesh=grid, plan=plan)
            for _ in range(3):
                x = torch.randn(8, 6, dtype=torch.float64)
                first, second = divmod(comm.get_rank(), 2)
                mine = x.chunk(2)[first] if "tensor" in name else x.chunk(4)[2 * first + second]
                step(models[0], opts[0], x)
                compiled(models[1], opts[1], mine)
            grads = Holder({f"g{i}": p.grad for i, p in enumerate(models[1].parameters()) if p.grad is not None})
            whole = [*ws.full_state_dict(models[1]).values(), *ws.full_state_dict(grads).values()]
            plain = [*models[0].state_dict().values(), *(p.grad for p in models[0].parameters() if p.grad is not None)]
            worst = max(float((a - b).abs().max()) for a, b in zip(plain, whole, strict=True))
            found[f"{name}: {step.__name__}"] = worst if compiled.breaks else math.inf
    return found


def halves(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> None:
    opt.zero_grad()
    for half in x.chunk(2):
        loss = model(half).square().mean() / 2
        assert f"{loss.item():.3f}"
        loss.backward()
    if math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()):
        opt.step()


def leaves_gradients(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    assert f"{loss.item():.3f}"
    loss.backward()


def breaks_by_name() -> list[Any]:
    """`ws.graph_break`, `ws.disable` and `ws.log` under a plan."""
    model, found = nn.Linear(4, 1), []
    note = ws.disable(lambda loss: found.append(loss.item()))

    def step(x: torch.Tensor) -> None:
        loss = model(x).mean()
        ws.graph_break()
        note(loss)
        loss.backward()
        ws.log(lambda loss: found.append(round(float(loss), 6)), loss=loss.detach())

    compiled = ws.compile(step, mesh=mesh(), plan=ws.FullyShard("dp", min_bytes=1))
    compiled(torch.ones(2, 4))
    return found


def reads_in_step() -> list[float]:
    """What a step under a plan reads after a backward which ranks that are threads run at one time."""
    weights, found = [nn.Parameter(torch.ones(3)) for _ in range(8)], []

    def step(x: torch.Tensor) -> None:
        torch.stack([weight * x for weight in weights]).sum().backward()
        if nn.utils.clip_grad_norm_(weights, 1.0) > 0.3:
            found.append(weights[0].grad.sum().item())
        for weight in weights:
            weight.grad = None

    compiled = ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"))
    for call in range(4):
        compiled(torch.full((3,), float(comm.get_rank() + call)))
    return found


def goes_on_after_an_error(where: str) -> tuple[list[Any], list[Any]]:
    """What each of six calls gives, of which one raises on rank 1, in a hook or in the step; then the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    opt = torch.optim.AdamW(model.parameters(), 0.1)  # its counts are written at once
    fails = [False]

    def fail(*args: Any) -> None:
        if fails[0]:
            raise KeyError("this rank's own")

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> float:
        loss = model(x).square().mean()
        if where == "after the forward":
            fail()
        loss.backward()
        read = loss.item()
        opt.step()
        opt.zero_grad()
        with redirect_stdout(io.StringIO()):
            print(f"{read:.3f}")
        return read

    if where == "forward hook":
        model[2].register_forward_hook(fail)
    elif where == "optimizer's hook":
        opt.register_step_pre_hook(fail)
    compiled = ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"))
    torch.manual_seed(comm.get_rank())
    seen: list[Any] = []
    for call in range(6):
        fails[0], x = call == 2 and comm.get_rank() == 1, torch.randn(4, 3)
        try:
            seen.append(type(compiled(model, opt, x)).__name__)
        except (KeyError, PlanError) as error:
            seen.append(type(error).__name__)
    return seen, [p.tolist() for p in model.parameters()]


class Replicated(nn.Module):
    """Parameters that a fresh replica may miss: one that no deferred call reads, one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.transposed = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.bilinear(x, x)) @ self.transposed


def read_before_and_after(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, log: list[float]) -> None:
    """The optimizer's update is a segment of its own, with a rate that the schedule changes."""
    for part in x.chunk(2):
        loss = model(part).square().mean()
        log.append(loss.item())
        loss.backward()
    log.append(model.transposed.grad.sum().item())
    opt.step()
    opt.zero_grad()


def as_naive_replicas() -> dict[str, float]:
    """By plan, the largest difference from replicas whose gradients are reduced by hand."""
    found = {}
    summed = ws.DataParallel("dp", reduce="sum")
    for plan in (ws.DataParallel("dp"), ws.ShardedOptimizer("dp", min_bytes=1), summed):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        replica, model = Replicated(), Replicated()
        torch.set_default_dtype(torch.float32)
        if comm.get_rank() == 0:
            model.load_state_dict(replica.state_dict())
        opts = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=1e-3, fused=True) for one in (replica, model)]
        schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.8) for opt in opts]
        step = ws.compile(read_before_and_after, mesh=mesh(), plan=plan)
        for _ in range(3):
            x = torch.randn(4, 4, dtype=torch.float64) + comm.get_rank()
            for part in x.chunk(2):
                replica(part).square().mean().backward()
            for parameter in replica.parameters():
                reduced = parameter.grad.contiguous() / (1 if plan is summed else comm.get_world_size())
                comm.all_reduce(reduced)
                parameter.grad.copy_(reduced)
            opts[0].step()
            opts[0].zero_grad()
            step(model, opts[1], x, [])
            for schedule in schedules:
                schedule.step()
        pairs = zip(replica.parameters(), model.parameters(), strict=True)
        found[str(plan)] = max(float((a - b).abs().max()) for a, b in pairs)
    return found
