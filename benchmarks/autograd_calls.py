"""What it costs to call a compiled module inside of ordinary autograd, and to capture one.

`python -m benchmarks.autograd_calls` compares with `torch.compile(backend="aot_eager")`, in turns in the same run:

- calls: forward and backward of a small MLP, and what that is beyond eager's own time;
- capture (`--bert`): the first forward and backward of BERT-base, without eager's own.

Only the ratios mean anything.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import wholestep as ws


def once(model: nn.Module, inputs: tuple[Any, ...], parameters: list[nn.Parameter]) -> None:
    """One forward and backward; gradients are dropped."""
    out = model(*inputs)
    (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    for parameter in parameters:
        parameter.grad = None


def timed(action: Callable[[], Any]) -> float:
    """Seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def calls(rounds: int, repeats: int) -> None:
    """Prints the medians of a small module's forward and backward."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    variants: dict[str, Any] = {
        "eager": mlp,
        "aot_eager": torch.compile(copy.deepcopy(mlp), backend="aot_eager"),
        "ours": ws.compile(copy.deepcopy(mlp), fullgraph=True),
    }
    parameters = {name: list(model.parameters()) for name, model in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, model in variants.items():
            start = time.perf_counter()
            for _ in range(repeats):
                once(model, (x,), parameters[name])
            spent = time.perf_counter() - start
            if round_:
                times[name].append(spent / repeats)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    beyond = {name: medians[name] - medians["eager"] for name in ("aot_eager", "ours")}
    for name, spent in medians.items():
        print(f"call, {name:9}  {spent * 1e6:7.1f} us   {spent / medians['aot_eager']:.2f} of aot_eager")
    print(f"beyond eager: ours {beyond['ours'] / beyond['aot_eager']:.2f} of aot_eager")


def capture() -> None:
    """Prints how long the first call of BERT-base takes beyond eager's own time."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager")).train()
    parameters = list(model.parameters())
    inputs = (torch.randint(0, 30000, (1, 16)),)
    once(model, inputs, parameters)
    eager = timed(lambda: once(model, inputs, parameters))
    compiled: Any = torch.compile(model, backend="aot_eager")
    spent = {
        "ours": timed(lambda: once(ws.compile(model, fullgraph=True), inputs, parameters)) - eager,
        "aot_eager": timed(lambda: once(compiled, inputs, parameters)) - eager,
    }
    for name, seconds in spent.items():
        print(f"capture of BERT-base, {name:9}  {seconds:6.2f} s   {seconds / spent['aot_eager']:.2f} of aot_eager")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--bert", action="store_true", help="also the capture of BERT-base (needs transformers)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls(options.rounds, options.repeats)
    if options.bert:
        capture()


if __name__ == "__main__":
    main()
