"""Collectives as pure operators, so that a traced program contains them.

``wholestep::all_reduce(x, op, group)`` starts the collective on a copy and gives that copy; ``wholestep::wait``
ends it and gives *the same tensor* (equal memory: a memory plan must treat its output as its input). Between
the two the copy may not be read. ``scatter`` takes a tensor of the result's shape and, on ``src`` alone, the parts;
``gather`` gives no rows but on ``dst``. ``send`` gives what it sends, ``recv`` takes a tensor of the shape that comes,
``barrier`` gives its input when all ranks have reached it. ``share_rows`` is an all-gather in place: each rank has
written its own rows (`piece`) of a tensor and receives the others'.

Lowered programs, which own their buffers, use the ``…_`` forms, which work in place, the ``.out`` forms, and where
they have nothing to do meanwhile `BLOCKING`: functions that end the collective before they return.

``group`` is a group's name (``""`` for the default group); ``op`` a reduction's lower-case name, or
``premul_sum:FACTOR``; ranks are ranks in the group. None of them is dead code, read or not: all ranks must issue
the same ones. Their gradients are in `gradients.py`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx.node import has_side_effect

from wholestep.comm.api import collectives, p2p
from wholestep.comm.api.groups import get_group, is_initialized
from wholestep.comm.ops import gradients
from wholestep.comm.work import All, Work

__all__ = ["BLOCKING", "SCHEMAS", "cores_are_busy", "pending"]

_library = torch.library.Library("wholestep", "FRAGMENT")
_pending: dict[int, Work] = {}


def pending() -> int:
    """Collectives started by an operator and not waited for."""
    return len(_pending)


def cores_are_busy(group: str) -> bool:
    """True when ranks that share memory compute on all the cores they have, so that none is left for collectives."""
    if get_group(group).backend_name != "shm":
        return False
    whole = get_group(group if not is_initialized() or get_group().backend_name != "shm" else None)
    return whole.size() * torch.get_num_threads() >= len(os.sched_getaffinity(0))


# Kernels, on memory that is there: in place or into `out` ---------------------------------------------------------


def _started(out: torch.Tensor, work: Work | None) -> torch.Tensor:
    """Files the work under the address of its result, where `wait` finds it."""
    if work is None:
        return out
    if out.numel() == 0:  # an empty tensor has no address of its own
        work.wait()
        return out
    left = _pending.pop(out.data_ptr(), None)
    if left is not None:  # nobody waited, and the memory has been given out again
        left.wait()
    _pending[out.data_ptr()] = work
    return out


def _wait(x: torch.Tensor) -> torch.Tensor:
    work = _pending.pop(x.data_ptr(), None)
    if work is not None:
        work.wait()
    return x


def _all_reduce(x: torch.Tensor, op: str, group: str, *, async_op: bool = True) -> torch.Tensor:
    return _started(x, collectives.all_reduce(x, op, group, async_op))


def _reduce(x: torch.Tensor, dst: int, op: str, group: str) -> torch.Tensor:
    return _started(x, collectives.reduce(x, None, op, group, True, dst))


def _broadcast(x: torch.Tensor, src: int, group: str) -> torch.Tensor:
    return _started(x, collectives.broadcast(x, None, group, True, src))


def _send(x: torch.Tensor, dst: int, tag: int, group: str) -> torch.Tensor:
    return _started(x, p2p.isend(x, None, group, tag, dst))


def _barrier(x: torch.Tensor, group: str) -> torch.Tensor:
    return _started(x, collectives.barrier(group, True))


def _all_gather(x: torch.Tensor, group: str, *, out: torch.Tensor, async_op: bool = True) -> torch.Tensor:
    return _started(out, collectives.all_gather_into_tensor(out, x, group, async_op))


def _reduce_scatter(x: torch.Tensor, op: str, group: str, *, out: torch.Tensor, async_op: bool = True) -> torch.Tensor:
    return _started(out, collectives.reduce_scatter_tensor(out, x, op, group, async_op))


def _all_to_all(x: torch.Tensor, to: list[int], of: list[int], group: str, *, out: torch.Tensor) -> torch.Tensor:
    return _started(out, collectives.all_to_all_single(out, x, to, of, group, True))


def _gather(x: torch.Tensor, dst: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    parts = list(out.view(-1, *x.shape)) if get_group(group).rank() == dst else None
    return _started(out, collectives.gather(x, parts, None, group, True, dst))


def _scatter(x: torch.Tensor, parts: list[torch.Tensor], src: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    return _started(out, collectives.scatter(out, parts or None, None, group, True, src))


def _recv(x: torch.Tensor, src: int, tag: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    return _started(out, p2p.irecv(out, None, group, tag, src))


def _share_rows(x: torch.Tensor, group: str, *, async_op: bool = True) -> torch.Tensor:
    pg = get_group(group)
    parts = [x[slice(*piece(x.shape[0], pg.size(), rank))] for rank in range(pg.size())]
    if x.shape[0] % pg.size() == 0:
        return _started(x, collectives.all_gather_into_tensor(x, parts[pg.rank()], group, async_op))
    works = [collectives.broadcast(part, None, group, async_op, src) for src, part in enumerate(parts)]
    left = [work for work in works if work is not None]
    return _started(x, All(left, [x]) if left else None)


# Shapes of results ------------------------------------------------------------------------------------------------


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _written(x: torch.Tensor, *_: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    return x if out is None else out


def _rows(x: torch.Tensor, what: str) -> int:
    if x.dim() == 0:
        raise ValueError(f"wholestep::{what}: a tensor of at least one dimension is required, found a scalar")
    return x.shape[0]


def _gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((_rows(x, "all_gather") * get_group(group).size(), *x.shape[1:]))


def _gathered_on(x: torch.Tensor, dst: int, group: str) -> torch.Tensor:
    pg = get_group(group)
    return x.new_empty((_rows(x, "gather") * pg.size() if pg.rank() == dst else 0, *x.shape[1:]))


def _part(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    rows, size = _rows(x, "reduce_scatter"), get_group(group).size()
    if rows % size:
        raise ValueError(f"wholestep::reduce_scatter: {rows} rows do not divide among {size} ranks")
    return x.new_empty((rows // size, *x.shape[1:]))


def _exchanged(x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str) -> torch.Tensor:
    return x.new_empty((sum(out_splits) if out_splits else _rows(x, "all_to_all"), *x.shape[1:]))


# The table --------------------------------------------------------------------------------------------------------


class Operator(NamedTuple):
    """One operator.

    Attributes:
        arguments: its parameters after ``x``.
        kernel: starts the collective in place, or into ``out`` where ``shape`` is given.
        shape: makes a tensor for the result.
        variant: the overload or operator that lowered programs use: ``_``, ``.out`` or none.
    """

    arguments: str
    kernel: Callable[..., torch.Tensor]
    shape: Callable[..., torch.Tensor] | None = None
    variant: str = ""

    def pure(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """The kernel of the operator itself, which leaves its input as it is."""
        if self.shape is None:
            return self.kernel(x.clone(memory_format=torch.contiguous_format), *args)
        return self.kernel(x, *args, out=self.shape(x, *args))


_TABLE = {
    "all_reduce": Operator("str op, str group", _all_reduce, variant="_"),
    "broadcast": Operator("int src, str group", _broadcast, variant="_"),
    "all_gather": Operator("str group", _all_gather, _gathered, ".out"),
    "reduce_scatter": Operator("str op, str group", _reduce_scatter, _part, ".out"),
    "all_to_all": Operator("int[] out_splits, int[] in_splits, str group", _all_to_all, _exchanged),
    "reduce": Operator("int dst, str op, str group", _reduce),
    "gather": Operator("int dst, str group", _gather, _gathered_on),
    "scatter": Operator("Tensor[] parts, int src, str group", _scatter, _like),
    "send": Operator("int dst, int tag, str group", _send),
    "recv": Operator("int src, int tag, str group", _recv, _like),
    "barrier": Operator("str group", _barrier),
    "share_rows": Operator("str group", _share_rows, variant="_"),
}
SCHEMAS: dict[str, str] = {}  # of the operators, those that work in place included
BLOCKING: dict[Any, Callable[..., torch.Tensor]] = {}  # variant -> the function that also ends the collective


def _define(name: str, schema: str, kernel: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]) -> Any:
    _library.define(name + schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    _library.impl(name, shape, "Meta")  # not `register_fake`, which looks through all modules for its caller: 0.1 s
    packet, _, overload = name.partition(".")
    if not overload:
        SCHEMAS[name] = schema
    made = getattr(getattr(torch.ops.wholestep, packet), overload or "default")
    has_side_effect(made)
    return made


for _name, _row in _TABLE.items():
    _define(_name, f"(Tensor x, {_row.arguments}) -> Tensor", _row.pure, _row.shape or _like)
    if _row.variant:
        _parameters = f"Tensor x, {_row.arguments}, *, Tensor(a!) out"
        if _row.variant == "_":
            _parameters = f"Tensor(a!) x, {_row.arguments}"
        _overload = _define(_name + _row.variant, f"({_parameters}) -> Tensor(a!)", _row.kernel, _written)
        if _name != "broadcast":
            BLOCKING[_overload] = _blocking = functools.partial(_row.kernel, async_op=False)
            _blocking.__name__ = f"{_name}_blocking"  # type: ignore[attr-defined]
_define("wait", "(Tensor x) -> Tensor", _wait, _written)
_define("wait_", "(Tensor(a!) x) -> Tensor(a!)", _wait, _written)
for _name, (_gradient, _keep) in gradients.RULES.items():
    torch.library.register_autograd(f"wholestep::{_name}", _gradient, setup_context=_keep, lib=_library)


def piece_size(length: int, ranks: int) -> int:
    """Rows of all pieces but the last ones."""
    return -(-length // ranks)


def piece(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where one rank's rows start and stop: those of `torch.chunk`, so that the last ranks have less, or nothing."""
    step = piece_size(length, ranks)
    return min(rank * step, length), min((rank + 1) * step, length)
