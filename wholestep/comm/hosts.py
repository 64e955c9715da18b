"""Which ranks of a group share a host, and so can share memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

HOST_VARIABLE = "WHOLESTEP_HOST"


def host_identity() -> str:
    """Equal for processes that can share memory: one kernel, one namespace of processes, one network.

    WHOLESTEP_HOST divides a host into several; it never joins two.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return "/".join([boot.read().strip(), *spaces, os.environ.get(HOST_VARIABLE, "")])


@dataclass
class Layout:
    """The hosts of a group, in the order of their first ranks.

    Attributes:
        homes: identity of each rank's host.
        hosts: ranks of each host, ascending; the first of each is its leader.
        host_of: number of each rank's host.
        place_of: each rank's number on its host.
    """

    homes: list[str]
    hosts: list[list[int]] = field(init=False)
    host_of: list[int] = field(init=False)
    place_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        by_home: dict[str, list[int]] = {}
        for rank, home in enumerate(self.homes):
            by_home.setdefault(home, []).append(rank)
        self.hosts = list(by_home.values())
        number = {home: index for index, home in enumerate(by_home)}
        self.host_of = [number[home] for home in self.homes]
        self.place_of = [by_home[home].index(rank) for rank, home in enumerate(self.homes)]

    @property
    def widest(self) -> int:
        """Ranks of the host that has most."""
        return max(len(ranks) for ranks in self.hosts)
