"""Collectives as operators that run to their end: for programs with nothing to do until one has ended.

Nothing then passes to the group's thread and back, which on a busy core takes longer than a small collective does; and
where all cores are busy nothing is won by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from wholestep.comm.api import collectives, reduce_collectives
from wholestep.comm.api.groups import get_group, get_world_size
from wholestep.comm.ops import row_collectives


def all_reduce_at_once(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """``all_reduce_``, and its end."""
    reduce_collectives.all_reduce(x, op, group)
    return x


def all_gather_at_once(x: torch.Tensor, group: str, *, out: torch.Tensor) -> torch.Tensor:
    """``all_gather.out``, and its end."""
    collectives.all_gather_into_tensor(out, x, group)
    return out


def reduce_scatter_at_once(x: torch.Tensor, op: str, group: str, *, out: torch.Tensor) -> torch.Tensor:
    """``reduce_scatter.out``, and its end."""
    reduce_collectives.reduce_scatter_tensor(out, x, op, group)
    return out


def cores_are_busy(group: str) -> bool:
    """True when ranks that share memory compute on all the cores they have, so that none is left for collectives."""
    if get_group(group).backend_name != "shm":
        return False
    ranks = get_world_size() if get_group().backend_name == "shm" else get_group(group).size()
    return ranks * torch.get_num_threads() >= len(os.sched_getaffinity(0))


_operators = torch.ops.wholestep

AT_ONCE: dict[Any, Callable[..., torch.Tensor]] = {
    _operators.all_reduce_.default: all_reduce_at_once,
    _operators.all_gather.out: all_gather_at_once,
    _operators.reduce_scatter.out: reduce_scatter_at_once,
    _operators.reduce_rows_.default: row_collectives.reduce_rows_at_once,
    _operators.share_rows_.default: row_collectives.share_rows_at_once,
}
