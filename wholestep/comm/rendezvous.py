"""How ranks meet: `init_process_group` and `destroy_process_group`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from wholestep.comm import c10d
from wholestep.comm.process_group import DEFAULT_TIMEOUT, ProcessGroup
from wholestep.comm.world import DEFAULT_GROUP, world


def _from_environment(name: str) -> str:
    if name not in os.environ:
        raise ValueError(
            f"init_process_group: {name} is not in the environment: start with `wholestep run` or torchrun, "
            "or pass rank, world_size and init_method"
        )
    return os.environ[name]


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
) -> None:
    """Makes the default group of all ranks.

    Args:
        backend: "gloo" (the default), "nccl", "mpi" or "ucc".
        init_method: ``env://`` (torchrun's MASTER_ADDR and MASTER_PORT), ``tcp://host:port``, ``file:///path``.
        timeout: for each collective.
        world_size, rank: taken from WORLD_SIZE and RANK when negative.
        store: a store that all ranks share, in place of ``init_method``.

    Raises:
        ValueError: a second call, or rank and size that are missing or do not fit.
        DistNetworkError: the store cannot be reached.
    """
    if DEFAULT_GROUP in world().groups:
        raise ValueError("trying to initialize the default process group twice: call destroy_process_group first")
    rank = rank if rank >= 0 else int(_from_environment("RANK"))
    size = world_size if world_size > 0 else int(_from_environment("WORLD_SIZE"))
    if not 0 <= rank < size:
        raise ValueError(f"init_process_group: rank {rank} is outside a world of {size}")
    if store is None:
        if init_method in (None, "env://"):
            init_method = f"tcp://{_from_environment('MASTER_ADDR')}:{_from_environment('MASTER_PORT')}"
        store = c10d.connect(str(init_method), rank, size, timeout)
    group = c10d.C10dGroup(backend or "gloo", store, rank, size, timeout)
    world().store = store
    world().add(DEFAULT_GROUP, group, list(range(size)))


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Ends one group, or all of them with the default group. Pending work is lost."""
    known = world()
    names = list(known.groups) if group is None or group.group_name == DEFAULT_GROUP else [group.group_name]
    for name in reversed(names):
        known.groups.pop(name).shutdown()
        known.members.pop(name)
    if DEFAULT_GROUP in names:
        known.store = None
        known.made.clear()
