"""Which ranks of a group share a host, and so can share memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import accumulate

HOST_VARIABLE = "WHOLESTEP_HOST"


def host_identity() -> str:
    """Equal for processes that can share memory: one kernel, one namespace of processes, one network.

    WHOLESTEP_HOST divides a host into several; it never joins two.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return "/".join([boot.read().strip(), *spaces, os.environ.get(HOST_VARIABLE, "")])


@dataclass
class Topology:
    """The hosts of a group, in the order of their first ranks.

    Attributes:
        homes: identity of each rank's host.
        hosts: ranks of each host, ascending; the first of each is its leader.
        host_of: number of each rank's host.
        place_of: each rank's number on its host.
        rows: of each host, in a table with one row a rank that lists the ranks host by host.
        row_of: each rank's row in that table.
    """

    homes: list[str]
    hosts: list[list[int]] = field(init=False)
    host_of: list[int] = field(init=False)
    place_of: list[int] = field(init=False)
    rows: list[slice] = field(init=False)
    row_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        by_home: dict[str, list[int]] = {}
        for rank, home in enumerate(self.homes):
            by_home.setdefault(home, []).append(rank)
        self.hosts = list(by_home.values())
        number = {home: index for index, home in enumerate(by_home)}
        self.host_of = [number[home] for home in self.homes]
        self.place_of = [by_home[home].index(rank) for rank, home in enumerate(self.homes)]
        ends = list(accumulate(len(ranks) for ranks in self.hosts))
        self.rows = [slice(end - len(ranks), end) for end, ranks in zip(ends, self.hosts, strict=True)]
        self.row_of = [self.rows[host].start + place for host, place in zip(self.host_of, self.place_of, strict=True)]
