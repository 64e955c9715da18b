"""Programs that every rank runs: compiled steps with wrappers of `wholestep.parallel`, against the same in eager.

A case makes a model and its wrapper, and says how it is trained; all are trained in both ways on the same batches,
of each rank's own, and everything that is left is compared bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep import comm, parallel
from wholestep.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    """Norms with buffers, a tied and a frozen parameter, activation checkpointing."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm, self.mid = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.tied, self.out, self.frozen = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 4)
        self.tied.weight = self.mid.weight
        self.frozen.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.inp(x)))
        if self.reentrant is None:
            x = self.mid(x)
        else:
            x = checkpoint(self.mid, x, use_reentrant=self.reentrant)
        return self.frozen(self.out(self.tied(x).relu()))  # type: ignore[no-any-return]


def conv() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(2 * 16, 3))
    return net.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]


def without_bias() -> nn.Module:
    """Gradients arrive in the order of the first buckets, which PowerSGD's numbers depend on."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


def captures_with_evaluations() -> tuple[int, bool]:
    """Of `ws.compile(ddp)`, for a model without buffers that is evaluated after each epoch; and whether its buckets are
    those of the order in which gradients come."""
    model, x = ws.compile(DDP(without_bias())), torch.ones(2, 8)
    for _ in range(3):
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        with torch.no_grad():
            _ = model(x), model(x)
    return int(model.captures), model.reducer.rebuilt


def train(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss  # type: ignore[no-any-return]


def clipped(model: Any, opt: Any, x: Tensor) -> Tensor:
    opt.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    return norm


def accumulated(model: Any, opt: Any, x: Tensor) -> Tensor:
    with model.no_sync():
        model(x[:3]).square().mean().backward()
        model(x[2:]).square().mean().backward()
    return train(model, opt, x)


def reduced_twice(model: Any, opt: Any, x: Tensor) -> Tensor:
    model(x[:3]).square().mean().backward()
    return train(model, opt, x)


def two_backwards(model: Any, opt: Any, x: Tensor) -> Tensor:
    (first, second), other = model(x).square().sum(0).split(2), x.sum()
    (first.sum() + other).backward(retain_graph=True)
    second.sum().backward()
    opt.step()
    opt.zero_grad()
    return other


def left(model: Any, opt: Any, x: Tensor) -> Tensor:
    """Gradients stay, and are added to by the next call."""
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    return loss.detach()


def printing(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss = train(model, opt, x).detach()
    print(end="" if loss.item() > -1 else "!")
    return loss


def by_scaler(model: Any, opt: Any, x: Tensor) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    opt.zero_grad()
    return loss.detach()


@dataclass
class Case:
    """One way to train.

    Attributes:
        model: makes it; the wrapper gets ``options``.
        step: trains it once.
        around: what the loop does around a call, by the call's number.
        hook: with its state, made anew for each model.
        grows: how many more rows the second batch has, on rank 0.
        whole: one graph is wanted.
    """

    model: Callable[[], nn.Module] = Net
    step: Callable[..., Tensor] = train
    options: dict[str, Any] | None = None
    hook: Callable[[], tuple[Any, Any]] | None = None
    around: Callable[[Any, int], Any] = lambda model, number: contextlib.nullcontext()
    shape: tuple[int, ...] = (5, 8)
    grows: int = 0
    whole: bool = True


def fp16() -> tuple[Any, Any]:
    return None, parallel.fp16_compress_hook


def wrapped_hook() -> tuple[Any, Any]:
    return None, parallel.bf16_compress_wrapper(parallel.allreduce_hook)


def quantized() -> tuple[Any, Any]:
    return None, parallel.quantization_pertensor_hook


def quantized_by_channels() -> tuple[Any, Any]:
    return None, partial(parallel.quantization_perchannel_hook, bucket_size=16)


def power_sgd() -> tuple[Any, Any]:
    state = parallel.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    return state, parallel.powerSGD_hook


def unsynced_at_first(model: Any, number: int) -> Any:
    return model.no_sync() if number % 2 == 0 else contextlib.nullcontext()


def unsynced_in_turns(model: Any, number: int) -> Any:
    return model.no_sync() if number % 2 else contextlib.nullcontext()


@contextlib.contextmanager
def evaluated_before(model: Any, number: int) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.train()
    yield


class Unused(Net):
    """A layer that ranks use in turns."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 == comm.get_rank() else self.frozen(self.out(self.inp(x)))  # type: ignore[no-any-return]


def ignoring() -> nn.Module:
    net = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["inp.bias", "norm.running_mean"])
    return net


CASES = {
    "plain": Case(),
    "clipped": Case(step=clipped),
    "no_sync in the step": Case(step=accumulated),
    "no_sync around it": Case(step=left, around=unsynced_at_first),
    "the same with no_sync": Case(around=unsynced_in_turns),
    "two reductions": Case(step=reduced_twice),
    "gradients that stay": Case(step=left),
    "prints": Case(step=printing, whole=False),
    "scaler": Case(step=by_scaler, whole=False),
    "checkpoint": Case(lambda: Net(False)),
    "reentrant checkpoint": Case(lambda: Net(True), options={"static_graph": True}),
    "static graph": Case(options={"static_graph": True}),
    "channels last": Case(conv, shape=(2, 3, 8, 8)),
    "channels last, hook": Case(conv, shape=(2, 3, 8, 8), hook=fp16),
    "views of buckets": Case(step=left, options={"gradient_as_bucket_view": True}),
    "buffers of their own": Case(options={"broadcast_buffers": False}),
    "evaluation between": Case(around=evaluated_before),
    "other sizes": Case(grows=2),
    "ignored": Case(ignoring),
    "unused": Case(Unused, options={"find_unused_parameters": True}, whole=False),
    "fp16 hook": Case(hook=fp16),
    "wrapped hook": Case(hook=wrapped_hook),
    "quantized hook": Case(hook=quantized),
    "quantized by channels": Case(hook=quantized_by_channels),
    "PowerSGD": Case(without_bias, hook=power_sgd, whole=False),
    "small buckets": Case(options={"bucket_cap_mb": 0.0001}),
}


def _ends(case: Case, way: str) -> tuple[list[Tensor], list[Any], Any]:
    torch.manual_seed(7 + comm.get_rank())
    rows = (case.shape[0], case.shape[0] + case.grows * (1 + comm.get_rank()), *[case.shape[0]] * 2)
    batches = [torch.randn(size, *case.shape[1:]) for size in rows]
    inner, step, compiled = case.model(), case.step, None
    if way == "compiled inside":
        inner = compiled = ws.compile(inner)
    model: Any = DDP(inner, **case.options or {})
    if case.hook is not None:
        model.register_comm_hook(*case.hook())
    if way == "compiled":
        model = compiled = ws.compile(model)
    elif way == "torch.compile":
        model, compiled = torch.compile(model, backend="wholestep"), None
    elif way == "whole step":
        step = compiled = ws.compile(step, fullgraph=case.whole)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number, x in enumerate(batches):
        with case.around(model, number):
            losses.append(step(model, opt, x).detach().clone())
    kept = [*losses, *model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    kept += [one for state in opt.state.values() for one in state.values()]
    return [one.detach().clone() for one in kept], [n.replace("_orig_mod.", "") for n in model.state_dict()], compiled


def equal(name: str, way: str) -> str:
    """Empty where what is left is equal to the bit; else what is not."""
    (want, keys, _), (have, found, compiled) = _ends(CASES[name], "eager"), _ends(CASES[name], way)
    if keys != found or len(want) != len(have):
        return f"names {keys} and {found}, {len(want)} and {len(have)} tensors"
    wrong = [i for i, pair in enumerate(zip(want, have, strict=True)) if not torch.equal(*pair)]
    said = f"tensors {wrong} of {len(want)}" if wrong else ""
    if CASES[name].whole and compiled is not None and compiled.breaks:
        said += f" breaks {compiled.breaks}"
    if way == "whole step" and CASES[name].whole:
        targets = [str(node.target) for graph in compiled.graphs for node in graph.graph.nodes]
        if not any("wholestep.all_reduce" in one or "wholestep.all_gather" in one for one in targets):
            said += " no reduction in the graph"
    return said


# The wrapper itself, or the module in it, compiled, in place of the step.
OTHERS = [(name, way) for name in ("plain", "no_sync around it", "static graph", "fp16 hook")
          for way in ("compiled", "compiled inside")]  # fmt: skip
ALL = [*((name, "whole step") for name in CASES), *OTHERS, ("plain", "torch.compile")]


def everything() -> list[str]:
    return [_said(*each) for each in ALL]


def _said(name: str, way: str) -> str:
    try:
        return equal(name, way)
    except Exception as error:  # noqa: BLE001 - it is what the test shows
        return f"{type(error).__name__}: {error}"
