"""Steps run in every rank: once as stock DistributedDataParallel, once compiled with a plan."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import wholestep as ws
from tests.zoo.nets import GPT, MLP, ConvNet
from wholestep import comm


@dataclass
class Case:
    """A model, its optimizer, a step and its batches."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    step: Callable[..., Any]
    batch: Callable[[], tuple[Tensor, ...]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(model, opt, x, y):
    loss = model(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def zeroed_first(model, opt, x, y):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def filled_with_zeros(model, opt, x, y):
    opt.zero_grad(set_to_none=False)
    model(x, y).backward()
    opt.step()


def clipped(model, opt, x, y):
    opt.zero_grad()
    _, loss = model(x, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    return loss.detach(), norm


def accumulated(model, opt, x, y):
    for i in range(3):
        quiet = i < 2 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if quiet else contextlib.nullcontext():
            model(x[i::3], y[i::3]).backward()
    opt.step()
    opt.zero_grad()


def kept(model, opt, x, y):
    """Never zeroed: gradients add up over the calls."""
    model(x, y).backward()
    opt.step()


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6), torch.randint(4, (6,))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(4, (4,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(19, (2, 8)), torch.randint(19, (2, 8))


CASES = {
    "mlp": Case(MLP, sgd, plain, rows),
    "mlp filled with zeros": Case(MLP, sgd, filled_with_zeros, rows),
    "convnet": Case(ConvNet, sgd, zeroed_first, images),
    "gpt": Case(lambda: GPT(layers=1, dropout=0.1), adamw, clipped, tokens),
    "accumulated": Case(MLP, adamw, accumulated, rows),
    "kept": Case(MLP, sgd, kept, rows),
}


def mesh() -> ws.DeviceMesh:
    return ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))


def seen(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that must be equal: parameters, buffers, gradients and optimizer state."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: value.detach().clone() for name, value in inner.state_dict().items()}
    for (name, parameter), number in zip(inner.named_parameters(), range(1000), strict=False):
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad.clone()
        for key, value in opt.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"state {number} {key}"] = value.clone()
    return found


@contextlib.contextmanager
def stock_group(file: str) -> Iterator[None]:
    """The group that stock DDP needs; its ranks meet over a file that is not there yet."""
    rank, size = comm.get_rank(), comm.get_world_size()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def differences_from_ddp(file: str, names: Sequence[str] = (), steps: int = 4) -> dict[str, list[str]]:
    """Runs every case both ways; gives the names of what is not equal bit for bit, by case."""
    with stock_group(file):
        ways = {name: [snapshots(name, how, steps) for how in ("ddp", "plan")] for name in names or CASES}
        return {name: differences(*both) for name, both in ways.items()}


def differences(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> list[str]:
    found = []
    for number, (a, b) in enumerate(zip(one, two, strict=True)):
        found += [f"step {number}: {name} is only in one" for name in set(a) ^ set(b)]
        for name in set(a) & set(b):
            if not all(map(torch.equal, tensors(a[name]), tensors(b[name]))):
                found.append(f"step {number}: {name}")
    return sorted(found)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def snapshots(name: str, how: str, steps: int, plan: Any = None) -> list[dict[str, Tensor]]:
    """One way to run a case, from the same seeds on each call; rank r draws its own batches and dropout."""
    case = CASES[name]
    torch.manual_seed(comm.get_rank() if how == "plan" else 0)  # the plan starts all ranks with rank 0's parameters
    model = case.model()
    opt = case.optimizer(model)
    if how == "ddp":
        model, step = DistributedDataParallel(model), case.step
    else:
        step = ws.compile(case.step, mesh=mesh(), plan=plan or ws.DataParallel("dp"), fullgraph=True)
    torch.manual_seed(1 + comm.get_rank())
    found: list[dict[str, Any]] = []
    for _ in range(steps):
        result = step(model, opt, *case.batch())
        found.append(seen(model, opt) | {"result": copy.deepcopy(result)})
    if how == "plan":
        assert len(step.recompiles) <= 1, step.recompiles  # a momentum begins as a copy, a gradient as none
    return found


# Other comparisons ------------------------------------------------------------------------------------------------


def gradients_only(model, x):
    """Seed 002's first step: the bias's gradient follows from no data at all."""
    model(x).sum().backward()
    return [p.grad for p in model.parameters()]


def sums_against_ddp(file: str) -> dict[str, bool]:
    """With reduce="sum": gradients are world size times DDP's, and so are updates (seed 002)."""
    with stock_group(file):
        found = {"gradients": _gradients_are_sums(keep=False), "gradients kept": _gradients_are_sums(keep=True)}
        makers = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True),
            "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
            "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        }
        return found | {name: _updates_by_sums(make) for name, make in makers.items()}


def _gradients_are_sums(keep: bool) -> bool:
    size, plan = comm.get_world_size(), ws.DataParallel("dp", reduce="sum")
    torch.manual_seed(0)
    model = nn.Linear(10, 10)
    stock = DistributedDataParallel(copy.deepcopy(model))
    step = ws.compile(gradients_only, mesh=mesh(), plan=plan, fullgraph=True)
    torch.manual_seed(comm.get_rank())
    good = True
    for _ in range(3):
        if not keep:
            model.zero_grad()
            stock.zero_grad()
        x = torch.randn(2, 10)
        returned = step(model, x)
        stock(x).sum().backward()
        for grad, ours, theirs in zip(returned, model.parameters(), stock.parameters(), strict=True):
            good &= grad is ours.grad and torch.allclose(grad / size, theirs.grad)
    return good


def _updates_by_sums(make: Callable[..., torch.optim.Optimizer]) -> bool:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 3))
    stock = DistributedDataParallel(copy.deepcopy(model))
    opt, stock_opt = make(model.parameters()), make(stock.parameters())

    def train(model, opt, x):
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()

    step = ws.compile(train, mesh=mesh(), plan=ws.DataParallel("dp", reduce="sum"), fullgraph=True)
    torch.manual_seed(comm.get_rank())
    for _ in range(3):
        x = torch.randn(2, 10)
        step(model, opt, x)
        stock(x).sum().backward()
        for parameter in stock.parameters():
            parameter.grad *= comm.get_world_size()
        stock_opt.step()
        stock_opt.zero_grad()
    pairs = zip(model.parameters(), stock.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def reduced_after_each_backward(plan: Any, between: str, kept: bool) -> bool:
    """Two backward passes under reduce="sum", with gradients read or scaled between them, against an eager oracle.

    There each rank all-reduces what one backward pass of its own has added, so that a gradient from before it, which is
    the same on both ranks, counts once.

    Args:
        between: "read", "scale" or "clip": what is done to gradients after the first pass.
        kept: gradients stay for the next call.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    other = copy.deepcopy(model)

    def use(model: nn.Module) -> Tensor:
        grads = [p.grad for p in model.parameters()]
        if between == "clip":
            return nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if between == "scale":
            for grad in grads:
                grad.mul_(0.5)
        return sum(grad.square().sum() for grad in grads)

    def train(model, opt, x):
        model(x).sum().backward()
        seen = use(model)
        model(x + seen).square().sum().backward()
        opt.step()
        if not kept:
            opt.zero_grad()
        return seen

    def backward(loss: Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in other.parameters()]
        other.zero_grad()
        loss.backward()
        for p, old in zip(other.parameters(), before, strict=True):
            comm.all_reduce(p.grad)
            p.grad += 0 if old is None else old

    step = ws.compile(train, mesh=mesh(), plan=plan, fullgraph=True)
    opts, good = (sgd(model), sgd(other)), True
    torch.manual_seed(comm.get_rank())
    for _ in range(3):
        x = torch.randn(3, 6, dtype=torch.float64)
        seen = step(model, opts[0], x)
        backward(other(x).sum())
        expected = use(other)
        backward(other(x + expected).square().sum())
        opts[1].step()
        if not kept:
            opts[1].zero_grad()
        good &= torch.allclose(seen, expected)
        good &= all(torch.allclose(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True)
                    if kept)  # fmt: skip
    return good and all(map(torch.allclose, model.parameters(), other.parameters()))


def sums_read_between() -> dict[str, bool]:
    """`reduced_after_each_backward` of both plans of the local view."""
    return {
        f"{type(plan).__name__}, {between}, kept {kept}": reduced_after_each_backward(plan, between, kept)
        for plan in (ws.DataParallel("dp", reduce="sum"), ws.ShardedOptimizer("dp", reduce="sum", min_bytes=1))
        for between in ("read", "scale", "clip")
        for kept in (False, True)
    }


def gan(generator, critic, opt_g, opt_c, noise, real):
    """Two models, two backward passes, and gradients of the critic that nobody wants in between."""
    opt_c.zero_grad()
    (critic(generator(noise)).mean() - critic(real).mean()).backward()
    opt_c.step()
    opt_g.zero_grad()
    (-critic(generator(noise)).mean()).backward()
    opt_g.step()


class Joined(nn.Module):
    """A layer whose weights are used as one, so that their gradients lie in one memory, c's alone being frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(2, 6))
        self.register_buffer("c", torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([self.a, self.c, self.b])).square().mean()


def joined(model, opt, x):
    model(x).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)


def everything(folder: str) -> dict[str, Any]:
    """All of this file that two ranks do, in one world."""
    return {
        "ddp": differences_from_ddp(f"{folder}/means"),
        "sums": sums_against_ddp(f"{folder}/sums"),
        "sums read between": sums_read_between(),
        "whole batch": whole_batch(),
        "uneven": uneven_batches(),
        "other model": other_model_on_rank_one(),
        "one cannot": one_rank_cannot_capture(),
        "refusals": refusals(),
    }


def whole_batch() -> dict[str, bool]:
    """Two ranks on their halves against one process on the whole batch, also where DDP has no case of its own."""
    small = {"bucket_bytes": 8, "first_bucket_bytes": 8}
    return {"gan": _whole_gan(), "joined": _whole_joined(), "joined, small buckets": _whole_joined(**small)}


def _halves(*wholes: Tensor) -> list[Tensor]:
    return [whole.chunk(comm.get_world_size())[comm.get_rank()] for whole in wholes]


def _same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def _whole_gan() -> bool:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(i, 5), nn.Tanh(), nn.Linear(5, o)) for i, o in ((3, 4), (4, 1))]
    others = copy.deepcopy(models)
    step = ws.compile(gan, mesh=mesh(), plan=ws.DataParallel("dp"), fullgraph=True)
    opts = [[sgd(m) for m in pair] for pair in (models, others)]
    for _ in range(3):
        noise, real = torch.randn(4, 3), torch.randn(4, 4)
        step(*models, *opts[0], *_halves(noise, real))
        gan(*others, *opts[1], noise, real)
    return all(_same(a, b) for a, b in zip(models, others, strict=True))


def _whole_joined(**settings: int) -> bool:
    torch.manual_seed(0)
    model = Joined()
    other = copy.deepcopy(model)
    step = ws.compile(joined, mesh=mesh(), plan=ws.DataParallel("dp", **settings), fullgraph=True)
    opts = sgd(model), sgd(other)
    for _ in range(3):
        x = torch.randn(4, 6)
        step(model, opts[0], *_halves(x))
        joined(other, opts[1], x)
    return _same(model, other)


def uneven_batches() -> tuple[list[Tensor], int]:
    """One rank alone gets a batch of another size, and captures alone; nobody waits for a meeting."""
    torch.manual_seed(comm.get_rank())
    model = MLP()
    opt = sgd(model)
    step = ws.compile(plain, mesh=mesh(), plan=ws.DataParallel("dp"), fullgraph=True)
    for number in range(5):
        rows = 3 if number == 3 and comm.get_rank() == 1 else 6
        step(model, opt, torch.randn(rows, 6), torch.randint(4, (rows,)))
    return [p.detach().clone() for p in model.parameters()], len(step.recompiles)


def other_model_on_rank_one() -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=comm.get_rank() == 0)
    return _error(
        lambda: ws.compile(gradients_only, mesh=mesh(), plan=ws.DataParallel("dp"), fullgraph=True)(
            model, torch.ones(2, 4)
        )
    )


def one_rank_cannot_capture() -> str:
    """What each rank says when rank 1 alone has a step that cannot be captured."""
    model = nn.Linear(4, 3)

    def step(model, x):
        loss = model(x).sum()
        if comm.get_rank() == 1 and loss > 0:
            loss = loss * 2
        loss.backward()

    try:
        ws.compile(step, mesh=mesh(), plan=ws.DataParallel("dp"), fullgraph=True)(model, torch.ones(2, 4))
    except ws.errors.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _error(body: Callable[[], Any]) -> str:
    try:
        body()
    except ws.errors.PlanError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    """Steps that a plan cannot serve, and meshes that do not fit, by what they say."""
    plan = {"mesh": mesh(), "plan": ws.DataParallel("dp")}
    x = torch.ones(2, 4)
    table = nn.Embedding(5, 3, sparse=True)
    layer, hooked = nn.Linear(4, 3), nn.Linear(4, 3)
    opt = torch.optim.SGD(hooked.parameters(), lr=0.1)

    def sparse(table, rows):
        table(rows).sum().backward()

    def by_grad(layer, x):
        grads = torch.autograd.grad(layer(x).sum(), layer.parameters())
        with torch.no_grad():
            for parameter, grad in zip(layer.parameters(), grads, strict=True):
                parameter -= grad

    def update(_):
        opt.step()
        opt.zero_grad()

    hooked.weight.register_post_accumulate_grad_hook(update)

    def in_hook(layer, opt, x):
        layer(x).sum().backward()

    return {
        "sparse": _error(lambda: ws.compile(sparse, **plan)(table, torch.tensor([1, 2]))),
        "by_grad": _error(lambda: ws.compile(by_grad, **plan)(layer, x)),
        "in_hook": _error(lambda: ws.compile(in_hook, **plan)(hooked, opt, x)),
        "axis": _error(lambda: ws.compile(gradients_only, mesh=mesh(), plan=ws.DataParallel("tp"), fullgraph=True)),
        "shape": _error(lambda: ws.init_device_mesh("cpu", (3,))),
    }


def on_two_axes() -> tuple[list[int], list[int], bool]:
    """Four ranks as two by two: groups along both axes, and plans over both, against one process."""
    grid = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    sums = []
    for axis in ("outer", "inner"):
        x = torch.tensor(comm.get_rank())
        comm.all_reduce(x, group=grid.get_group(axis))
        sums.append(int(x))
    torch.manual_seed(comm.get_rank())
    model = MLP()
    plan = [ws.DataParallel("outer"), ws.DataParallel("inner")]
    step = ws.compile(gradients_only_of_loss, mesh=grid, plan=plan, fullgraph=True)
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    step(model, *_halves(x, y))
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gradients_only_of_loss(model, x, y)
    same = all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(local, model.parameters(), strict=True))
    return list(grid.coordinates), sums, same


def gradients_only_of_loss(model, x, y):
    model(x, y).backward()
