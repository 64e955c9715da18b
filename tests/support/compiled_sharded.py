"""Programs of every rank: compiled steps with modules under `fully_shard`, bit for bit against the same in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep import comm
from wholestep.parallel import MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    """Rows that do not divide, a tied and a frozen parameter, activation checkpointing, buffers."""

    def __init__(self, checkpoints: bool = False, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.layer_norm = nn.Embedding(11, 8), norm(8), nn.LayerNorm(8)
        self.inp, self.out, self.frozen = nn.Linear(8, 7), nn.Linear(7, 8), nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight, self.scale = self.table.weight, nn.Parameter(torch.tensor(1.5))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer_norm(self.table(x)))
        x = x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x))
        return self.head(self.frozen(x))  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inp(x))) * self.scale  # type: ignore[no-any-return]


def sharded(model: Any, **settings: Any) -> Any:
    for layer in (model.inp, model.out, model.layer_norm):
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), x)


def train(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def clipped(model: Any, opt: Any, x: Tensor) -> Tensor:
    """Gradients are left to who reads their norms outside."""
    opt.zero_grad()
    loss_of(model, x).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    return norm


def measured(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss_of(model, x).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    opt.step()
    opt.zero_grad()
    return torch.stack(norms)


def accumulated(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss_of(model, x[:3]).backward()
    return train(model, opt, x)


def kept(model: Any, opt: Any, x: Tensor) -> Tensor:
    model.set_requires_gradient_sync(False)
    loss_of(model, x[:3]).backward()
    model.set_requires_gradient_sync(True)
    return train(model, opt, x)


def of_parts(model: Any, opt: Any, x: Tensor) -> Tensor:
    """Reads a parameter outside of its module, where it is a part."""
    return train(model, opt, x) + model.inp.weight.detach().abs().sum()


class Penalty(nn.Module):
    def forward(self, model: Any) -> Tensor:
        return model.inp.weight.square().sum()  # type: ignore[no-any-return]


def penalized(model: Any, opt: Any, x: Tensor) -> Tensor:
    """Reads a parameter in the forward of another module than its own, where it is a part."""
    loss = loss_of(model, x) + Penalty()(model) * 0.01
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def fused(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.05, fused=True)


def momentum(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Case(NamedTuple):
    """One way to train; ``why`` is what an error says where no graph can have it."""

    step: Callable[..., Tensor] = train
    opt: Callable[[Any], Any] = adamw
    model: Callable[[], nn.Module] = lambda: sharded(Net())
    why: str = ""


def half(reduce: torch.dtype | None) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    return sharded(Net(norm=lambda size: nn.Identity()), mp_policy=policy)  # type: ignore[no-any-return]


def hooked(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    return model


CASES = {
    "AdamW": Case(),
    "fused": Case(opt=fused),
    "momentum": Case(opt=momentum),
    "clipped": Case(clipped),
    "norms of gradients": Case(measured),
    "checkpoint": Case(model=lambda: sharded(Net(True))),
    "kept after the forward": Case(model=lambda: sharded(Net(), reshard_after_forward=False)),
    "mixed precision": Case(model=lambda: half(torch.float32)),
    "reduced in half precision": Case(model=lambda: half(None), why="reduced in another dtype than the parameter's"),
    "accumulated": Case(accumulated, why="gradients of several backwards"),
    "gradients kept": Case(kept, why="gradients that are kept, not reduced"),
    "hooks": Case(model=lambda: hooked(sharded(Net())), why="hooks on parameters"),
    "of parts": Case(of_parts, why="aten.sum.default of a part, which is not that of the whole"),
    "of parts in a module": Case(penalized, why="aten.sum.default of a part, which is not that of the whole"),
    "columns": Case(
        model=lambda: sharded(Net(), shard_placement_fn=lambda p: ws.Shard(p.dim() - 1)),
        why="divided along dimension 1",
    ),
}


def _ends(case: Case, compiled: bool) -> tuple[list[Tensor], Any]:
    model = case.model()
    opt, step = case.opt(model), ws.compile(case.step) if compiled else case.step
    torch.manual_seed(5 + comm.get_rank())
    left: list[Tensor] = []
    for _ in range(3):
        left.append(step(model, opt, torch.randint(0, 11, (5,))).detach().clone())
        left += [p.grad.norm() for p in model.parameters() if p.grad is not None]
        model.eval()
        with torch.no_grad():
            left.append(model(torch.arange(5)).clone())
        model.train()
    states = [value for state in opt.state.values() for value in state.values()]
    return left + [one.detach().clone() for one in (*model.parameters(), *model.buffers(), *states)], step


def gathers(step: Any) -> int:
    return sum("all_gather" in str(node.target) for graph in step.graphs for node in graph.graph.nodes)


def equal(name: str) -> dict[str, Any]:
    case = CASES[name]
    (want, _), (have, step) = _ends(case, False), _ends(case, True)
    same = len(want) == len(have) and all(map(torch.equal, want, have))
    found = {"equal": same, "breaks": "".join(step.breaks), "recompiles": step.recompiles}
    return found | ({} if case.why else {"gathers": gathers(step)})


def changed_settings() -> list[Any]:
    """What a capture has taken in changes: each time another capture serves, or Python runs."""
    model = sharded(Net())
    opt, step = momentum(model), ws.compile(train)
    x, counts = torch.arange(5), []
    for reshards in (True, False, True):
        model.set_reshard_after_forward(reshards)
        step(model, opt, x)
        counts.append((step.captures, len(step.breaks)))
    model.set_requires_gradient_sync(False)
    step(model, opt, x)
    return [*counts, "kept" in "".join(step.breaks)]


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CASES:
        try:
            found[name] = equal(name)
        except Exception as error:  # noqa: BLE001 - it is what the test shows
            return found | {name: {"error": f"{type(error).__name__}: {error}"}}
    return found | {"changed": changed_settings()}
