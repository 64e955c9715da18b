"""Programs that every rank of a mesh runs: mixtures of plans beside one device's step on the whole batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

import tests.support.spmd_unsharded as wholes
import wholestep as ws
from wholestep.spmd import DataParallel, FullyShard, ShardedOptimizer, TensorParallel

ROLES = {
    "mlp": {"fc1": "column", "fc2": "row"},
    "gpt": {"*.qkv": "column", "*.proj": "row", "*.mlp.0": "column", "*.mlp.2": "row"},
}


def mixtures(name: str) -> dict[str, tuple[dict[str, int], list[Any], list[str]]]:
    """Axes, plans, and the axes over which the batch is split."""
    split = TensorParallel("tp", ROLES[name])
    return {
        "split, then sharded": ({"dp": 2, "tp": 2}, [split, FullyShard("dp", min_bytes=1)], ["dp"]),
        "sharded, then split": ({"dp": 2, "tp": 2}, [FullyShard("dp", min_bytes=1), split], ["dp"]),
        "sharded twice": ({"a": 2, "b": 2}, [FullyShard("a", min_bytes=1), FullyShard("b", min_bytes=1)], ["a", "b"]),
        "sharded and replicated": ({"r": 2, "s": 2}, [FullyShard("s", min_bytes=1), DataParallel("r")], ["r", "s"]),
        "split, state sharded": ({"dp": 2, "tp": 2}, [split, ShardedOptimizer("dp", min_bytes=1)], ["dp"]),
        "three axes": (
            {"r": 2, "s": 2, "tp": 2}, [split, FullyShard("s", min_bytes=1), DataParallel("r")], ["r", "s"],
        ),
    }  # fmt: skip


def ranks_of(name: str, mixture: str) -> int:
    return math.prod(mixtures(name)[mixture][0].values())


def against_one_device(name: str, mixture: str, steps: int = 4) -> list[tuple[float, float, float]]:
    """Losses of both sides, and the largest difference of a parameter, after each step."""
    axes, plans, over = mixtures(name)[mixture]
    mesh = ws.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    case, g = wholes.CASES[name], torch.Generator().manual_seed(3)
    reference = case.model().double()
    for p in reference.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.3
    model = copy.deepcopy(reference)
    one, many = case.optimizer(reference), case.optimizer(model)
    step = ws.compile(case.step, mesh=mesh, plan=plans, fullgraph=True)
    place, pieces = 0, 1
    for axis in over:
        place, pieces = place * axes[axis] + mesh.get_local_rank(axis), pieces * axes[axis]
    found = []
    for _ in range(steps):
        batch = case.batch(g)
        expected = wholes.tensors(case.step(reference, one, *batch))[-1]
        loss = wholes.tensors(step(model, many, *(t.chunk(pieces)[place] for t in batch)))[-1]
        mine, theirs = ws.full_state_dict(model), reference.state_dict()
        model.load_state_dict(mine)  # takes the parts of whole tensors
        found.append((float(loss), float(expected), max(float((mine[k] - t).abs().max()) for k, t in theirs.items())))
    return found
