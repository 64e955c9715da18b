"""The groups that a group over several hosts consists of: shared memory inside each host, an engine between leaders.

Here is what moves bytes between hosts, and how all ranks come to fail with one reason; `hierarchical.py` has the
collectives.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate

import torch

from wholestep import errors
from wholestep.comm.engines.c10d import C10dGroup
from wholestep.comm.engines.shm import ShmGroup
from wholestep.comm.process_group import Options, ProcessGroup
from wholestep.comm.stores.store import PrefixStore, Store
from wholestep.comm.work import Work, seconds
from wholestep.errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistRankError,
    DistStoreError,
    DistTimeoutError,
)

LATER = timedelta(seconds=2)
PATIENCE = 0.7  # seconds for a rank that knows the reason to tell it
LONGER = 4.0  # the same, where that rank may be one that waits LATER


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

    def __init__(self, homes: list[str]) -> None:
        names, self.homes = list(dict.fromkeys(homes)), homes
        self.host_of = [names.index(home) for home in homes]
        self.hosts = [[rank for rank, host in enumerate(self.host_of) if host == one] for one in range(len(names))]
        self.place_of = [self.hosts[host].index(rank) for rank, host in enumerate(self.host_of)]
        ends = list(accumulate(len(ranks) for ranks in self.hosts))
        self.rows = [slice(end - len(ranks), end) for end, ranks in zip(ends, self.hosts, strict=True)]
        self.row_of = [self.rows[host].start + place for host, place in zip(self.host_of, self.place_of, strict=True)]


class HostGroups:
    """The groups of one rank.

    Args:
        group: the group that they serve.
        store: shared by all ranks of the group, and by them alone.
        topology: where the ranks are.

    Attributes:
        host, place: number of this rank's host, and of the rank on it; that of a leader is 0.
        mates: ranks on this host.
        inside: the ranks of this host.
        pairs: all ranks, for what two of them exchange.
        between: the leaders; None on other ranks.

    Raises:
        DistBackendError: an engine cannot be made.
        DistStoreError: not all ranks came within the time-out.
    """

    def __init__(self, group: ProcessGroup, store: Store, topology: Topology) -> None:
        self._group, self._store, self.topology, rank = group, store, topology, group.rank()
        self.host, self.place = topology.host_of[rank], topology.place_of[rank]
        self.mates, self.hosts = topology.hosts[self.host], range(len(topology.hosts))
        self._reason, self._crossing = "", False
        timeout = group.timeout
        self.inside = ShmGroup(PrefixStore(f"inside{self.host}", store), self.place, len(self.mates), timeout)
        self.pairs = C10dGroup("gloo", PrefixStore("pairs", store), rank, group.size(), timeout)
        self.between: C10dGroup | None = None
        if self.place == 0:
            leaders = PrefixStore("between", store)
            self.between = C10dGroup("gloo", leaders, self.host, len(self.hosts), timeout, False)

    def name_parts(self, name: str, labels: Sequence[int]) -> None:
        self.inside.name_parts(f"{name} inside a host", [labels[rank] for rank in self.mates])
        self.pairs.name_parts(name, labels)
        if self.between is not None:
            self.between.name_parts(f"{name} between hosts", [labels[ranks[0]] for ranks in self.topology.hosts])

    def stop(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for group in (self.between, self.pairs, self.inside):
                if group is not None:
                    all_of_them.callback(group.shutdown)

    def abort(self, reason: str) -> bool:
        """Tells all ranks why this one cannot go on; False when they knew."""
        if self._reason:
            return False
        text = json.dumps([DistRankError.__name__, f"rank {self._label()} cannot go on: {reason}"])
        with contextlib.suppress(DistError):  # the store may have ended with its master
            text = self._store.compare_set("broken", "", text).decode()
        self._reason = text
        self.inside.abort(reason)
        return True

    def _label(self) -> int:
        return self._group.labels[self._group.rank()]

    # Steps ------------------------------------------------------------------------------------------------------

    def run(self, words: str, steps: Callable[[], None]) -> None:
        """The steps of a collective, if the leaders agree on it.

        Raises:
            DistError: the reason for which the group has ended, which is the same on all ranks.
        """
        if self._reason:
            raise self._error(self._reason)
        self._crossing = False
        try:
            self.cross(lambda between: between.compare(words))
            steps()
        except DistError as failure:
            raise self._broken(words, failure) from failure

    def cross(self, step: Callable[[C10dGroup], object]) -> None:
        """A step among the leaders; nothing on other ranks."""
        if self.between is not None:
            self._crossing = True
            step(self.between)
            self._crossing = False

    def post(self, outs: dict[int, torch.Tensor], ins: dict[int, torch.Tensor]) -> list[Work]:
        """On a leader, starts an exchange with others: ``ins[h]`` goes to host h, ``outs[h]`` comes from it.

        As messages, since those are what Gloo is best at: of 8 MB, 2 leaders, 17 ms, where its all-gather takes 34
        to 49 and its all-to-all 16; of 3 leaders 24, 54 and 42.
        """
        if self.between is None:
            return []
        self._crossing = True
        works = [self.between.send([one], host) for host, one in ins.items() if host != self.host and one.numel()]
        works += [self.between.recv([one], host) for host, one in outs.items() if host != self.host and one.numel()]
        self._crossing = False
        return works

    def settle(self, works: list[Work], opts: Options) -> None:
        """Ends an exchange."""
        limit = seconds(opts.timeout or self._group.timeout)
        self._crossing = bool(works)
        for work in works:
            work.wait(limit)
        self._crossing = False

    def swap(self, outs: dict[int, torch.Tensor], ins: dict[int, torch.Tensor], opts: Options) -> None:
        self.settle(self.post(outs, ins), opts)

    def _broken(self, words: str, failure: DistError) -> DistError:
        """Ends the group on all ranks with one reason: that of a rank which saw the cause, if there is one."""
        self._reason = self._reason_of(words, failure)
        with contextlib.suppress(DistError):  # the store may have ended with its master
            if not self._knows_cause(failure):
                failure = self._wait_for_cause(failure)
            self._reason = self._store.compare_set("broken", "", self._reason_of(words, failure)).decode()
        self.stop()
        return self._error(self._reason)

    def _reason_of(self, words: str, failure: DistError) -> str:
        return json.dumps([type(failure).__name__, f"rank {self._label()} in {words}: {failure}"])

    def _knows_cause(self, failure: DistError) -> bool:
        """False where the cause lies elsewhere: with other hosts, or with ranks that have left before this one; or
        with a leader that does not come, which may itself wait for other hosts."""
        if isinstance(failure, DistMismatchError):
            return True
        waits_for_leader = isinstance(failure, DistTimeoutError) and self.inside.culprit == 0
        return not (self._crossing or waits_for_leader or isinstance(failure, DistBackendError))

    def _wait_for_cause(self, failure: DistError) -> DistError:
        """Gives ranks that know more time to speak first. Returns what is known if they do not."""
        others = [ranks[0] for ranks in self.topology.hosts if ranks is not self.mates]
        if self._crossing:
            self._store.set(f"crossing{self._group.rank()}", "1")  # so that nobody blames this leader
        timed_out = isinstance(failure, DistTimeoutError)
        if self._cause_is_known(LONGER if self._crossing and timed_out else PATIENCE):
            return failure
        asked = others if self._crossing else self.mates[:1]
        silent = [rank for rank in asked if not self._store.check([f"crossing{rank}"])]
        if len(silent) < len(asked):
            self._cause_is_known(LONGER)
        elif self._crossing and not timed_out:
            names = " or ".join(str(self._group.labels[rank]) for rank in silent)
            return DistRankError(f"rank {names}, which leads another host, has exited or was killed: {failure}")
        return failure

    def _cause_is_known(self, limit: float) -> bool:
        with contextlib.suppress(DistStoreError):
            self._store.wait(["broken"], limit)
            return True
        return False

    def _error(self, reason: str) -> DistError:
        kind, text = json.loads(reason)
        made: DistError = getattr(errors, kind)(f"group {self._group.group_name!r}: {text}")
        return made

    def later(self, opts: Options) -> Options:
        """Options for those who wait for their leader: they wait longer than the leader, which knows the reason."""
        return Options(timeout=(opts.timeout or self._group.timeout) + LATER)
