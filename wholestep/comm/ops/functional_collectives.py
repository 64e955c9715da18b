"""Collectives as pure operators, so that a traced program contains them.

``wholestep::all_reduce(x, op, group)`` starts the collective on a copy and gives that copy; ``wholestep::wait``
ends it and gives *the same tensor* (equal memory: a memory plan must treat its output as its input). Between
the two the copy may not be read. ``scatter`` takes a tensor of the result's shape and, on ``src`` alone, the parts;
``gather`` gives no rows but on ``dst``. ``send`` gives what it sends, ``recv`` takes a tensor of the shape that comes,
``barrier`` gives its input when all ranks have come. The ``…_`` forms work in place for lowered programs, which own
their buffers.

``group`` is a group's name (``""`` for the default group); ``op`` a reduction's lower-case name, or
``premul_sum:FACTOR``; ranks are ranks in the group. None of them is dead code, read or not: every rank must issue
alike. Their gradients are in `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

from wholestep.comm.api import collectives, p2p, reduce_collectives
from wholestep.comm.api.groups import get_group
from wholestep.comm.ops import gradients
from wholestep.comm.work import Work

__all__ = ["SCHEMAS", "pending"]

SCHEMAS = {
    "all_reduce": "(Tensor x, str op, str group) -> Tensor",
    "all_reduce_": "(Tensor(a!) x, str op, str group) -> Tensor(a!)",
    "broadcast": "(Tensor x, int src, str group) -> Tensor",
    "broadcast_": "(Tensor(a!) x, int src, str group) -> Tensor(a!)",
    "all_gather": "(Tensor x, str group) -> Tensor",
    "reduce_scatter": "(Tensor x, str op, str group) -> Tensor",
    "all_to_all": "(Tensor x, int[] out_splits, int[] in_splits, str group) -> Tensor",
    "reduce": "(Tensor x, int dst, str op, str group) -> Tensor",
    "gather": "(Tensor x, int dst, str group) -> Tensor",
    "scatter": "(Tensor x, Tensor[] parts, int src, str group) -> Tensor",
    "send": "(Tensor x, int dst, int tag, str group) -> Tensor",
    "recv": "(Tensor x, int src, int tag, str group) -> Tensor",
    "barrier": "(Tensor x, str group) -> Tensor",
    "wait": "(Tensor x) -> Tensor",
    "wait_": "(Tensor(a!) x) -> Tensor(a!)",
}

# Into memory that is there, as lowered programs have it.
_INTO = {
    "all_gather.out": "(Tensor x, str group, *, Tensor(a!) out) -> Tensor(a!)",
    "reduce_scatter.out": "(Tensor x, str op, str group, *, Tensor(a!) out) -> Tensor(a!)",
}

_library = torch.library.Library("wholestep", "FRAGMENT")
_pending: dict[int, Work] = {}


def pending() -> int:
    """Collectives started by an operator and not waited for."""
    return len(_pending)


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


# Real kernels -----------------------------------------------------------------------------------------------------


def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _all_reduce_in_place(x.clone(memory_format=torch.contiguous_format), op, group)


def _all_reduce_in_place(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _started(x, reduce_collectives.all_reduce(x, op, group, async_op=True))


def _broadcast(x: torch.Tensor, src: int, group: str) -> torch.Tensor:
    return _broadcast_in_place(x.clone(memory_format=torch.contiguous_format), src, group)


def _broadcast_in_place(x: torch.Tensor, src: int, group: str) -> torch.Tensor:
    return _started(x, collectives.broadcast(x, group=group, group_src=src, async_op=True))


def _all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    return _all_gather_out(x, group, out=_fake_all_gather(x, group))


def _all_gather_out(x: torch.Tensor, group: str, *, out: torch.Tensor) -> torch.Tensor:
    return _started(out, collectives.all_gather_into_tensor(out, x, group, async_op=True))


def _reduce_scatter(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _reduce_scatter_out(x, op, group, out=_fake_reduce_scatter(x, op, group))


def _reduce_scatter_out(x: torch.Tensor, op: str, group: str, *, out: torch.Tensor) -> torch.Tensor:
    return _started(out, reduce_collectives.reduce_scatter_tensor(out, x, op, group, async_op=True))


def _all_to_all(x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str) -> torch.Tensor:
    out = _fake_all_to_all(x, out_splits, in_splits, group)
    return _started(out, collectives.all_to_all_single(out, x, out_splits, in_splits, group, async_op=True))


def _reduce(x: torch.Tensor, dst: int, op: str, group: str) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    return _started(out, reduce_collectives.reduce(out, None, op, group, async_op=True, group_dst=dst))


def _gather(x: torch.Tensor, dst: int, group: str) -> torch.Tensor:
    out = _fake_gather(x, dst, group)
    parts = list(out.view(-1, *x.shape)) if get_group(group).rank() == dst else None
    work = collectives.gather(x, parts, None, group, async_op=True, group_dst=dst)
    return _started(out, work)


def _scatter(x: torch.Tensor, parts: list[torch.Tensor], src: int, group: str) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _started(out, collectives.scatter(out, parts or None, None, group, async_op=True, group_src=src))


def _send(x: torch.Tensor, dst: int, tag: int, group: str) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    return _started(out, p2p.isend(out, None, group, tag, group_dst=dst))


def _recv(x: torch.Tensor, src: int, tag: int, group: str) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _started(out, p2p.irecv(out, None, group, tag, group_src=src))


def _barrier(x: torch.Tensor, group: str) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    return _started(out, collectives.barrier(group, async_op=True))


def _wait(x: torch.Tensor) -> torch.Tensor:
    work = _pending.pop(x.data_ptr(), None)
    if work is not None:
        work.wait()
    return x


# Shapes -----------------------------------------------------------------------------------------------------------


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _itself(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


def _given(*_: Any, out: torch.Tensor) -> torch.Tensor:
    return out


def _rows(x: torch.Tensor, what: str) -> int:
    if x.dim() == 0:
        raise ValueError(f"wholestep::{what}: a tensor of at least one dimension is required, found a scalar")
    return x.shape[0]


def _fake_all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((_rows(x, "all_gather") * get_group(group).size(), *x.shape[1:]))


def _fake_gather(x: torch.Tensor, dst: int, group: str) -> torch.Tensor:
    pg = get_group(group)
    return x.new_empty((_rows(x, "gather") * pg.size() if pg.rank() == dst else 0, *x.shape[1:]))


def _fake_reduce_scatter(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    rows, size = _rows(x, "reduce_scatter"), get_group(group).size()
    if rows % size:
        raise ValueError(f"wholestep::reduce_scatter: {rows} rows do not divide among {size} ranks")
    return x.new_empty((rows // size, *x.shape[1:]))


def _fake_all_to_all(x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str) -> torch.Tensor:
    rows = sum(out_splits) if out_splits else _rows(x, "all_to_all")
    return x.new_empty((rows, *x.shape[1:]))


# name -> real kernel, shape rule
_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (_all_reduce, _like),
    "all_reduce_": (_all_reduce_in_place, _itself),
    "broadcast": (_broadcast, _like),
    "broadcast_": (_broadcast_in_place, _itself),
    "all_gather": (_all_gather, _fake_all_gather),
    "reduce_scatter": (_reduce_scatter, _fake_reduce_scatter),
    "all_to_all": (_all_to_all, _fake_all_to_all),
    "reduce": (_reduce, _like),
    "gather": (_gather, _fake_gather),
    "scatter": (_scatter, _like),
    "send": (_send, _like),
    "recv": (_recv, _like),
    "barrier": (_barrier, _like),
    "wait": (_wait, _itself),
    "wait_": (_wait, _itself),
    "all_gather.out": (_all_gather_out, _given),
    "reduce_scatter.out": (_reduce_scatter_out, _given),
}

for _name, _schema in (SCHEMAS | _INTO).items():
    _kernel, _fake = _RULES[_name]
    _library.define(_name + _schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"wholestep::{_name}", _fake, lib=_library)
    _packet, _, _overload = _name.partition(".")
    has_side_effect(getattr(getattr(torch.ops.wholestep, _packet), _overload or "default"))
for _name, (_gradient, _keep) in gradients.RULES.items():
    torch.library.register_autograd(f"wholestep::{_name}", _gradient, setup_context=_keep, lib=_library)
