"""Two more operators, beside those of `functional_collectives.py`: the rows of a tensor, of which each rank owns some.

``wholestep::reduce_rows(x, op, group)`` reduces each rank's own rows of x (see `rows.piece`) and leaves the others as
they are; ``wholestep::share_rows(x, group)`` fetches the others' rows from their owners. They start as the other
collectives do, end with ``wholestep::wait``, and have ``…_`` forms that work in place. Neither has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep.comm.api import collectives, reduce_collectives
from wholestep.comm.api.groups import get_group
from wholestep.comm.ops.functional_collectives import _started
from wholestep.comm.ops.rows import piece
from wholestep.comm.work import All, Work

_library = torch.library.Library("wholestep", "FRAGMENT")


def _own_rows(x: torch.Tensor, group: str) -> list[torch.Tensor]:
    """The rows of each rank, as views."""
    size = get_group(group).size()
    return [x[slice(*piece(x.shape[0], size, rank))] for rank in range(size)]


def _reduce_rows(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _reduce_rows_in_place(x.clone(memory_format=torch.contiguous_format), op, group)


def _reduce_rows_in_place(x: torch.Tensor, op: str, group: str, async_op: bool = True) -> torch.Tensor:
    parts, pg = _own_rows(x, group), get_group(group)
    if x.shape[0] % pg.size() == 0:
        return _started(x, reduce_collectives.reduce_scatter_tensor(parts[pg.rank()], x, op, group, async_op))
    works = [reduce_collectives.reduce(part, None, op, group, async_op, rank) for rank, part in enumerate(parts)]
    return _started(x, _together(works, x))


def _share_rows(x: torch.Tensor, group: str) -> torch.Tensor:
    return _share_rows_in_place(x.clone(memory_format=torch.contiguous_format), group)


def _share_rows_in_place(x: torch.Tensor, group: str, async_op: bool = True) -> torch.Tensor:
    parts, pg = _own_rows(x, group), get_group(group)
    if x.shape[0] % pg.size() == 0:
        return _started(x, collectives.all_gather_into_tensor(x, parts[pg.rank()], group, async_op))
    works = [collectives.broadcast(part, None, group, async_op, rank) for rank, part in enumerate(parts)]
    return _started(x, _together(works, x))


def _together(works: list[Work | None], x: torch.Tensor) -> Work | None:
    """Works under way as one; None when all have ended."""
    left = [work for work in works if work is not None]
    return All(left, [x]) if left else None


def reduce_rows_at_once(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """``reduce_rows_``, and its end."""
    return _reduce_rows_in_place(x, op, group, async_op=False)


def share_rows_at_once(x: torch.Tensor, group: str) -> torch.Tensor:
    """``share_rows_``, and its end."""
    return _share_rows_in_place(x, group, async_op=False)


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _itself(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


# name -> schema, real kernel, shape rule
_RULES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "reduce_rows": ("(Tensor x, str op, str group) -> Tensor", _reduce_rows, _like),
    "reduce_rows_": ("(Tensor(a!) x, str op, str group) -> Tensor(a!)", _reduce_rows_in_place, _itself),
    "share_rows": ("(Tensor x, str group) -> Tensor", _share_rows, _like),
    "share_rows_": ("(Tensor(a!) x, str group) -> Tensor(a!)", _share_rows_in_place, _itself),
}

for _name, (_schema, _kernel, _fake) in _RULES.items():
    _library.define(_name + _schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"wholestep::{_name}", _fake, lib=_library)
