"""Seed 002's steps, run in every rank: compiled with sums over the ranks, and naively on all ranks' data."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep import comm

library = torch.library.Library("wholestep_seed", "DEF")
for _name in ("ddm", "ddm_backward"):
    library.define(f"{_name}(Tensor x) -> Tensor")
    library.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")
seed_ops = torch.ops.wholestep_seed


class DataDependent(nn.Module):
    """Stands for what cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this is replaced in the trace")


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return seed_ops.ddm(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return seed_ops.ddm_backward(grad)


class Traceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Identity.apply(x)


class ByType(ws.Override):
    """Replaces what depends on data, and puts an ATen call for what it became."""

    def __init__(self) -> None:
        self.targets: list[Any] = []

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return Traceable() if isinstance(module, DataDependent) else module

    def transform(self, gm: fx.GraphModule, flat_state: list[Any]) -> fx.GraphModule:
        for node in list(gm.graph.nodes):
            if node.target in (seed_ops.ddm.default, seed_ops.ddm_backward.default):
                self.targets.append(node.target)
                with gm.graph.inserting_before(node):
                    new = gm.graph.call_function(torch.mul, (*node.args, 1.0))
                node.replace_all_uses_with(new)
        gm.graph.lint()
        gm.graph.eliminate_dead_code()
        return gm


class Counted(ws.Override):
    """Replaces nothing; counts the all-reduces."""

    def __init__(self) -> None:
        self.all_reduces: list[int] = []

    def transform(self, gm: fx.GraphModule, flat_state: list[Any]) -> fx.GraphModule:
        target = torch.ops.wholestep.all_reduce.default
        self.all_reduces.append(sum(node.target == target for node in gm.graph.nodes))
        return gm


def compiled(step: Callable[..., Any], **settings: Any) -> Any:
    mesh = ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))
    return ws.compile(step, mesh=mesh, plan=ws.DataParallel("dp", reduce="sum"), **settings, fullgraph=True)


def train_step(model, opt, *inputs):
    model(*inputs).sum().backward()
    opt.step()


def everybodys(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(comm.get_world_size())]
    comm.all_gather(found, tensor)
    return found


_generator = threading.Lock()  # ranks that are threads have one generator


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    with _generator:
        torch.manual_seed(seed)
        return make()


def draw(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return seeded(make, 100 + comm.get_rank())


def rows() -> tuple[Tensor]:
    return (torch.randn(2, 10),)


def naive_step(model, opt, inputs: Sequence[Tensor]) -> None:
    """A step of one process that sees all ranks' inputs one after the other."""
    for one in zip(*map(everybodys, inputs), strict=True):
        model(*one).sum().backward()
    opt.step()


def agrees(model: nn.Module, make_opt: Callable[[Any], Any], inputs: tuple[Tensor, ...], **settings: Any) -> bool:
    """Two steps, the first with gradients to begin with; the second on the state that it left."""
    other = copy.deepcopy(model)
    opt, naive = make_opt(model.parameters()), make_opt(other.parameters())
    step = compiled(train_step, **settings)
    for _ in range(2):
        opt.zero_grad()
        naive.zero_grad()
        step(model, opt, *inputs)
        naive_step(other, naive, inputs)
    return _same(model, other)


def agrees_after_an_eager_step(make_opt: Callable[[Any], Any], **settings: Any) -> bool:
    """The seed's order: the optimizer's state is there when the step is captured."""
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 10, bias=False)))
    shared = seeded(lambda: torch.randn(2, 10))
    other = copy.deepcopy(model)
    opt, naive = make_opt(model.parameters()), make_opt(other.parameters())
    for net, optimizer in ((model, opt), (other, naive)):
        train_step(net, optimizer, shared)
        optimizer.zero_grad()
    inputs = draw(rows)
    compiled(train_step, **settings)(model, opt, *inputs)
    naive_step(other, naive, inputs)
    return _same(model, other)


def _same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), two.parameters(), strict=True))


# The train step ---------------------------------------------------------------------------------------------------


def simple() -> bool:
    def gradients(model, x):
        model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    model = seeded(lambda: nn.Linear(10, 10))
    other, inputs = copy.deepcopy(model), draw(rows)
    found = compiled(gradients)(model, *inputs)
    for x in everybodys(*inputs):
        other(x).sum().backward()
    return all(torch.allclose(g, p.grad) for g, p in zip(found, other.parameters(), strict=True))


def sgd() -> bool:
    return agrees(seeded(lambda: nn.Linear(10, 10)), lambda p: torch.optim.SGD(p, lr=0.01, foreach=True), draw(rows))


def adam(**kind: bool) -> list[Any]:
    found: list[Any] = []
    for eager_first in (True, False):
        counted = Counted()
        settings = {"make_opt": lambda p: torch.optim.Adam(p, lr=0.01, **kind), "module_override": [counted]}
        if eager_first:
            good = agrees_after_an_eager_step(**settings)
        else:
            good = agrees(seeded(lambda: nn.Sequential(nn.Linear(10, 10))), inputs=draw(rows), **settings)
        found.append((good, counted.all_reduces))
    return found


def overrides() -> list[list[str]]:
    """The operators that the transformation met, with one replaced module and with two."""
    found = []
    for depth in (1, 2):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(10, 10), DataDependent())]
        model = nn.Sequential(*layers, nn.Linear(10, 10), nn.ReLU())
        override = ByType()
        step = compiled(train_step, module_override=[override])
        step(model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=False), *draw(lambda: (torch.randn(4, 10),)))
        assert sum(isinstance(layer, DataDependent) for layer in model) == depth
        assert not any("wholestep_seed" in str(node.target) for node in step.graphs[0].graph.nodes)
        found.append([str(target).split(".")[1] for target in override.targets])
    return found


def cache() -> tuple[int, bool, int]:
    calls = 0

    def look(gm: fx.GraphModule) -> fx.GraphModule:
        nonlocal calls
        calls += 1
        return gm

    model = seeded(lambda: nn.Linear(10, 10, bias=False))
    opt = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    train_step(model, opt, torch.ones(2, 10))
    opt.zero_grad()

    def train_and_zero(model, opt, x):
        train_step(model, opt, x)
        opt.zero_grad()

    step = compiled(train_and_zero, gm_transformation=look)
    step(model, opt, *draw(rows))
    once, gm = calls, step.graphs[0]
    step(model, opt, *draw(rows))
    return once, gm is step.graphs[0], calls


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 10)
        self.register_buffer("dummy_buffer", torch.ones(10, 10))

    def forward(self, x: Tensor) -> Tensor:
        self.dummy_buffer.requires_grad = True
        return torch.matmul(self.fc(x), self.dummy_buffer)


class Plus(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        assert len(self.param_groups[0]["params"]) == 2
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p += p.grad


def buffer() -> tuple[bool, bool, bool]:
    model = seeded(Buffered)
    good = agrees(model, Plus, draw(rows))
    return good, torch.equal(model.dummy_buffer, torch.ones(10, 10)), model.dummy_buffer.grad is not None


def expand() -> list[list[int]]:
    model = nn.Linear(10, 10)
    step = compiled(train_step)
    step(model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=True), *draw(rows))
    nodes = step.graphs[0].graph.nodes
    return [list(node.args[1]) for node in nodes if node.target == torch.ops.aten.expand.default]


# Coverage ---------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        self.mod, self.loss = mod, nn.NLLLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.mod(x), target)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(10, 8), nn.Embedding(20, 8)
        self.norm, self.fc = nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        places = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device).unsqueeze(0)
        found = F.softmax(self.fc(self.norm(self.wpe(places) + self.wte(ids))), dim=-1)
        return F.cross_entropy(found.view(-1, found.size(-1)), target.view(-1))


class Around(nn.Module):
    """A linear layer and what a forward makes of it."""

    def __init__(self, forward: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.around = nn.Linear(10, 10), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.fc, x)


def classes(shape: tuple[int, ...], inputs: int, kinds: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, inputs, shape), torch.randint(0, kinds, shape))


def _arange(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) + torch.arange(x.numel()).view(x.shape) + torch.arange(0, x.numel()).view(x.shape)


def _embedded() -> nn.Module:
    norm = nn.LayerNorm(8, elementwise_affine=False)
    return WithLoss(nn.Sequential(nn.Embedding(10, 8), norm, nn.Linear(8, 8), nn.Softmax(dim=1)))


AROUND: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "factory_full": lambda fc, x: torch.full(x.shape, 7) + fc(x),
    "factory_arange": _arange,
    "sym_numel": lambda fc, x: fc(x) + fc.weight.numel(),
    "sym_stride": lambda fc, x: fc(x) + fc.weight.stride(0),
    "scalar": lambda fc, x: fc(x) + torch.ops.aten.scalar_tensor.default(7, dtype=x.dtype, device=x.device),
    "stack": lambda fc, x: torch.stack([x, fc(x)], dim=1),
    "arithmetic": lambda fc, x: fc(x) + x.shape[0] * x.numel() - x.shape[0] // 2,
    "slice": lambda fc, x: fc(x)[:, :1],
    "bulk_cat": lambda fc, x: torch.cat([fc(x) for _ in range(100)], dim=1),
}
COVERAGE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "log_softmax": (lambda: nn.Sequential(nn.Linear(10, 10), nn.LogSoftmax(dim=1)), rows),
    "nll_loss": (
        lambda: WithLoss(nn.Sequential(nn.Linear(10, 10), nn.LogSoftmax(dim=1))),
        lambda: (torch.randn(2, 10), torch.randint(0, 10, (2,))),
    ),
    "replicated_embedding": (_embedded, classes((2,), 10, 8)),
    "pos_embedding": (Positions, classes((2, 20), 10, 8)),
    **{name: (lambda forward=forward: Around(forward), rows) for name, forward in AROUND.items()},
}


def coverage() -> dict[str, bool]:
    found = {}
    for name, (make, batch) in COVERAGE.items():
        found[name] = agrees(seeded(make), lambda p: torch.optim.SGD(p, lr=0.01, foreach=True), draw(batch))
    return found


def everything() -> dict[str, Any]:
    return {
        "simple": simple(),
        "sgd": sgd(),
        "adam foreach": adam(foreach=True),
        "adam fused": adam(fused=True, capturable=True),
        "overrides": overrides(),
        "cache": cache(),
        "buffer": buffer(),
        "expand": expand(),
        "coverage": coverage(),
    }


# Collectives over the axes of a mesh -------------------------------------------------------------------------------


def collectives(shape: tuple[int, ...]) -> dict[str, bool]:
    """Traced on other values than they run on, along every axis; compiled, they give the same again."""
    mesh, rank = ws.init_device_mesh("cpu", shape), comm.get_rank()
    found: dict[str, bool] = {}
    for axis, group in enumerate(mesh.get_all_groups()):
        ranks, size = comm.get_process_group_ranks(group), group.size()

        def all_reduce(x: Tensor, group: Any = group) -> Tensor:
            x = x.clone()
            comm.all_reduce(x, group=group)
            return x * 1

        def broadcast(x: Tensor, group: Any = group, ranks: list[int] = ranks) -> Tensor:
            x = x.clone()
            comm.broadcast(x, src=ranks[0], group=group)
            return x * 1

        def scatter(x: Tensor, parts: list[Tensor], group: Any = group, ranks: list[int] = ranks) -> Tensor:
            out = torch.empty_like(x)
            comm.scatter(out, parts if rank == ranks[0] else None, src=ranks[0], group=group)
            return out * 1

        def all_gather(x: Tensor, group: Any = group, size: int = size) -> list[Tensor]:
            out = torch.empty(size * len(x), *x.shape[1:])
            comm.all_gather_into_tensor(out, x, group=group)
            return list(torch.chunk(out, size))

        mine, other = torch.ones(3, 3) * rank, torch.ones(3, 3) * rank + 1
        parts, others = ([torch.ones(3, 3) * r + plus for r in ranks] for plus in (0, 1))
        expected = {
            all_reduce: torch.ones(3, 3) * sum(ranks),
            broadcast: torch.ones(3, 3) * ranks[0],
            scatter: mine,
            all_gather: [torch.ones(3, 3) * r for r in ranks],
        }
        for fn, right in expected.items():
            given, met = ((mine, parts), (other, others)) if fn is scatter else ((mine,), (other,))
            found[f"{fn.__name__} {axis}"] = _runs_traced(fn, given, met, right)
    return found


def _runs_traced(fn: Callable[..., Any], given: tuple[Any, ...], met: tuple[Any, ...], right: Any) -> bool:
    gm, step = ws.trace(fn, *met), ws.compile(fn, fullgraph=True)
    step(*met)
    flat = [x for one in given for x in (one if isinstance(one, list) else [one])]
    used = flat[: len(gm.graph.find_nodes(op="placeholder"))]
    # of views of one tensor, the graph gives the tensor
    results = gm(*used), step(*given), right
    ran, again, wanted = (torch.cat(list(r)) if isinstance(r, (list, tuple)) else r for r in results)
    return torch.equal(ran, wanted) and torch.equal(again, wanted)
