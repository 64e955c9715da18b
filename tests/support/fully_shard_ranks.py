"""What ranks run for the tests of `fully_shard`: beside the naive form, and beside torch's FSDP2."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh as init_stock_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as StockPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.support.parallel_ranks import naive_gradients, stock_world
from wholestep import comm
from wholestep.parallel import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, shard_schedule, summon_full_params
from wholestep.parallel.shard_tensors import ShardGrad
from wholestep.torch_compat import innermost_saved_tensor_hooks

WIDE = 8


class Block(nn.Module):
    """Uneven layers; checkpointed within, if asked for."""

    def __init__(self, inner: int = 5, within: bool | None = None) -> None:
        super().__init__()
        self.up, self.down, self.within = nn.Linear(WIDE, inner), nn.Linear(inner, WIDE), within
        self.norm, self.scale = nn.LayerNorm(WIDE), 1.0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).tanh()) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.within is None:
            return x + self.body(x)
        x = x + checkpoint(self.up, x, use_reentrant=self.within).sum(-1, keepdim=True).tanh()
        return x + checkpoint(self.body, x, use_reentrant=self.within)


class Stack(nn.Module):
    """Blocks between an embedding-like layer and a head, which are the root's own."""

    def __init__(self, within: bool | None = None, around: bool | None = None, times: int = 1, **marks: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE, bias=False)
        self.blocks = nn.ModuleList(Block(inner, within) for inner in (5, 1, 16))
        self.head = nn.Linear(WIDE, 3)
        self.around, self.times, self.marks = around, times, marks
        if marks.get("tied"):
            self.blocks[1].up = self.blocks[1].down = nn.Linear(WIDE, WIDE)
        if marks.get("frozen"):
            self.blocks[0].requires_grad_(False)
            self.blocks[2].up.weight.requires_grad_(False)
            self.first.requires_grad_(False)
        if marks.get("scalars"):
            for block in self.blocks:
                block.scale = nn.Parameter(torch.tensor(1.5))
        if marks.get("unused"):
            self.extra = nn.Linear(2, 2)
            self.blocks[1].extra = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.first(x), inplace=True)
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x) if self.around is None else checkpoint(block, x, use_reentrant=self.around)
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM, whose forward takes a list of its weights, a list of parameters, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDE, 6, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.zeros(6)) for _ in range(2)])
        self.conv = nn.Conv1d(1, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lstm(x)[0] * self.scales[0] + self.scales[1]
        return self.conv(x[:, None]).flatten(1)


def shard_all(model: nn.Module, shard: Callable[..., Any] = fully_shard, **settings: Any) -> nn.Module:
    for module in [*getattr(model, "blocks", []), *(m for m in model.modules() if isinstance(m, nn.LSTM)), model]:
        shard(module, **settings)
    return model


Settings = dict[str, Any]
CASES: dict[str, tuple[Callable[[], nn.Module], Settings, Settings]] = {  # model, of fully_shard, of the loop
    "plain": (Stack, {}, {}),
    "resharded": (Stack, {"reshard_after_forward": True}, {"clip": 0.3}),
    "kept": (Stack, {"reshard_after_forward": False}, {"clip": 0.1, "norm": math.inf}),
    "accumulated": (Stack, {}, {"micro": 3, "clip": 0.3, "norm": 1.0}),
    "two forwards": (Stack, {"reshard_after_forward": True}, {"forwards": 2}),
    "blocks twice": (partial(Stack, times=2), {}, {}),
    "tied": (partial(Stack, tied=True), {}, {}),
    "frozen": (partial(Stack, frozen=True), {}, {"micro": 2}),
    "scalars": (partial(Stack, scalars=True), {"reshard_after_forward": True}, {"micro": 3, "clip": 0.3}),
    "unused": (partial(Stack, unused=True), {}, {"clip": 0.3}),
    "checkpoint within": (partial(Stack, within=False), {}, {}),
    "checkpoint within, reentrant": (partial(Stack, within=True), {"reshard_after_forward": True}, {"needs": True}),
    "checkpoint around": (partial(Stack, around=False), {"reshard_after_forward": True}, {}),
    "checkpoint around, reentrant": (partial(Stack, around=True), {}, {"needs": True}),
    "recurrent": (Recurrent, {"reshard_after_forward": True}, {}),
    "columns": (Stack, {"shard_placement_fn": lambda p: ws.Shard(p.dim() - 1)}, {"clip": 0.3}),
}


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same numbers on all ranks, which may be threads."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randn(one.shape, generator=random, dtype=torch.float64) / 3)
    return module


def trained(
    model: nn.Module, reduce: Callable[[nn.Module], None] | None, micro: int = 1, forwards: int = 1,
    clip: float | None = None, norm: float = 2.0, needs: bool = False, iterations: int = 3,
) -> list[float]:  # fmt: skip
    """Losses and norms of a few iterations, each followed by one in evaluation.

    Args:
        reduce: for the naive form, after the last backward.
        micro: backwards of an iteration, of which the last one reduces.
        forwards: before a backward.
    """
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    dtype, seen = next(model.parameters()).dtype, []
    for iteration in range(iterations):
        random = torch.Generator().manual_seed(100 * iteration + comm.get_rank())
        for step in range(micro):
            if reduce is None:
                model.set_requires_gradient_sync(step == micro - 1)
            xs = [torch.randn(4, WIDE, generator=random, dtype=torch.float64).to(dtype) for _ in range(forwards)]
            loss = sum(model(x.requires_grad_(needs)).square().mean() for x in xs)
            loss.backward()
            seen.append(loss.item())
        if reduce is not None:
            reduce(model)
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip, norm).item())
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(xs[0]).sum().item())
        model.train()
    return seen


def beside_naive(make: Callable[[], nn.Module], settings: Settings, loop: Settings) -> float:
    """The largest difference of losses, norms and weights from those of whole models with all-reduced gradients."""
    naive = drawn(make().double())
    sharded = shard_all(copy.deepcopy(naive), **settings)
    ours, theirs = trained(sharded, None, **loop), trained(naive, naive_gradients, **loop)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    whole = ws.full_state_dict(sharded, settings["mesh"].get_group(1) if "mesh" in settings else None)
    for name, one in naive.state_dict().items():
        worst = max(worst, float((one - whole[name]).abs().max()))
    return worst


def cases(overlaps: bool | None = None, names: Iterable[str] = tuple(CASES)) -> dict[str, float]:
    """Args:
    overlaps: what is gathered and reduced beside other work; None as the machine has cores for it.
    """
    before = shard_schedule.cores_are_busy
    if overlaps is not None:
        shard_schedule.cores_are_busy = lambda group: not overlaps
    try:
        found = {name: beside_naive(*CASES[name]) for name in names}
        if comm.get_world_size() == 4:
            mesh = ws.init_device_mesh("cpu", (2, 2))
            found["two axes"] = beside_naive(Stack, {"mesh": mesh, "reshard_after_forward": True}, {"clip": 0.3})
        return found
    finally:
        shard_schedule.cores_are_busy = before


def beside_stock(store: str) -> dict[str, float]:
    """The largest difference of losses and norms from torch's FSDP2 over Gloo, in float32 and bfloat16."""
    found = {}
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    with stock_world(store):
        of_copies = {"mesh": init_stock_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))}
        settings = {"divided": {"mesh": init_stock_mesh("cpu", (2,)), "reshard_after_forward": 2}, "copies": of_copies}
        for name, policy in {"float32": {}, "divided": {}, "copies": {}, "bfloat16": bf16}.items():
            runs = []
            for shard, kind in ((fully_shard, MixedPrecisionPolicy), (stock_fully_shard, StockPolicy)):
                chosen = settings.get(name, {}) if shard is fully_shard or name == "copies" else {}
                model = shard_all(drawn(Stack(unused=True)), shard, mp_policy=kind(**policy), **chosen)
                for one in model.modules() if name == "divided" else ():
                    if hasattr(one, "set_force_sum_reduction_for_comms"):  # of torch's, which Gloo needs
                        one.set_force_sum_reduction_for_comms(True)
                    if hasattr(one, "set_gradient_divide_factor"):
                        one.set_gradient_divide_factor(3.0)
                opt, seen = torch.optim.AdamW(model.parameters(), lr=0.05), []
                for iteration in range(4):
                    random = torch.Generator().manual_seed(100 * iteration + comm.get_rank())
                    model.set_requires_gradient_sync(iteration % 2 == 1)
                    model.set_reshard_after_backward(iteration % 2 == 1)
                    model.set_is_last_backward(iteration % 2 == 1)
                    loss = model(torch.randn(4, WIDE, generator=random)).float().square().mean()
                    loss.backward()
                    seen.append(loss.item())
                    if iteration % 2:
                        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                        seen.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
                        opt.step()
                        opt.zero_grad()
                runs.append(seen)
            found[name] = max(abs(a - b) / abs(b) for a, b in zip(*runs, strict=True))
            assert dist.get_world_size() == 2
    return found


def access(folder: str) -> dict[str, Any]:
    """Whole parameters and their state: seen, changed, saved and loaded."""
    rank, size, found = comm.get_rank(), comm.get_world_size(), {}
    model = shard_all(drawn(Stack().double()))
    plain = drawn(Stack().double())
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    found["parts"] = list(model.first.weight.shape) == [WIDE // size, WIDE]
    model.unshard()
    found["unshard"] = torch.equal(model.first.weight, plain.first.weight)
    model.reshard()
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    found["handle"] = torch.equal(model.blocks[0].up.weight, plain.blocks[0].up.weight)
    model.blocks[0].reshard()
    with summon_full_params(model):
        found["summoned"] = all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
        with torch.no_grad():
            model.head.bias.fill_(7)
    found["written"] = model.head.bias.tolist() == [7] * model.head.bias.numel()
    model.load_state_dict(plain.state_dict())
    found["whole state loaded"] = all(map(torch.equal, ws.full_state_dict(model).values(), plain.parameters()))
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    for _ in range(2):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    ws.save(folder, model, opt)
    whole, state = ws.full_state_dict(model), ws.full_state_dict(opt)
    found["optimizer's state is sharded"] = list(opt.state[model.first.weight]["exp_avg"].shape) == [WIDE // size, WIDE]
    found["optimizer's full state"] = list(state["state"][0]["exp_avg"].shape) == [WIDE, WIDE]
    other = shard_all(drawn(Stack().double(), 1))
    again = torch.optim.AdamW(other.parameters(), lr=0.05)
    ws.load(folder, other, again)
    found["loaded"] = all(map(torch.equal, ws.full_state_dict(other).values(), whole.values()))
    third = shard_all(drawn(Stack().double(), 2))
    by_torch = torch.optim.AdamW(third.parameters(), lr=0.05)
    third.load_state_dict(whole)
    by_torch.load_state_dict(state)
    for one, fresh in ((model, opt), (other, again), (third, by_torch)):
        one(x).square().mean().backward()
        fresh.step()
    found["goes on"] = all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    found["goes on from whole tensors"] = all(map(torch.equal, third.parameters(), model.parameters()))
    found["which stay whole"] = list(state["state"][0]["exp_avg"].shape) == [WIDE, WIDE]
    found["final"] = {name: one.tolist() for name, one in ws.full_state_dict(other).items()}
    return found


def resumed(folder: str) -> dict[str, Any]:
    """A checkpoint of another number of ranks, and the step after it on the same data."""
    model = shard_all(drawn(Stack().double(), 2))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    ws.load(folder, model, opt)
    half = comm.get_rank() // 2
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(half), dtype=torch.float64)
    model(x).square().mean().backward()
    opt.step()
    return {name: one.tolist() for name, one in ws.full_state_dict(model).items()}


def compiled_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def compiled() -> list[list[float]]:
    """Losses of a step in eager and under `ws.compile`, by an optimizer whose state is there before the first one."""
    losses = []
    for step in (compiled_step, ws.compile(compiled_step)):
        model = shard_all(drawn(Stack().double()))
        opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
        randoms = [torch.Generator().manual_seed(10 * i + comm.get_rank()) for i in range(3)]
        batches = [torch.randn(4, WIDE, generator=random, dtype=torch.float64) for random in randoms]
        losses.append([step(model, opt, batch).item() for batch in batches])
    return losses


def details() -> dict[str, Any]:
    """Smaller promises, each with what was found."""
    found: dict[str, Any] = {}
    rank = comm.get_rank()
    model, plain = shard_all(drawn(Stack().double())), drawn(Stack().double())
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    plain(x).square().mean().backward()
    naive_gradients(plain)
    expected = [p.grad for p in plain.parameters()]
    sizes = comm.get_world_size()
    starts = [-(-g.shape[0] // sizes) * rank for g in expected]
    found["autograd.grad"] = all(
        torch.allclose(g, e[s : s + g.shape[0]], atol=1e-12) for g, e, s in zip(grads, expected, starts, strict=True)
    )
    model(x).square().mean().backward(inputs=[model.head.weight])  # the whole one, which the root shows until then
    own = {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}["head.weight"]
    found["whole as inputs"] = torch.equal(model.head.weight.grad, own) and model.first.weight.grad is None
    model.zero_grad()
    arrived: list[int] = []
    model.set_modules_to_forward_prefetch([*model.blocks])
    model.set_modules_to_backward_prefetch([*model.blocks])
    model.first.weight.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.numel()))
    model(x).square().mean().backward()
    found["hooks"] = arrived == [model.first.weight.numel()]
    found["norm"] = abs(float(model.first.weight.grad.norm() - plain.first.weight.grad.norm())) < 1e-12
    found["plain otherwise"] = type(model.first.weight.grad) is not torch.Tensor and all(
        type(one) is torch.Tensor for one in (model.first.weight.grad * 2, model.first.weight.grad.clone())
    )
    found["kind"] = isinstance(model.first.weight.grad, ShardGrad) and "FSDPStack" in repr(model)
    first = model._parameter_group
    model.set_reshard_after_backward(False)
    model(x).square().mean().backward()
    there = first.buckets[0].whole
    found["whole after the backward"] = there is not None and not first.unsharded and "weight" not in vars(model.first)
    model(x).square().mean().backward()
    found["not gathered again"] = first.buckets[0].whole is there
    with torch.no_grad():
        first.buckets[0].parameters[0].add_(1)
    model(x).square().mean().backward()
    found["gathered again"] = first.buckets[0].whole is not there
    model.set_reshard_after_backward(True)
    model(x).square().mean().backward()
    found["let go of"] = first.buckets[0].whole is None
    scaler, opt = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        model.first.weight.grad[0, 0] = math.inf
    scaler.scale(torch.ones(()))
    before = model.head.bias.detach().clone()
    scaler.step(opt)
    found["scaler"] = torch.equal(before, model.head.bias)  # one rank's infinity is all ranks'
    model.double()
    model.float()
    found["converted"] = model(x.float()).dtype is torch.float32
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    model(x.float()).sum().backward()
    fused.step()
    found["fused"] = True
    try:
        model.blocks[0](torch.ones(4, WIDE + 1))
    except RuntimeError:  # of its layers; then all is as before
        found["after an error"] = innermost_saved_tensor_hooks() is None and "weight" not in vars(model.blocks[0].up)
    loose = model.first.weight.grad.data_ptr()
    with torch.no_grad():
        found["evaluated"] = model(x.float()).requires_grad is False and model.first.weight.grad.data_ptr() == loose
    with torch.inference_mode():
        evaluated = model(x.float())
    model(x.float()).sum().backward()
    found["inference"] = evaluated.is_inference()
    halves = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    mixed = fully_shard(nn.Linear(WIDE, 3), mp_policy=halves, offload_policy=CPUOffloadPolicy())
    result = mixed(torch.ones(2, WIDE))
    result.sum().backward()
    found["mixed"] = result.dtype is torch.float64 and mixed.weight.dtype is mixed.weight.grad.dtype is torch.float32
    return found


def _holding(weight: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = weight
    return module


def mistakes() -> dict[str, str]:
    """The error that each mistake gets."""
    found, rank = {}, comm.get_rank()

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "no error"
        except (RuntimeError, TypeError, ValueError, NotImplementedError, dcp.CheckpointException) as error:
            found[name] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return getattr(self, which)(x)

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return sum(getattr(self, one)(x) for one in which)

    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    def stepped_between() -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), reshard_after_forward=True)
        loss = model(torch.ones(2, 4)).sum()
        with torch.no_grad():
            model[1].weight.add_(1)
        loss.backward()

    def given_other_memory_between(reshards: bool) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), reshard_after_forward=reshards)
        loss = model(torch.ones(2, 4)).sum()
        model[1].weight.data = model[1].weight.data + 1
        loss.backward()

    def exchanged() -> None:
        model = fully_shard(nn.Linear(4, 4))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        model(torch.ones(2, 4))

    def tied_to_child() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        fully_shard(model[0])
        fully_shard(model)

    def of_another_rank(what: Any, anew: Any) -> None:
        every: list[Any] = [None, None]
        comm.all_gather_object(every, what.state_dict())
        anew.load_state_dict(every[1 - rank])

    def state_of_another_rank() -> None:
        anew = torch.optim.AdamW(linear.parameters())
        of_another_rank(opt, anew)
        anew.step()

    class Lars(torch.optim.SGD):
        """By norms of parameters, where their states have the parts' shapes."""

        def step(self, closure: Any = None) -> None:
            for one in (p for p in self.param_groups[0]["params"] if p.grad is not None):
                one.grad *= one.detach().norm() / one.grad.norm()
            super().step(closure)

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["lr"] /= 0

    def mixing(kind: Any) -> None:
        model = fully_shard(nn.Linear(4, 4))
        opt = kind(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        opt.step(lambda: model(torch.ones(2, 4)).sum()) if kind is torch.optim.LBFGS else opt.step()

    note("mixes", lambda: mixing(torch.optim.LBFGS))
    note("norms of p", lambda: mixing(Lars))
    note("untried", lambda: mixing(Broken))
    linear, alone = fully_shard(nn.Linear(4, 4)), fully_shard(Alone())
    opt = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(2, 4)).sum().backward()
    calls: list[int] = []
    opt.step(closure=lambda: calls.append(1))  # type: ignore[arg-type, func-returns-value]
    assert calls == [1], "the trial of the first step runs no closure"
    for name, state in (("model", linear.state_dict()), ("optimizer", opt.state_dict())):
        note(f"{name} by torch", partial(dcp.save, {"a": state}, checkpoint_id="/nowhere"))
        note(f"{name} as extra", partial(ws.save, "/nowhere", linear, extra={"a": state}))
    whole = StateDictOptions(full_state_dict=True)
    note("whole by torch", lambda: get_model_state_dict(linear, options=whole))
    note("whole states by torch", lambda: get_optimizer_state_dict(linear, opt, options=whole))
    note("of another", lambda: of_another_rank(linear, linear))
    note("states of another", state_of_another_rank)
    note("module", lambda: fully_shard([nn.Linear(2, 2)]))
    note("container", lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])))
    note("again", lambda: fully_shard(linear))
    note("number", lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward="2"))
    two = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    note("subclass", lambda: fully_shard(_holding(nn.Parameter(two))))
    note("meta", lambda: fully_shard(nn.Linear(2, 2, device="meta")))
    note("differ", lambda: fully_shard(nn.Linear(2, 2 + rank)))
    note("tied", tied_to_child)
    note("modules", lambda: fully_shard(Branches())(torch.ones(2, 4), "ab"[rank]).sum().backward())
    note("parameters", lambda: fully_shard(Alone())(torch.ones(2, 4), "ab"[rank]).sum().backward())
    note("written", lambda: fully_shard(Writes(4, 4))(torch.ones(2, 4)).sum().backward())
    note("stepped", stepped_between)
    note("other memory", lambda: given_other_memory_between(True))
    note("whole with other memory", lambda: given_other_memory_between(False))
    note("exchanged", exchanged)
    note("missing", lambda: linear.load_state_dict({"weight": torch.ones(4, 4)}))
    note("size", lambda: linear.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(4)}))
    note("frozen", lambda: fully_shard(nn.Linear(2, 2).requires_grad_(rank == 0)))
    note("buffer", lambda: fully_shard(nn.BatchNorm1d(2, affine=False, device="meta")))
    note("copied", lambda: copy.deepcopy(linear))
    note("forward", lambda: linear.forward(torch.ones(2, 4)))
    linear(torch.ones(2, 4)).sum().backward()
    note("norms", lambda: torch.linalg.vector_norm(linear.weight.grad, dim=0))
    note("fewer", lambda: alone(torch.ones(2, 4), "ab"[: 2 - rank]).sum().backward())
    return found
