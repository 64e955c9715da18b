"""The whole state of an optimizer of which each rank keeps some rows."""

from __future__ import annotations

from typing import Any

import torch

from wholestep import comm
from wholestep.parts import part_of


def full_state_dict(optimizer: torch.optim.Optimizer, group: comm.ProcessGroup | None = None) -> dict[str, Any]:
    """A copy of `optimizer.state_dict()`, with whole tensors where the optimizer has rows of them.

    A collective: every rank of the group calls it, and gets the same. `load_state_dict` takes it on any number of
    ranks, and without this library.

    Args:
        group: the ranks that share the state out among them, `mesh.get_group(axis)` (default: all).
    """
    found = optimizer.state_dict()
    found["state"] = {
        key: {name: _whole(value, group) for name, value in held.items()} for key, held in found["state"].items()
    }
    return found


def _whole(value: Any, group: comm.ProcessGroup | None) -> Any:
    part = part_of(value) if isinstance(value, torch.Tensor) else None
    if part is None:
        return value.clone() if isinstance(value, torch.Tensor) else value
    whole = torch.empty(part.shape, dtype=value.dtype, device=value.device)
    whole[part.start : part.stop] = value
    name = comm.get_group(group).group_name
    return torch.ops.wholestep.wait(torch.ops.wholestep.share_rows_(whole, name))
