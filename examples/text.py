"""The text to learn: the source of Python's own standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def standard_library(limit: int = 8_000_000) -> Tensor:
    """The first `limit` bytes of the library's modules in order of their paths: uint8 [bytes]."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT.intersection(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= limit:
                break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(text: Tensor, step: int, rows: int, context: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """One rank's share of the global batch of a step: inputs and next bytes, int64 [rows / ranks, context].

    The global batch depends on the step alone, so a run on two ranks sees what a run on one sees, in that order.
    """
    chooser = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context - 1, (rows,), generator=chooser).chunk(ranks)[rank]
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
