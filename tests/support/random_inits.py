"""Random makings of a module, whole and within `deferred()`: what a constructor calls is drawn from tables."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from wholestep.deferred_init import part_values, record_of
from wholestep.parallel import deferred, materialize
from wholestep.tensor_parts import Part

SHAPES = [(4, 6), (6, 4), (8,), (4, 6, 2), (6, 6), (24,), (3, 8)]
Shape = tuple[int, ...]


def from_inference() -> Tensor:
    with torch.inference_mode():
        return torch.rand(6, 6)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def sinusoids() -> Tensor:
    table, angles = torch.zeros(8, 6), torch.arange(8)[:, None] * torch.exp(torch.arange(0, 6, 2) * -0.3)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


def item(x: Tensor, key: Any, value: Any) -> None:
    x[key] = value


def trained(layer: nn.Module) -> nn.Module:
    layer(torch.ones(3, 6)).sum().backward()
    with torch.no_grad():
        for p in layer.parameters():
            p.sub_(p.grad)  # type: ignore[arg-type]
    layer.zero_grad()
    return layer


def called(layer: nn.Module) -> nn.Module:
    layer(torch.randn(3, 6))
    return layer


# A new tensor, of a shape or two numbers.
MAKE: dict[str, Callable[[Shape, int, int], Tensor]] = {
    "arange": lambda s, i, j: torch.arange(24) / (i + 1),
    "bernoulli": lambda s, i, j: torch.bernoulli(torch.full(s, 0.5)),
    "bf16": lambda s, i, j: torch.rand(s, dtype=torch.bfloat16),
    "complex": lambda s, i, j: torch.complex(torch.rand(s), torch.rand(s)),
    "empty": lambda s, i, j: torch.empty(s).normal_(),
    "eye": lambda s, i, j: torch.eye(6),
    "full": lambda s, i, j: torch.full(s, i / 7),
    "generator": lambda s, i, j: torch.randn(s, generator=seeded(j)),
    "inference": lambda s, i, j: from_inference(),
    "legacy": lambda s, i, j: torch.Tensor(*s).fill_(i),
    "linspace": lambda s, i, j: torch.linspace(0, i, 24),
    "list": lambda s, i, j: torch.tensor([[i + k * 0.5] * 6 for k in range(4)]),
    "mask": lambda s, i, j: torch.triu(torch.full((6, 6), float("-inf")), 1),
    "meta": lambda s, i, j: torch.zeros_like(torch.empty(s, device="meta"), device="cpu"),
    "multinomial": lambda s, i, j: torch.multinomial(torch.ones(30), 24),
    "normal": lambda s, i, j: torch.normal(torch.zeros(s), torch.ones(s)),
    "numpy": lambda s, i, j: torch.from_numpy(numpy.arange(24.0) * i),
    "ones": lambda s, i, j: torch.ones(s),
    "qr": lambda s, i, j: torch.linalg.qr(torch.randn(6, 6))[0],
    "rand": lambda s, i, j: torch.rand(s),
    "randint": lambda s, i, j: torch.randint(i + 1, s),
    "randn": lambda s, i, j: torch.randn(s),
    "randperm": lambda s, i, j: torch.randperm(24),
    "sinusoids": lambda s, i, j: sinusoids(),
    "strided": lambda s, i, j: torch.empty_strided((4, 6), (1, 4)).uniform_(),
    "window": lambda s, i, j: torch.hann_window(24),
    "zeros": lambda s, i, j: torch.zeros(s),
}
# A tensor of two others.
TAKE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "abs": lambda x, y, i: x.abs(),
    "add": lambda x, y, i: x + y,
    "as a parameter": lambda x, y, i: nn.Parameter(x),
    "boolean": lambda x, y, i: x[x > 0],
    "cat": lambda x, y, i: torch.cat([x, y]),
    "chunk": lambda x, y, i: x.chunk(2)[i % 2],
    "clone": lambda x, y, i: x.clone(),
    "column": lambda x, y, i: x[..., 1:3],
    "copy": lambda x, y, i: copy.deepcopy(x),
    "cumsum": lambda x, y, i: x.cumsum(0),
    "data": lambda x, y, i: x.data,
    "diagonal": lambda x, y, i: x.diagonal(),
    "double": lambda x, y, i: x.double(),
    "dropout": lambda x, y, i: F.dropout(x, 0.5),
    "expand": lambda x, y, i: x.unsqueeze(0).expand(2, *x.shape),
    "half": lambda x, y, i: x.to(torch.bfloat16),
    "if": lambda x, y, i: y * 2 if x.float().mean() > 0 else y.clone(),
    "like": lambda x, y, i: torch.randn_like(x),
    "list": lambda x, y, i: torch.tensor(x.tolist()),
    "matmul": lambda x, y, i: x @ y,
    "new": lambda x, y, i: x.new_full((4, 6), i),
    "norm": lambda x, y, i: x / x.norm(),
    "nonzero": lambda x, y, i: x.nonzero(),
    "number": lambda x, y, i: y * x.sum().item(),
    "numpy": lambda x, y, i: torch.from_numpy(x.detach().numpy() * 2),
    "permute": lambda x, y, i: x.permute([*reversed(range(x.dim()))]),
    "pickle": lambda x, y, i: pickle.loads(pickle.dumps(x)),
    "row": lambda x, y, i: x[i % x.shape[0]],
    "sort": lambda x, y, i: x.sort(0)[0],
    "sparse": lambda x, y, i: x.to_sparse().to_dense(),
    "step": lambda x, y, i: x[::2],
    "strided": lambda x, y, i: x.as_strided((3, 3), (2, 1)),
    "transpose": lambda x, y, i: x.t(),
    "view": lambda x, y, i: x.view(-1),
    "where": lambda x, y, i: torch.where(x > 0, x, y),
}
# A write to the first.
WRITE: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "add": lambda x, y, i: x.add_(y),
    "column": lambda x, y, i: x[..., 0].normal_(),
    "copy": lambda x, y, i: x.copy_(y),
    "copy transposed": lambda x, y, i: x.copy_(x.t().clone()),
    "data": lambda x, y, i: setattr(x, "data", y),
    "data of another type": lambda x, y, i: setattr(x, "data", x.data.to(torch.bfloat16)),
    "diagonal": lambda x, y, i: x.fill_diagonal_(i),
    "divide": lambda x, y, i: x.div_(x.norm() + 1),
    "foreach": lambda x, y, i: torch._foreach_mul_([x, y], 0.5),
    "generator": lambda x, y, i: nn.init.normal_(x, generator=seeded(i)),
    "index": lambda x, y, i: item(x, torch.tensor([0, 1]), 7),
    "itself": lambda x, y, i: x.copy_(x),
    "kaiming": lambda x, y, i: nn.init.kaiming_normal_(x),
    "mask": lambda x, y, i: item(x, x > 0.3, 0.125),
    "numpy": lambda x, y, i: x.numpy().fill(i),
    "orthogonal": lambda x, y, i: nn.init.orthogonal_(x),
    "out": lambda x, y, i: torch.mul(x, 2, out=y),
    "resize": lambda x, y, i: x.resize_(2, 3).zero_(),
    "rows": lambda x, y, i: item(x, slice(0, 2), y[:2]),
    "scale": lambda x, y, i: x.mul_(0.5),
    "scale data": lambda x, y, i: x.data.mul_(2),
    "set": lambda x, y, i: x.set_(y),  # type: ignore[call-overload]
    "share": lambda x, y, i: x.share_memory_(),
    "sparse": lambda x, y, i: nn.init.sparse_(x, 0.3),
    "swap": lambda x, y, i: torch.utils.swap_tensors(x, y),
    "transpose": lambda x, y, i: x.t_(),
    "truncated": lambda x, y, i: nn.init.trunc_normal_(x),
    "uniform": lambda x, y, i: x.uniform_(-1, 1),
    "unsqueeze": lambda x, y, i: x.unsqueeze_(0),
    "zero": lambda x, y, i: x.zero_(),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "called": lambda: called(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "double": lambda: nn.Linear(6, 6, dtype=torch.float64),
    "embedding": lambda: nn.Embedding(7, 6, padding_idx=2),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "from meta": lambda: nn.Linear(6, 6, device="meta").to_empty(device="cpu").apply(weights),
    "lazy": lambda: nn.LazyLinear(6),
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.BatchNorm1d(16),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "pretrained": lambda: nn.Embedding.from_pretrained(torch.randn(7, 6)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.4),
    "recurrent": lambda: nn.LSTM(6, 4, 2),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "trained": lambda: trained(nn.Linear(6, 6)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
}


def weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and not parametrize.is_parametrized(module):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0, 0.5)


@torch.no_grad()
def copy_weights(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=False):
        p.copy_(q)


class Making:
    """A module that is being made, tensors that are to be its own, and numbers that were read."""

    def __init__(self, lazily: bool) -> None:
        self.context: Callable[[], Any] = deferred if lazily else nullcontext
        self.module = nn.Module()
        self.module.layers = nn.ModuleList()
        self.tensors, self.log = list[Tensor](), list[Any]()

    def layer(self, number: int) -> Any:
        return self.module.layers[number % len(self.module.layers)]  # type: ignore[operator, index, arg-type]

    def add(self, layer: nn.Module) -> None:
        self.module.layers.append(layer)  # type: ignore[operator, union-attr]

    def tensor(self, number: int) -> Tensor:
        return self.tensors[-1 - (number**2 // 150) % len(self.tensors)]

    def keep(self) -> None:
        """All tensors become parameters, buffers and attributes of the module."""
        for number, tensor in enumerate(self.tensors):
            if isinstance(tensor, nn.Parameter):
                self.module.register_parameter(f"t{number}", tensor)
            elif number % 3:
                self.module.register_buffer(f"t{number}", tensor)
            else:
                setattr(self.module, f"t{number}", tensor)


def within(making: Making, call: Callable[[], None]) -> None:
    with making.context():
        call()


def forked(making: Making) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        making.add(nn.Linear(6, 6))


# On the module, or on the process.
BESIDES: dict[str, Callable[[Making, int, int], Any]] = {
    "apply": lambda m, i, j: m.module.apply(weights),
    "copy": lambda m, i, j: setattr(m, "module", copy.deepcopy(m.module)),
    "copy a layer": lambda m, i, j: m.add(copy.deepcopy(m.layer(i))),
    "copy weights": lambda m, i, j: copy_weights(m.layer(i), m.layer(j)),
    "default type": lambda m, i, j: torch.set_default_dtype([torch.float64, torch.bfloat16, torch.float32][i % 3]),
    "draw": lambda m, i, j: m.log.append(torch.rand(3).tolist()),
    "fork": lambda m, i, j: forked(m),
    "forward": lambda m, i, j: m.log.append(m.layer(i)(torch.ones(2, 6)).sum().item()),
    "freeze": lambda m, i, j: m.layer(i).requires_grad_(False),
    "half": lambda m, i, j: m.layer(i).half(),
    "load": lambda m, i, j: m.module.load_state_dict(copy.deepcopy(m.module.state_dict()), assign=bool(i % 2)),
    "load scaled": lambda m, i, j: m.layer(i).load_state_dict({k: v * 2 for k, v in m.layer(i).state_dict().items()}),
    "nested": lambda m, i, j: within(m, lambda: m.add(nn.Linear(6, 6))),
    "norms": lambda m, i, j: m.log.append([p.detach().double().norm().item() for p in m.layer(i).parameters()]),
    "parameters": lambda m, i, j: m.tensors.extend([*m.layer(i).parameters()][:1]),
    "pickle": lambda m, i, j: m.add(pickle.loads(pickle.dumps(m.layer(i)))),
    "reset": lambda m, i, j: m.layer(i).reset_parameters(),
    "seed": lambda m, i, j: torch.manual_seed(i),
    "tie": lambda m, i, j: setattr(m.layer(i), "weight", m.layer(j).weight),
    "undo": lambda m, i, j: parametrize.remove_parametrizations(m.layer(i), "weight"),
    "vector": lambda m, i, j: m.tensors.append(nn.utils.parameters_to_vector(m.layer(i).parameters())),
}
TABLES: dict[str, dict[str, Any]] = {"make": MAKE, "take": TAKE, "write": WRITE, "layer": LAYERS, "besides": BESIDES}
Call = tuple[str, str, int, int, int]  # a table, a name in it, three numbers


def drawn(seed: int) -> list[Call]:
    draw, calls = random.Random(seed), list[Call]()
    for _ in range(draw.randint(2, 14)):
        kind = draw.choice(["make", "make", "take", "take", "write", "write", "layer", "besides"])
        calls.append((kind, draw.choice([*TABLES[kind]]), draw.randrange(8), draw.randrange(100), draw.randrange(100)))
    return calls


def run(making: Making, call: Call) -> None:
    kind, name, number, one, two = call
    piece = TABLES[kind][name]
    if kind == "make":
        making.tensors.append(piece(SHAPES[one % len(SHAPES)], number, two))
    elif kind == "take":
        making.tensors.append(piece(making.tensor(one), making.tensor(two), number))
    elif kind == "write":
        piece(making.tensor(one), making.tensor(two), number)
    elif kind == "layer":
        making.add(piece())
    else:
        piece(making, one, two)


def made(calls: list[Call], lazily: bool) -> tuple[Making, list[str]]:
    """What the calls make, and the errors of those that raised."""
    making, errors = Making(lazily), list[str]()
    torch.manual_seed(0)
    try:
        with making.context():
            for call in calls:
                try:
                    run(making, call)
                    errors.append("")
                except Exception as error:  # noqa: BLE001 - of calls that do not fit their operands, in both runs
                    errors.append(type(error).__name__)
            making.keep()
    finally:
        torch.set_default_dtype(torch.float32)
    return making, errors


def own(module: nn.Module) -> dict[str, Tensor]:
    """All tensors that modules have."""
    return {
        f"{name}.{key}": value
        for name, one in module.named_modules()
        for held in (one._parameters, one._buffers, vars(one))
        for key, value in held.items()
        if isinstance(value, Tensor) and not isinstance(value, nn.parameter.UninitializedTensorMixin)
    }


def facts(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """All of a tensor but its values, and which others have its memory."""
    first: dict[int, str] = {}
    return {
        name: (type(x), x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad, x.is_leaf,
               first.setdefault(x.untyped_storage()._cdata, name))
        for name, x in tensors.items()
    }  # fmt: skip


def nbytes(x: Tensor) -> bytes:
    x = x.detach().resolve_conj().clone(memory_format=torch.contiguous_format).flatten()
    return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""


def differences(calls: list[Call]) -> Iterator[str]:
    """What is otherwise in a module that was made within `deferred()`."""
    (usual, errors), state = made(calls, lazily=False), torch.get_rng_state()
    (lazy, late), late_state = made(calls, lazily=True), torch.get_rng_state()
    if any(one and not other for one, other in zip(errors, late, strict=True)):
        return  # what only a kernel refuses, it refuses when the module gets its values
    if errors != late or repr(usual.log) != repr(lazy.log) or not torch.equal(state, late_state):
        yield f"errors {errors} {late}, numbers {usual.log} {lazy.log}, or the generator"
    ones, others = own(usual.module), own(lazy.module)
    for name, x in others.items():
        if record_of(x) is not None and x.dim() and len(x) > 1:
            part = part_values(x, Part.rows(tuple(x.shape), 1, len(x)))
            if nbytes(part) != nbytes(ones[name][1:]):
                yield f"a part of {name}"
    materialize(lazy.module)
    if facts(ones) != facts(others):
        yield f"facts {facts(ones)} {facts(others)}"
    yield from (name for name, x in ones.items() if nbytes(x) != nbytes(others[name]))
