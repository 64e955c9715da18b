"""The picture of the demo: loss curves that lie on each other, and how far apart they are."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Colour-blind safe. Each later curve is narrower, so that all show as stripes where they lie on each other.
BASES = {0: ("#fdd0a2", 12), 1: ("#c6dbef", 5)}
OURS = (("#d94801", "-"), ("#08306b", "-"), ("#41ab5d", "--"), ("#6a3d9a", ":"))
FLOOR = 1e-9  # where "equal" is drawn on the logarithmic axis


def draw_losses(curves: dict[str, list[float]], pairs: list[tuple[str, str]], path: Path) -> None:
    """Draws the stock curves, and ours on top of them; below, how far apart they are.

    Args:
        curves: title -> loss per step, all of one length.
        pairs: titles of a stock curve and of one of ours that shall lie on it.
        path: where the PNG goes.
    """
    values = {title: np.asarray(curve) for title, curve in curves.items()}
    steps = np.arange(1, len(next(iter(values.values()))) + 1)
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 6.4), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for place, base in enumerate(dict.fromkeys(base for base, _ in pairs)):
        colour, wide = BASES[place]
        upper.plot(steps, values[base], color=colour, linewidth=wide, label=base)
    for (base, ours), (colour, style) in zip(pairs, OURS, strict=True):
        apart = np.abs(values[ours] - values[base])
        said = "bit for bit" if not apart.any() else f"to within {apart.max():.0e}"
        upper.plot(steps, values[ours], style, color=colour, linewidth=1.6, label=f"{ours}: equals {base}, {said}")
        lower.plot(steps, np.maximum(apart, FLOOR), style, color=colour, linewidth=1.4)
    upper.set(title="One training step, six ways to run it", ylabel="loss, nats per byte")
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
