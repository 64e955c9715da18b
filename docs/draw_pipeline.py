"""Draws docs/img/pipeline.png: the way of a training step, from Python to results. Run by `make image`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PICTURE = Path(__file__).parent / "img" / "pipeline.png"

# room, what it does, what it hands to the next
STAGES = [
    ("capture", "notes all that\nthe step can see", "sources"),
    ("trace", "runs it once on\nfake tensors", "one graph"),
    ("spmd", "puts in what\nthe plan asks for", "per rank"),
    ("passes", "buckets, fused\noptimizer", "reordered"),
    ("lower", "Python text over\nreused memory", "callable"),
    ("runtime", "checks, binds,\nruns, writes back", ""),
]
CODE = [
    "def train_step(model, opt, batch):",
    '    loss = model(batch["x"], batch["y"])',
    "    loss.backward()",
    "    opt.step(); opt.zero_grad()",
    "    return loss",
]
# one step on two ranks: phase, from, to, colour
PHASES = [
    ("forward", 0.0, 3.0, "#c6dbef"),
    ("backward", 3.0, 7.4, "#fdd0a2"),
    ("optimizer", 8.0, 10.0, "#dadaeb"),
]
REDUCTIONS = [4.5, 5.8, 7.1]  # where a bucket of gradients is complete
INK, MUTED, EDGE, FILL, ACCENT, GREEN = "#1f2933", "#52606d", "#9aa5b1", "#f5f7fa", "#08306b", "#4d9221"


def box(axes: Axes, x: float, y: float, width: float, height: float, fill: str = FILL, edge: str = EDGE) -> None:
    """A rounded box with its lower left corner at (x, y)."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=1))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = MUTED) -> None:
    """A straight arrow."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.2))


def draw_rooms(axes: Axes, top: float) -> None:
    """The stages in a row, with what flows between them."""
    width, gap, height = 1.75, 0.8, 1.2
    for place, (room, does, gives) in enumerate(STAGES):
        x = place * (width + gap)
        box(axes, x, top - height, width, height)
        axes.text(x + width / 2, top - 0.3, room, ha="center", va="center", color=ACCENT, weight="bold", size=12)
        axes.text(x + width / 2, top - 0.8, does, ha="center", va="center", color=INK, size=8.4)
        if gives:
            arrow(axes, (x + width + 0.04, top - 0.6), (x + width + gap - 0.04, top - 0.6))
            axes.text(x + width + gap / 2, top - 0.42, gives, ha="center", va="center", color=MUTED, size=6.9)


def draw_code(axes: Axes, x: float, top: float) -> None:
    """The step as its user wrote it."""
    box(axes, x, top - 1.75, 5.2, 1.75, fill="white")
    for row, line in enumerate(CODE):
        axes.text(x + 0.2, top - 0.3 - 0.29 * row, line, family="monospace", size=9.4, color=INK, va="center")


def draw_ranks(axes: Axes, x: float, top: float) -> None:
    """The program that comes out, on two ranks: reductions run beside the backward pass."""
    scale, height = 0.78, 0.42
    for rank in range(2):
        y = top - 0.5 - 1.25 * rank
        axes.text(x - 0.15, y + height / 2, f"rank {rank}", ha="right", va="center", color=MUTED, size=9)
        for phase, start, end, colour in PHASES:
            box(axes, x + scale * start, y, scale * (end - start) - 0.05, height, fill=colour, edge="white")
            middle = x + scale * (start + end) / 2
            axes.text(middle, y + height / 2, phase, ha="center", va="center", size=9, color=INK)
    for at in REDUCTIONS:
        centre = x + scale * at
        axes.add_patch(
            FancyArrowPatch(
                (centre, top - 0.5),
                (centre, top - 1.33),
                arrowstyle="<|-|>",
                mutation_scale=10,
                color=GREEN,
                linewidth=1.6,
            )
        )
    axes.text(x + scale * 3.9, top - 0.915, "gradients,\nby the bucket", ha="right", va="center", size=8, color=GREEN)


def main() -> None:
    """Draws the picture."""
    figure, axes = plt.subplots(figsize=(12.4, 3.4))
    axes.set(xlim=(-0.1, 14.6), ylim=(0.75, 4.75), aspect="equal")
    axes.axis("off")
    draw_code(axes, 0.0, 4.6)
    arrow(axes, (0.875, 2.83), (0.875, 2.2))
    draw_rooms(axes, 2.15)
    arrow(axes, (13.6, 2.18), (13.6, 2.78))
    draw_ranks(axes, 6.6, 4.55)
    figure.savefig(PICTURE, dpi=140, bbox_inches="tight", pad_inches=0.05, facecolor="white")


if __name__ == "__main__":
    main()
