"""The whole step of ToyModel and of the 20-layer MLP beside JAX: jitted, donated, with the same AdamW, in turns.

    pip install jax
    taskset -c 0 python -m benchmarks.jax_step --threads 1

All start from the same weights and see the same batch; the losses of the third step are compared. JAX has no setting
for the number of threads of its CPU backend other than the cores that the process may use, which `taskset` says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import mlp, toy, train_step

RATE, BETAS, EPSILON, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


class Jax:
    """A model of linear layers, some with relu after them, and AdamW, as one jitted function."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        layers = [*model.layers.children()]  # type: ignore[operator, union-attr]
        linear = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        relu = tuple(place + 1 < len(layers) and isinstance(layers[place + 1], nn.ReLU) for place in linear)
        self.weights = [
            tuple(jnp.array(p.detach().numpy().copy()) for p in (layers[place].weight, layers[place].bias))
            for place in linear
        ]
        zeros = jax.tree.map(jnp.zeros_like, self.weights)
        self.state = zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros((), jnp.float32)
        self.batch = tuple(jnp.array(batch[name].numpy()) for name in "xy")

        def loss(weights: Any, x: Any, y: Any) -> Any:
            for (weight, bias), activated in zip(weights, relu, strict=True):
                x = x @ weight.T + bias
                x = jnp.maximum(x, 0) if activated else x
            return jnp.mean((x - y) ** 2)

        def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, x, y)
            averages, squares, count = state
            count = count + 1
            averages = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, averages, grads)
            squares = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, squares, grads)
            first, second = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count

            def updated(p: Any, m: Any, v: Any) -> Any:
                return p * (1 - RATE * DECAY) - RATE / first * m / (jnp.sqrt(v) / jnp.sqrt(second) + EPSILON)

            return jax.tree.map(updated, weights, averages, squares), (averages, squares, count), value

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> float:
        self.weights, self.state, value = self.step(self.weights, self.state, *self.batch)
        return float(value)


def _loss_of(step: Callable[..., torch.Tensor], *args: Any) -> float:
    return float(step(*args))


def forms(build: Callable[[], Any]) -> dict[str, Callable[[], float]]:
    """name -> one step, of all ways to run a model."""
    found: dict[str, Callable[[], float]] = {}
    for name, step, options in (
        ("eager", train_step, {}), ("eager, fused AdamW", train_step, {"fused": True}),
        ("ours", ws.compile(train_step), {}), ("ours, fused AdamW", ws.compile(train_step), {"fused": True}),
    ):  # fmt: skip
        torch.manual_seed(0)
        model, batch = build()
        opt = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, **options)
        found[name] = partial(_loss_of, step, model, opt, batch)
    torch.manual_seed(0)
    found["JAX"] = Jax(*build())
    return found


def main() -> None:
    """Prints a row for each way, with medians of turns and their ratios to JAX's and eager's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for model, build, rounds in (("MLP", mlp, options.rounds), ("ToyModel", toy, max(3, options.rounds // 20))):
        ways = forms(build)
        for _ in range(3):
            losses = {name: run() for name, run in ways.items()}
        np.testing.assert_allclose([*losses.values()], losses["eager"], rtol=1e-4)  # before roundings add up
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        for name, own in times.items():
            ratios = (median(a / b for a, b in zip(own, times[other], strict=True)) for other in ("JAX", "eager"))
            rows.append([model, name, f"{1e3 * median(own):.2f}", *(f"{ratio:.2f}" for ratio in ratios)])
    print(markdown(("model", "way", "ms", "of JAX's", "of eager's"), rows))


if __name__ == "__main__":
    main()
