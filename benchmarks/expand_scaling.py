"""How the cost of expansion grows with the model: captured GPT steps of 12, 24 and 48 layers for a mesh of 2 x 2 ranks.

    python -m benchmarks.expand_scaling

Layers split along one axis, fully sharded parameters along the other, then the passes that pack collectives and move
them: all that lies between a captured step and the graph of one rank. Nothing runs. Linear growth is a ratio of 2 a
row; the project's bound is 5 seconds for 48 layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.optim import AdamW

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import train_step
from examples.gpt import GPT, GPTConfig
from wholestep import comm
from wholestep.capture import no_collection
from wholestep.capture_call import capture
from wholestep.ir import StepGraph
from wholestep.spmd import PlanExecutor

ROLES: dict[str, Any] = {"*.qkv": "column", "*.up": "column", "*.merge": "row", "*.down": "row"}


def expansion(layers: int) -> tuple[int, Callable[[], StepGraph]]:
    """Captures a step; gives its number of calls, and what makes the graph of one rank of it."""
    config = GPTConfig(layers=layers, width=256, context=16)
    model = GPT(config)
    tokens = torch.randint(config.vocabulary, (2, config.context))
    batch = {"x": tokens, "y": tokens}
    mesh = ws.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    executor = PlanExecutor(mesh, [ws.TensorParallel("tp", ROLES), ws.FullyShard("dp")])
    arguments = model, AdamW(model.parameters()), batch
    step = capture(train_step, arguments, {}, differentiable=False, parts=executor.parts)[1].step

    def expand() -> StepGraph:
        made = step
        for transform in executor.passes_of(step):
            made = transform(made)
        return made

    return sum(node.op == "call_function" for node in step.graph.nodes), expand


def seconds(expand: Callable[[], StepGraph]) -> float:
    """How long one expansion takes."""
    start = time.perf_counter()
    with no_collection():  # as when a step is captured
        expand()
    return time.perf_counter() - start


def main() -> None:
    """Prints the times and their ratios, medians of turns taken in one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=(12, 24, 48))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    comm.init_process_group("null", rank=0, world_size=4)
    steps = [expansion(layers) for layers in options.layers]
    seconds(steps[0][1])  # what is imported or built once in a process is no part of growth
    turns = [[seconds(expand) for _, expand in steps] for _ in range(options.rounds)]
    columns = [list(column) for column in zip(*turns, strict=True)]
    rows = [
        [
            str(layers),
            f"{calls:,}",
            f"{median(column):.2f}",
            f"{median(map(float.__truediv__, column, columns[0])):.2f}",
        ]
        for layers, (calls, _), column in zip(options.layers, steps, columns, strict=True)
    ]
    print(markdown(("layers", "calls", "expansion s", "ratio"), rows))


if __name__ == "__main__":
    main()
