"""Random training steps in the global view beside one device: what a step computes, its plan and optimizer are drawn.

A program is a list of calls on growing numbers of values, the batch and the parameters first; calls that do not fit
their operands are left out while it is drawn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.support.spmd_programs import tensors
from tests.support.spmd_unsharded import gradients
from wholestep import comm
from wholestep.spmd import Replicate, Shard

DOUBLE = torch.float64


def dim(x: Tensor, i: int) -> int:
    return i % x.dim()


def place(x: Tensor, i: int, j: int) -> int:
    return j % x.shape[dim(x, i)]


def product(x: Tensor, y: Tensor) -> Tensor:
    pairs = [(a, b) for a in (x, x.mT) for b in (y, y.mT) if a.shape[-1] == b.shape[-2]]
    return torch.tanh(pairs[0][0] @ pairs[0][1])


def written(x: Tensor, how: Callable[[Tensor], Any]) -> Tensor:
    copied = x.clone()
    how(copied)
    return copied


# On two values and two small numbers.
CALLS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "add": lambda x, y, i, j: x + y,
    "addcmul": lambda x, y, i, j: torch.addcmul(x, y, y, value=0.5),
    "any": lambda x, y, i, j: x * (x > 0.3).any(dim(x, i), keepdim=True),
    "arange": lambda x, y, i, j: x + torch.arange(x.shape[-1], dtype=DOUBLE) * 0.1,
    "attention": lambda x, y, i, j: F.scaled_dot_product_attention(x, x, x, is_causal=bool(i % 2)),
    "batch_norm": lambda x, y, i, j: F.batch_norm(x, None, None, training=True),
    "cat": lambda x, y, i, j: torch.cat([x, y], dim(x, i)),
    "checkpoint": lambda x, y, i, j: checkpoint(lambda a: torch.tanh(a * 2).sin(), x, use_reentrant=False),
    "chunk": lambda x, y, i, j: x.chunk(2, dim(x, i))[j % 2],
    "column": lambda x, y, i, j: written(x, lambda z: z[..., 0].mul_(2)),
    "conv1d": lambda x, y, i, j: torch.tanh(F.conv1d(x, y, padding=i % 2)),
    "cosine": lambda x, y, i, j: F.cosine_similarity(x, y, dim=dim(x, i), eps=0.5),
    "count": lambda x, y, i, j: x * (x.shape[0] / x.numel()),
    "cumsum": lambda x, y, i, j: torch.tanh(x.cumsum(dim(x, i))),
    "detach": lambda x, y, i, j: x.detach() * 0.5,
    "diagonal": lambda x, y, i, j: x.diagonal(dim1=0, dim2=1),
    "div": lambda x, y, i, j: x / (1 + y.abs()),
    "dropout": lambda x, y, i, j: F.dropout(x, 0.25, True),
    "einsum": lambda x, y, i, j: torch.tanh(torch.einsum("...ij,kj->...ik", x, y)),
    "embedding": lambda x, y, i, j: F.embedding((x.detach()[..., 0] > 0).long() % y.shape[0], y),
    "expand": lambda x, y, i, j: x.unsqueeze(0).expand(2, *x.shape),
    "flatten": lambda x, y, i, j: x.flatten(0, i % x.dim()),
    "flip": lambda x, y, i, j: x.flip(dim(x, i)),
    "gather": lambda x, y, i, j: x.gather(dim(x, i), torch.full(x.shape, place(x, i, j))),
    "glu": lambda x, y, i, j: F.glu(x, dim(x, i)),
    "index": lambda x, y, i, j: x[torch.tensor([0, place(x, 0, j), 0])],
    "index_add": lambda x, y, i, j: torch.zeros(3, *x.shape[1:], dtype=DOUBLE).index_add(
        0, torch.arange(x.shape[0]) % 3, x
    ),
    "kron": lambda x, y, i, j: torch.tanh(x.unsqueeze(-1) * y.reshape(-1)[:3]),
    "layer_norm": lambda x, y, i, j: F.layer_norm(x, x.shape[-1:], eps=0.1),
    "lerp": lambda x, y, i, j: torch.lerp(x, y, 0.3),
    "linear": lambda x, y, i, j: torch.tanh(F.linear(x, y)),
    "log_softmax": lambda x, y, i, j: x.log_softmax(dim(x, i)),
    "masked": lambda x, y, i, j: x.masked_fill(x > 0.5, 0.1),
    "max": lambda x, y, i, j: x.max(dim(x, i))[0],
    "maximum": lambda x, y, i, j: torch.maximum(x, y),
    "mean": lambda x, y, i, j: x.mean(dim(x, i), keepdim=bool(j % 2)),
    "mul": lambda x, y, i, j: x * torch.sigmoid(y),
    "narrow": lambda x, y, i, j: x.narrow(dim(x, i), place(x, i, j), x.shape[dim(x, i)] - place(x, i, j)),
    "norm": lambda x, y, i, j: x / (x.norm(dim=dim(x, i), keepdim=True) + 1),
    "outer": lambda x, y, i, j: torch.outer(x, y),
    "pad": lambda x, y, i, j: F.pad(x, (i % 3, j % 2)),
    "permute": lambda x, y, i, j: x.permute([(d + i) % x.dim() for d in range(x.dim())]),
    "product": lambda x, y, i, j: product(x, y),
    "rand": lambda x, y, i, j: x + 0.1 * torch.rand_like(x),
    "relu": lambda x, y, i, j: x.relu(),
    "repeat": lambda x, y, i, j: x.repeat_interleave(2, dim(x, i)),
    "rms_norm": lambda x, y, i, j: F.rms_norm(x, x.shape[-1:], eps=0.1),
    "roll": lambda x, y, i, j: x.roll(j, dim(x, i)),
    "row": lambda x, y, i, j: written(x, lambda z: z[place(x, 0, j)].fill_(0.5)),
    "scatter": lambda x, y, i, j: x.scatter(0, torch.zeros(1, *x.shape[1:], dtype=torch.long), y[:1]),
    "select": lambda x, y, i, j: x.select(dim(x, i), place(x, i, j)),
    "softmax": lambda x, y, i, j: x.softmax(dim(x, i)),
    "sort": lambda x, y, i, j: x.sort(dim(x, i))[0],
    "split": lambda x, y, i, j: x.reshape(*x.shape[:-1], 2, -1),
    "squeeze": lambda x, y, i, j: x.squeeze(),
    "stack": lambda x, y, i, j: torch.stack([x, y], i % (x.dim() + 1)),
    "step": lambda x, y, i, j: x[i % 2 :: 2],
    "sub": lambda x, y, i, j: x - y,
    "sum": lambda x, y, i, j: x.sum(dim(x, i), keepdim=bool(j % 2)) * 0.5,
    "take": lambda x, y, i, j: x.take(torch.tensor([0, j % x.numel()])),
    "topk": lambda x, y, i, j: x.topk(min(2, x.shape[-1]), -1)[0],
    "transpose": lambda x, y, i, j: x.transpose(dim(x, i), dim(x, j)),
    "tril": lambda x, y, i, j: x.tril(i % 2),
    "unfold": lambda x, y, i, j: x.unfold(dim(x, i), 2, 1 + j % 2),
    "unsqueeze": lambda x, y, i, j: x.unsqueeze(i % (x.dim() + 1)),
    "var": lambda x, y, i, j: x.var(dim(x, i), unbiased=False),
    "view": lambda x, y, i, j: x.reshape(y.shape),
    "where": lambda x, y, i, j: torch.where(x > 0, x, y),
}
OF_TWO = ["add", "addcmul", "cat", "cosine", "div", "einsum", "embedding", "lerp", "linear", "maximum", "mul",
          "product", "scatter", "stack", "sub", "view", "where"]  # fmt: skip

# With epsilons that do not make much of gradients that vanish but for rounding, which differs with the order of sums.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-6, 1e-3)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-3, momentum=0.5, centered=True),
}

Made = tuple[str, int, int, int, int]  # a call, the positions of its operands, two numbers


class Net(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]], g: torch.Generator) -> None:
        super().__init__()
        made = (torch.randn(shape, generator=g, dtype=DOUBLE) * 0.5 for shape in shapes)
        self.weights = nn.ParameterList([nn.Parameter(one) for one in made])


@dataclass
class Program:
    """A step: which calls it makes, of which values its loss is, and what else it does.

    Attributes:
        reads: whether Python reads the loss before the backward, so that it runs at each call.
    """

    shapes: list[tuple[int, ...]]
    batch: tuple[int, ...]
    calls: list[Made]
    losses: list[int]
    outputs: list[int]
    optimizer: str
    clip: float | None
    reads: bool

    def __call__(self, model: Net, opt: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        opt.zero_grad()
        values = [x, *model.weights]
        for name, a, b, i, j in self.calls:
            values.append(CALLS[name](values[a], values[b], i, j))
        loss = sum(values[place].square().mean() for place in self.losses)
        assert isinstance(loss, Tensor)
        if self.reads:
            float(loss.detach())
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        opt.step()
        return [loss.detach(), *(values[place].detach().clone() for place in self.outputs)]


def drawn(seed: int) -> Program:
    """A program whose calls fit their operands."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = draw.choice([[2, 4, 8], [4, 8], [4], [1, 2, 3, 4, 5, 6], [3, 4], [2, 5]])
    shapes = [tuple(draw.choices(sizes, k=draw.choice([1, 2, 2, 2, 3]))) for _ in range(draw.randint(1, 4))]
    batch = (draw.choice([4, 8]), *draw.choices(sizes, k=draw.choice([1, 1, 2])))
    values = [torch.randn(batch, generator=g, dtype=DOUBLE), *Net(shapes, g).weights]
    calls: list[Made] = []
    for _ in range(50):
        a, b = (draw.choice([draw.randrange(len(values)), len(values) - 1]) for _ in "ab")
        name = draw.choice([draw.choice(list(CALLS)), draw.choice(OF_TWO)])
        made = name, a, b, draw.randrange(6), draw.randrange(6)
        try:
            found = CALLS[name](values[a], values[b], *made[3:])
            if found.requires_grad:
                torch.autograd.grad(found.sum(), values[1 : len(shapes) + 1], retain_graph=True, allow_unused=True)
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            continue
        if 0 < found.numel() < 3000 and found.dim() < 6 and found.isfinite().all() and len(calls) < 12:
            calls.append(made)
            values.append(found)
    trained = [n for n, value in enumerate(values) if value.requires_grad]
    losses = [*draw.choices(trained, k=draw.randint(1, 3)), trained[-1]]
    outputs = draw.choices(range(len(values)), k=2)
    how = draw.choice(list(OPTIMIZERS)), draw.choice([None, 0.5]), draw.random() < 0.4
    return Program(shapes, batch, calls, losses, outputs, *how)


def planned(seed: int, program: Program, mesh: ws.DeviceMesh) -> tuple[Any, int]:
    """Plans for all axes of a mesh, and along how many ranks the batch is split."""
    draw = random.Random(seed + 1)
    roles = {f"weights.{n}": Shard(draw.randrange(len(shape))) for n, shape in enumerate(program.shapes)
             if draw.random() < 0.7}  # fmt: skip
    fully = draw.choice([1, 64]), draw.choice(["always", "cheaper"])
    if len(mesh.axes) > 1:
        shard = ws.FullyShard("a", min_bytes=fully[0], gather=fully[1])
        return [ws.TensorParallel("b", roles), shard], 2
    split = draw.random() < 0.5
    batch = Shard(0) if split else Replicate()
    if draw.random() < 0.5:
        return ws.FullyShard("a", min_bytes=fully[0], gather=fully[1], batch=batch), 2 if split else 1
    return ws.TensorParallel("a", roles, batch=batch), 2 if split else 1


def differences(seeds: Sequence[int], shape: tuple[int, ...]) -> dict[int, list[str]]:
    """By seed, what differs from one device after each of three steps."""
    return {seed: list(_differences(seed, shape)) for seed in seeds}


def _differences(seed: int, shape: tuple[int, ...]) -> Iterator[str]:
    program, g = drawn(seed), torch.Generator().manual_seed(seed)
    mesh = ws.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    plan, ranks = planned(seed, program, mesh)
    models = [Net(program.shapes, g)]
    models.append(copy.deepcopy(models[0]))
    opts = [OPTIMIZERS[program.optimizer]([*model.parameters()]) for model in models]
    step = ws.compile(program, mesh=mesh, plan=plan, fullgraph=not program.reads)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None and comm.get_world_size() == len(mesh.mesh.flatten())
    for number in range(3):
        x = torch.randn(program.batch, generator=g, dtype=DOUBLE)
        torch.manual_seed(seed + number)
        expected = program(models[0], opts[0], x)
        state = torch.get_rng_state()
        torch.manual_seed(seed + number)
        result = step(models[1], opts[1], x.chunk(ranks)[coordinate[0] if ranks > 1 else 0])
        pairs = {
            "result": (result, expected),
            "model": (ws.full_state_dict(models[1]), models[0].state_dict()),
            "state": (ws.full_state_dict(opts[1])["state"], opts[0].state_dict()["state"]),
            "gradients": (gradients(models[1]), gradients(*models)),
            "generator": ([torch.get_rng_state()], [state]),
        }
        for name, both in pairs.items():
            found = list(zip(*map(tensors, both), strict=True))
            if not all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-8, atol=1e-9) for a, b in found):
                yield f"step {number}: {name}"
