"""The groups that this rank knows. One `World` a process; one a thread for ranks that are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from wholestep.comm.process_group import DEFAULT_TIMEOUT, ProcessGroup
from wholestep.comm.shared_tensors import native

DEFAULT_GROUP = "world"


@dataclass
class World:
    """Attributes:
    groups: name -> group, the default one under ``"world"``.
    store: the store that the default group met over.
    guests: name -> group that torch.distributed made and will end.
    joined: name of a group of torch.distributed's own engines -> that of ours with its ranks.
    made: how many groups were made, by name prefix: gives equal names on all ranks.
    config, timeout: what `new_group` takes when it is not told.
    owns_store: the store was made by `init_process_group`, and ends with the default group.
    """

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    store: Any = None
    guests: dict[str, ProcessGroup] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    config: Any = None
    timeout: timedelta = DEFAULT_TIMEOUT
    owns_store: bool = False

    def add(self, name: str, group: ProcessGroup, ranks: list[int]) -> ProcessGroup:
        group.name_parts(name, ranks)
        self.groups[name] = group
        return group

    def members(self) -> dict[str, list[int]]:
        """Name of each group -> global ranks, in the order of their ranks in the group."""
        return {name: list(group.labels) for name, group in (self.groups | self.guests).items()}

    def unique(self, prefix: str) -> str:
        """``prefix`` with a number that counts up, alike on ranks that make the same groups in the same order."""
        self.made[prefix] = self.made.get(prefix, -1) + 1
        return f"{prefix}.{self.made[prefix]}"


class NonMember(ProcessGroup):
    """What `new_group` gives a rank that is not in the group: it translates ranks, and takes part in nothing."""

    ends_with_fork = False

    def __init__(self) -> None:
        super().__init__(-1, -1)


_process_world = World()
_local = threading.local()


def world() -> World:
    """The world of the calling thread."""
    return getattr(_local, "world", _process_world)


def set_thread_world(new: World | None) -> None:
    """Gives the calling thread a world of its own (None: the process's again)."""
    if new is None:
        del _local.world
    else:
        _local.world = new
    native.quick_pause(-1 if new is None else 1)  # while groups differ by thread, no call is like an earlier one


def in_this_world(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, for another thread to call: it finds the groups of the thread that calls this."""
    here: World | None = getattr(_local, "world", None)
    if here is None:
        return function

    def called() -> Any:
        set_thread_world(here)
        try:
            return function()
        finally:
            set_thread_world(None)

    return called


def get_group(group: ProcessGroup | str | None = None) -> ProcessGroup:
    """The group itself, ours behind one of torch.distributed's, that of a name, or the default for None and ``""``.

    Raises:
        ValueError: there is no such group (any more).
    """
    known = world().groups | world().guests
    group = getattr(group, "shm_group", group)  # of torch.distributed's
    if group is None or group == "":
        if DEFAULT_GROUP not in known:
            raise ValueError("Default process group has not been initialized: call init_process_group first")
        return known[DEFAULT_GROUP]
    if isinstance(group, ProcessGroup):
        if known.get(group.group_name) is not group:
            raise ValueError(f"group {group!r} is not registered: destroyed, or made by another program")
        return group
    if group not in known:
        raise ValueError(f"group {group!r} is not registered: known are {', '.join(known) or 'none'}")
    return known[group]


def is_initialized() -> bool:
    """True between `init_process_group` and `destroy_process_group`."""
    return DEFAULT_GROUP in world().groups


def rank_not_in_group(group: ProcessGroup | None) -> bool:
    """True when this rank is not in the group."""
    return isinstance(group, NonMember)


def get_rank(group: ProcessGroup | str | None = None) -> int:
    """This rank's number in the group; -1 when it is not in it."""
    return get_group(group).rank()


def get_world_size(group: ProcessGroup | str | None = None) -> int:
    """Ranks in the group; -1 when this rank is not in it."""
    return get_group(group).size()


def get_backend(group: ProcessGroup | str | None = None) -> str:
    """Name of the group's backend."""
    return get_group(group).name()


def get_process_group_ranks(group: ProcessGroup | str | None = None) -> list[int]:
    """Global ranks of the group's members, in group order."""
    return list(get_group(group).labels)


def get_group_rank(group: ProcessGroup | str | None, global_rank: int) -> int:
    """Rank in the group of a global rank.

    Raises:
        ValueError: the rank is not part of the group, or the group is not registered.
    """
    ranks = get_process_group_ranks(group)
    if global_rank not in ranks:
        raise ValueError(f"Global rank {global_rank} is not part of group {get_group(group).group_name!r}: {ranks}")
    return ranks.index(global_rank)


def get_global_rank(group: ProcessGroup | str | None, group_rank: int) -> int:
    """Global rank of a rank in the group.

    Raises:
        ValueError: the rank is not part of the group, or the group is not registered.
    """
    ranks = get_process_group_ranks(group)
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"Group rank {group_rank} is not part of group {get_group(group).group_name!r}: {ranks}")
    return ranks[group_rank]


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's number on its host, from LOCAL_RANK.

    Raises:
        RuntimeError: LOCAL_RANK is not set and there is no fallback.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError("LOCAL_RANK is not in the environment: start with `wholestep run`, or pass fallback_rank")
