"""How long it takes, and how much memory, to say what one rank of many will send and hold for a Llama.

    python -m benchmarks.explain_llama                        8 billion parameters, rank 0 of 256
    python -m benchmarks.explain_llama --layers 4 --ranks 16  a smaller one

The model, its optimizer and the batch are fake tensors; one process plays the rank. Nothing runs.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import wholestep as ws
from wholestep import comm

MIB = 1 << 20


def llama(layers: int, width: int) -> LlamaConfig:
    """Llama 3's shape; 32 layers of width 4096 are its 8 billion parameters."""
    settings: dict[str, Any] = {"use_cache": False, "attn_implementation": "sdpa"}
    return LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=width // 128, num_key_value_heads=max(1, width // 512), max_position_embeddings=8192,
        **settings,
    )  # fmt: skip


def train_step(model: Any, opt: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    """A step as anybody writes it."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def plans(names: list[str]) -> list[Any]:
    """The plans by name, each with its axis: ``FullyShard:dp``."""
    return [getattr(ws, kind)(axis) for kind, axis in (name.split(":") for name in names)]


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Builds, explains, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--inner", type=int, default=16, help="ranks along the second axis; 1 for one axis")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--plan", nargs="+", default=["DataParallel:outer", "ShardedOptimizer:inner"])
    args = parser.parse_args()
    start = time.perf_counter()
    comm.init_process_group("null", rank=0, world_size=args.ranks)
    mesh = ws.init_device_mesh("cpu", (args.ranks // args.inner, args.inner), mesh_dim_names=("outer", "inner"))
    with FakeTensorMode():
        model = LlamaForCausalLM(llama(args.layers, args.width))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.randint(0, 128256, (args.batch, args.length))
    count = sum(p.numel() for p in model.parameters())
    built = time.perf_counter()
    print(f"{count / 1e9:.2f} billion parameters, {built - start:.1f} s to build, {peak():,.0f} MiB at most so far")
    step = ws.compile(train_step, mesh=mesh, plan=plans(args.plan))
    found = step.explain(model, opt, ids)
    print(found)
    print(f"\nexplained in {time.perf_counter() - built:.1f} s, {peak():,.0f} MiB at most")


if __name__ == "__main__":
    main()
