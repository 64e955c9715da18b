"""The picture of the demo: loss curves that lie on each other, and how far apart they are."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Colour-blind safe. Each later curve is narrower, so that all four show as stripes where they lie on each other.
PAIRS = (("#fdd0a2", "#d94801"), ("#c6dbef", "#08306b"))
WIDTHS = ((12, 8), (5, 1.5))
FLOOR = 1e-9  # where "equal" is drawn on the logarithmic axis


def draw_losses(curves: dict[str, list[float]], path: Path) -> None:
    """Draws pairs of curves, baseline first: (one process, compiled), (two processes, compiled).

    Args:
        curves: title -> loss per step; four of equal length, in that order.
        path: where the PNG goes.
    """
    titles, values = list(curves), [np.asarray(c) for c in curves.values()]
    steps = np.arange(1, len(values[0]) + 1)
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 6.4), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for pair, (pale, dark) in enumerate(PAIRS):
        base, ours = 2 * pair, 2 * pair + 1
        apart = np.abs(values[ours] - values[base])
        said = "equal bit for bit" if not apart.any() else f"within {apart.max():.0e}"
        wide, narrow = WIDTHS[pair]
        upper.plot(steps, values[base], color=pale, linewidth=wide, label=titles[base])
        upper.plot(steps, values[ours], color=dark, linewidth=narrow, label=f"{titles[ours]}: {said}")
        lower.plot(steps, np.maximum(apart, FLOOR), color=dark, linewidth=1.4)
    upper.set(title="One training step, four ways to run it", ylabel="loss, nats per byte")
    upper.legend(frameon=False, handlelength=3)
    lower.set(xlabel="step", ylabel="distance from\nthe stock curve", yscale="log", ylim=(FLOOR / 2, 1))
    lower.set_yticks([FLOOR, 1e-6, 1e-3, 1], ["0", "$10^{-6}$", "$10^{-3}$", "1"])
    lower.minorticks_off()
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    figure.savefig(path, dpi=130)
    plt.close(figure)
