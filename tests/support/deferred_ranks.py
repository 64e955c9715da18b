"""Models made within `deferred()` in every rank, beside the same models made as usual."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import wholestep as ws
from wholestep import comm
from wholestep.parallel import deferred, fully_shard
from wholestep.tensor_parts import part_of


def llama(tied: bool = True) -> nn.Module:
    """A Llama of transformers, with tied weights."""
    transformers = __import__("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def experts() -> nn.Module:
    """A Mixtral of transformers, in whose checkpoints each expert has its own tensors."""
    transformers = __import__("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]


def made(make: Any, lazily: bool) -> nn.Module:
    torch.manual_seed(5)
    with deferred() if lazily else nullcontext():
        return make()  # type: ignore[no-any-return]


def tokens(size: int) -> torch.Tensor:
    return torch.randint(0, 300, (size, 12), generator=torch.Generator().manual_seed(3))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=x, labels=x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def sequence() -> nn.Module:
    """Some layers, for plans: what these are given is a module's only output."""
    return nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.LayerNorm(256), nn.Linear(256, 192), nn.Linear(192, 96))


def eager(lazily: bool) -> dict[str, Any]:
    """Two steps under `fully_shard`."""
    model = made(llama, lazily)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = [float(train_step(model, optimizer, tokens(4))) for _ in range(2)]
    return {"losses": losses, "next": float(torch.rand(())), "weights": ws.full_state_dict(model)}


PLANS = {
    "FullyShard": lambda: ws.FullyShard("ranks", min_bytes=1024),
    "TensorParallel": lambda: ws.TensorParallel("ranks", {"0": "column", "3": "row"}),
    "ShardedOptimizer": lambda: ws.ShardedOptimizer("ranks"),
}


def compiled(plan: str, lazily: bool, reads: bool = False) -> dict[str, Any]:
    """Two steps under a plan; how many parameters are parts after the first."""
    model = made(sequence, lazily)
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("ranks",))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            loss.item()
        return loss

    run = ws.compile(step, mesh=mesh, plan=PLANS[plan](), fullgraph=not reads)
    losses = [float(run(torch.ones(4, 96))) for _ in range(2)]
    parts = sum(part_of(one) is not None for one in model.parameters())
    return {"losses": losses, "next": float(torch.rand(())), "parts": parts, "weights": ws.full_state_dict(model)}


def beside_whole() -> dict[str, bool]:
    """Whether losses, weights, parts and the next random number are those of models made as usual."""
    ways: dict[str, Any] = {"eager": eager} | {plan: partial(compiled, plan) for plan in PLANS}
    ways["reads"] = partial(compiled, "FullyShard", reads=True)
    found = {}
    for name, train in ways.items():
        usual, lazy = train(lazily=False), train(lazily=True)
        weights, others = usual.pop("weights"), lazy.pop("weights")
        found[name] = usual == lazy and all(torch.equal(weights[key], others[key]) for key in others)
    return found


def peaks(layers: int) -> tuple[int, int, int]:
    """Bytes that a rank of many takes at most for its part of a stack of layers of 16 MiB, and holds then."""

    def status(name: str) -> int:
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))  # noqa: SIM115
        return int(lines[name].split()[0]) * 1024

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from now on
    before = status("VmHWM")
    with deferred():
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(layers)))
    making = status("VmHWM") - before
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return making, status("VmHWM") - before, sum(one.nbytes for one in model.parameters())


class Other(nn.Module):
    """Values that are made in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(400, 64, padding_idx=3)
        self.up, self.bf16 = nn.Linear(64, 512), nn.Linear(512, 64, dtype=torch.bfloat16)
        nn.init.orthogonal_(self.up.weight)
        nn.init.trunc_normal_(self.bf16.weight, std=0.02)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 600)
        self.free = nn.Parameter(torch.randn(300, 300))
        self.head = nn.Linear(64, 400, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tril(torch.ones(600, 600, dtype=torch.bool)).view(1, 1, 600, 600))
        self.rates = [one.item() for one in torch.linspace(0, 1, 5)]
        self.seen, self.drawn = torch.rand(200, 200), float(torch.rand(150, 150).numpy().sum())
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3))
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(200, 200)))
        self.scaled = nn.Parameter(torch.empty(200, 200))
        with torch.no_grad():
            self.scaled.uniform_().mul_(self.free[:200, :200]).narrow(0, 3, 5).zero_()
            self.free.mul_(2)
        self.view = self.free.detach()[3:]


def mistakes() -> dict[str, Any]:
    """What every rank is told."""
    found: dict[str, Any] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {error}"

    with torch.device("meta"):
        left = nn.Linear(200, 300)
    attempt("meta", lambda: fully_shard(left))
    torch.manual_seed(comm.get_rank())
    with deferred():
        other = nn.Linear(200, 300)
    attempt("seeds", lambda: fully_shard(other))
    mesh = ws.init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    step = ws.compile(lambda x: other(x).sum().backward(), mesh=mesh, plan=ws.FullyShard("ranks"), fullgraph=True)
    attempt("compiled", lambda: step(torch.ones(2, 200)))
    attempt("used", lambda: other(torch.ones(2, 200)))
    with deferred():  # torch's own way from the meta device, recorded
        left.to_empty(device="cpu")
        torch.manual_seed(1)
        left.reset_parameters()
    fully_shard(left)
    torch.manual_seed(1)
    usual = nn.Linear(200, 300)
    whole = ws.full_state_dict(left)
    found["reset"] = all(torch.equal(whole[name], value) for name, value in usual.state_dict().items())
    return found
