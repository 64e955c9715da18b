"""Steps that sleep, keep memory or end their process: what the harness is tested on. Imported in each rank."""

from __future__ import annotations

import os
import time
from functools import partial

import torch

MIB = 2**20


def nap(seconds: float, kept: torch.Tensor) -> torch.Tensor:
    time.sleep(seconds)
    return kept.mean()


def prepare(model: str, variant: str) -> partial:
    """Steps that sleep, keep memory, or end their process."""
    if variant == "dies":
        os._exit(3)
    if variant == "raises":
        raise ValueError("no such way")
    kept = torch.ones(64 * MIB // 4 if variant == "slow" else 1)
    return partial(nap, {"slow": 0.03, "quick": 0.01}[variant], kept)
