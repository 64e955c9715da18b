"""Collectives on Python objects, pickled. Ranks trust each other: unpickling runs what the sender chose."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from wholestep.comm.api import checks, collectives, p2p
from wholestep.comm.api.groups import get_group
from wholestep.comm.api.issue import Group, group_root
from wholestep.comm.api.tracing import not_recorded


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


@not_recorded
def gathered_objects(obj: Any, group: Group = None) -> list[Any]:
    """Every rank's object, by rank."""
    return [_unpack(data) for data in collectives.all_gather_rows(_pack(obj), group)]


def first_difference(everybody: Sequence[Sequence[Any]]) -> tuple[int, int, Any, Any] | None:
    """Where ranks have another list than rank 0: the first such rank, the place, and what both have there or None."""
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for place, (here, there) in enumerate(zip_longest(first, other)):
            if here != there:
                return rank, place, here, there
    return None


@not_recorded
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Every rank's object into ``object_list``, by rank."""
    pg = get_group(group)
    if checks.outside(pg, "all_gather_object"):
        return
    checks.length("all_gather_object", "object_list", object_list, pg.size())
    object_list[:] = gathered_objects(obj, group)


@not_recorded
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Every rank's object into ``object_gather_list`` of rank ``dst`` (default: the first)."""
    pg = get_group(group)
    if checks.outside(pg, "gather_object"):
        return
    root = group_root(group, dst, group_dst, "dst", 0)
    if (pg.rank() == root) != (object_gather_list is not None):
        raise ValueError("gather_object: `object_gather_list` is required on the destination rank, and on no other")
    found = gathered_objects(obj, group)
    if object_gather_list is not None:
        object_gather_list[:] = found


@not_recorded
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """The objects of rank ``src`` (default: the first) into every rank's list, which has the same length."""
    pg = get_group(group)
    if checks.outside(pg, "broadcast_object_list"):
        return
    root = group_root(group, src, group_src, "src", 0)
    data = _pack(list(object_list)) if pg.rank() == root else None
    size = torch.tensor(0 if data is None else data.numel())
    collectives.broadcast(size, group=group, group_src=root)
    data = torch.zeros(int(size), dtype=torch.uint8) if data is None else data
    collectives.broadcast(data, group=group, group_src=root)
    if pg.rank() != root:
        found = _unpack(data)
        checks.elements(
            "broadcast_object_list", "object_list", len(object_list), len(found), "as many as the source has"
        )
        object_list[:] = found


@not_recorded
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Entry 0 of rank r's output list becomes entry r of the list of rank ``src`` (default: the first)."""
    pg = get_group(group)
    if checks.outside(pg, "scatter_object_list"):
        return
    root = group_root(group, src, group_src, "src", 0)
    if not scatter_object_output_list:
        raise ValueError("scatter_object_list: `scatter_object_output_list` is empty: one entry is required")
    parts: list[Any] = [None] * pg.size()
    if pg.rank() == root:
        given = scatter_object_input_list or []
        checks.length("scatter_object_list", "scatter_object_input_list", given, pg.size())
        parts = [pickle.dumps(value) for value in given]  # each rank unpacks its own alone
    broadcast_object_list(parts, group=group, group_src=root)
    scatter_object_output_list[0] = pickle.loads(parts[pg.rank()])


@not_recorded
def send_object_list(
    object_list: list[Any], dst: int | None = None, group: Group = None, group_dst: int | None = None
) -> None:
    """Sends objects to rank ``dst``."""
    data = _pack(list(object_list))
    p2p.send(torch.tensor([data.numel()]), dst, group, 0, group_dst)
    p2p.send(data, dst, group, 0, group_dst)


@not_recorded
def recv_object_list(
    object_list: list[Any], src: int | None = None, group: Group = None, group_src: int | None = None
) -> int:
    """Receives objects from rank ``src`` (default: any) into the list; returns the sender's global rank."""
    size = torch.zeros(1, dtype=torch.int64)
    sender = p2p.recv(size, src, group, 0, group_src)
    data = torch.zeros(int(size), dtype=torch.uint8)
    p2p.recv(data, sender, group)
    object_list[:] = _unpack(data)
    return sender
