"""Steps that print, read and decide: eager, replayed without doing so, and compiled, in turns in one process.

    python -m benchmarks.co_run --models gpt mlp
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import MODELS, Batch, train_step

SINK = io.StringIO()
SCALER = torch.amp.GradScaler("cpu", growth_interval=50)


def prints(model: torch.nn.Module, opt: Optimizer, batch: Batch) -> Any:
    """Prints the loss and the time."""
    began = time.perf_counter()
    loss = train_step(model, opt, batch)
    print(f"{loss.item():.3f} {time.perf_counter() - began:.3f}", file=SINK)
    return loss


def skips(model: torch.nn.Module, opt: Optimizer, batch: Batch) -> Any:
    """Leaves out an update whose gradients are not finite."""
    loss = model(batch["x"], batch["y"])
    loss.backward()
    if torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)):
        opt.step()
    opt.zero_grad()
    return loss.detach()


def clips(model: torch.nn.Module, opt: Optimizer, batch: Batch) -> Any:
    """The same without the decision, for a replay."""
    loss = model(batch["x"], batch["y"])
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def scales(model: torch.nn.Module, opt: Optimizer, batch: Batch) -> Any:
    """Scales gradients by `GradScaler`, which decides on each update."""
    loss = model(batch["x"], batch["y"])
    SCALER.scale(loss).backward()
    SCALER.step(opt)
    SCALER.update()
    opt.zero_grad()
    return loss.detach()


# what a step does -> itself, and what a replay of it would be
STEPS = {"prints": (prints, train_step), "skips": (skips, clips), "scales": (scales, train_step)}


def measured(model: str, rounds: int) -> list[list[str]]:
    """Rows of one model: medians, and medians of the ratios of each round."""
    ways: dict[tuple[str, str], Callable[..., Any]] = {}
    for name, (step, replayed) in STEPS.items():
        ways[name, "eager"] = step
        ways[name, "replay"] = ws.compile(replayed, fullgraph=True)
        ways[name, "compiled"] = ws.compile(step)
    torch.manual_seed(0)
    module, batch = MODELS[model]()
    opts = {way: AdamW(module.parameters(), lr=1e-4) for way in ways}
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for turn in range(-12, rounds):
        for way, step in ways.items():
            began = time.perf_counter()
            step(module, opts[way], batch)
            if turn >= 0:
                times[way].append(time.perf_counter() - began)
    rows = []
    for name in STEPS:
        ours = times[name, "compiled"]
        others = [times[name, of] for of in ("replay", "eager")]
        ratios = [median(a / b for a, b in zip(ours, other, strict=True)) for other in others]
        way = name, "compiled"
        report = ways[way].explain(module, opts[way], batch)  # type: ignore[attr-defined]
        served = f"replay, {len(report.decisions)} decisions"
        if report.breaks:
            served = "eager" if report.eager else f"{len(report.segments)} segments"
        rows.append([model, name, f"{median(ours) * 1e3:.2f}", *(f"{ratio:.2f}" for ratio in ratios), served])
    return rows


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "mlp"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for model in options.models for row in measured(model, options.rounds)]
    print(markdown(("model", "step", "compiled ms", "of its replay", "of eager", "runs as"), rows))


if __name__ == "__main__":
    main()
