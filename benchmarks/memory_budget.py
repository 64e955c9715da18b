"""Time against memory under `ws.compile(memory_budget=…)`, and of `torch.utils.checkpoint` on some layers beside it.

    OMP_NUM_THREADS=1 python -m benchmarks.memory_budget --models gpt gpt-12 bert --picture docs/img/memory_budget.png

All forms of a model take turns in one process. Memory is that of the values that a step computes, at its fullest moment
as the planner has it (`explain`), inputs apart; time is that of a step against the one without a budget in the same
round, the median over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig

import wholestep as ws
from benchmarks.harness import markdown
from benchmarks.models import MODELS, MaskedLanguage, train_step
from examples.gpt import GPT, GPTConfig
from wholestep.errors import MemoryBudgetError

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3)
INPUTS = ("parameters", "states", "buffers", "batch", "other")


def gpt_12() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The demo's GPT with 12 layers."""
    config = GPTConfig(layers=12)
    return GPT(config), {name: torch.randint(config.vocabulary, (8, config.context)) for name in "xy"}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT with 6 layers of width 256 on long texts of few words, so that layers outweigh the head."""
    config = BertConfig(
        vocab_size=2000, num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024
    )
    return MaskedLanguage(config), {name: torch.randint(2000, (8, 128)) for name in "xy"}


BUILD: dict[str, Callable[[], Any]] = {"gpt": MODELS["gpt"], "gpt-12": gpt_12, "bert": bert}
LAYERS = {"gpt": 4, "gpt-12": 12, "bert": 6}


def checkpointed(model: nn.Module, layers: int) -> nn.Module:
    """A model of which the first layers run under `torch.utils.checkpoint`."""
    blocks = model.blocks if isinstance(model, GPT) else model.bert.bert.encoder.layer  # type: ignore[union-attr]
    for block in list(blocks)[:layers]:  # type: ignore[arg-type]
        run = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = run  # type: ignore[method-assign]
    return model


class Form:
    """One way to run a model's step."""

    def __init__(self, build: Callable[[], Any], layers: int = 0, budget: float | None = None) -> None:
        torch.manual_seed(0)
        model, batch = build()
        self.args = checkpointed(model, layers), torch.optim.AdamW(model.parameters()), batch
        self.step = ws.compile(train_step, memory_budget=budget)
        self.layers, self.budget, self.times = layers, budget, list[float]()
        self.loss = float(self.step(*self.args))
        held = self.step.explain(*self.args).memory
        self.nbytes = held.total - sum(held.by_class[kind] for kind in INPUTS[:-1])

    def turn(self) -> None:
        """One timed step."""
        start = time.perf_counter()
        self.step(*self.args)
        self.times.append(time.perf_counter() - start)


def measured(name: str, rounds: int) -> list[Form]:
    """All forms of a model, the one without a budget first."""
    build, forms = BUILD[name], list[Form]()
    layers = sorted({round(part * LAYERS[name]) for part in (0.25, 0.5, 0.75, 1)})
    forms.append(Form(build))
    for budget in track(BUDGETS, f"{name}: budgets"):
        try:
            forms.append(Form(build, budget=budget))
        except MemoryBudgetError as error:
            print(error)
            break
    forms += [Form(build, layers=count) for count in layers]
    for _ in track(range(rounds), f"{name}: rounds"):
        for form in forms:
            form.turn()
    return forms


def rows_of(name: str, forms: Sequence[Form]) -> list[list[str]]:
    """A row for each form."""
    whole = forms[0]
    return [[name, _way(form), f"{form.nbytes / 2**20:.1f}", f"{form.nbytes / whole.nbytes:.2f}",
             f"{median(mine / base for mine, base in zip(form.times, whole.times, strict=True)):.2f}"]
            for form in forms]  # fmt: skip


def _way(form: Form) -> str:
    if form.layers:
        return f"checkpoint on {form.layers} layers"
    return "whole" if form.budget is None else f"budget {form.budget:g}"


def draw(found: dict[str, list[list[str]]], path: Path) -> None:
    """A panel for each model: the budgets' curve, and that of the checkpoints."""
    import matplotlib  # noqa: PLC0415 - of the demo's extra

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.6), layout="constrained", squeeze=False)
    for axes, (name, rows) in zip(panels[0], found.items(), strict=True):
        for word, colour, label in (("budget", "#08306b", "memory_budget"), ("checkpoint", "#d94801", "checkpoint")):
            chosen = [rows[0], *(row for row in rows if row[1].startswith(word))]
            points = [(float(row[3]), float(row[4])) for row in chosen]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label, markersize=4)
        axes.set(title=name, xlabel="memory of what a step computes")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0][0].set_ylabel("time of a step")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Reads the command line, prints a row for each form, draws the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BUILD, default=["gpt"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: rows_of(name, measured(name, options.rounds)) for name in options.models}
    print(markdown(("model", "form", "MiB", "memory", "time"), [row for rows in found.values() for row in rows]))
    if options.picture is not None:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
