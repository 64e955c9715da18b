"""Marks that wrappers of modules leave on parameters and gradients, for the trace of a step to read.

May import: nothing of the package.
"""

from __future__ import annotations

from typing import Any

import torch

BUCKET_BYTES = 2**20, 25 * 2**20


def set_bucket(parameter: torch.Tensor, limits: tuple[int, int] | None) -> None:
    """Marks a real parameter with the sizes of the buckets in which its gradient is reduced; None: it never is."""
    parameter.__dict__["wholestep_bucket"] = limits


def wrapped_as(parameter: torch.Tensor) -> dict[str, Any]:
    """The marks of a real parameter as fields of `Input`; default bucket sizes where it has none."""
    told = parameter.__dict__
    bucket = told.get("wholestep_bucket", BUCKET_BYTES) if parameter.requires_grad else None
    return {"bucket": bucket, "shard": told.get("wholestep_shard")}


def set_shard(parameter: torch.Tensor, *how: Any) -> None:
    """Marks a real parameter as sharded over the ranks of a group; see `Input.shard`."""
    parameter.__dict__["wholestep_shard"] = how


def want_mean(gradient: torch.Tensor, group: str) -> None:
    """Marks a gradient in a traced backward: whoever reads it afterwards reads its mean over a group."""
    gradient.__dict__["wholestep_mean"] = group


def wanted_mean(gradient: torch.Tensor | None) -> str | None:
    """The group named by `want_mean`, if any; takes the mark away."""
    return None if gradient is None else gradient.__dict__.pop("wholestep_mean", None)
