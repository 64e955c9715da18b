"""A group over several hosts as its parts: shared memory inside each host, an engine between their leaders.

Here is how it runs a collective's steps and how it fails; `hierarchical.py` has the collectives.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from wholestep.comm import dist_errors
from wholestep.comm.dist_errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistRankError,
    DistStoreError,
    DistTimeoutError,
)
from wholestep.comm.engines.c10d import C10dGroup
from wholestep.comm.engines.hosts import Layout
from wholestep.comm.engines.shm import ShmGroup
from wholestep.comm.engines.work_queue import Lane
from wholestep.comm.process_group import DEFAULT_TIMEOUT, Options, ProcessGroup
from wholestep.comm.stores.store import PrefixStore, Store
from wholestep.comm.work import Work

HAND_TAG = 1 << 29  # messages between a root and its leader
LATER = timedelta(seconds=2)  # who waits for its leader waits longer than the leader, which knows the reason
PATIENCE = 0.7  # seconds for a rank that knows the reason to tell it
LONGER = 4.0  # the same, where that rank may be one that waits LATER


class LedGroup(ProcessGroup):
    """A group whose ranks are on several hosts.

    Args:
        store: shared by all ranks of the group, and by them alone.
        rank: within the group.
        layout: where the ranks are.
        timeout: for each collective.

    Raises:
        DistBackendError: an engine cannot be made.
        DistStoreError: not all ranks came within the time-out.
    """

    backend_name = "shm+gloo"

    def __init__(self, store: Store, rank: int, layout: Layout, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, len(layout.homes))
        self.timeout, self.layout, self._store = timeout, layout, store
        self._host, self._place = layout.host_of[rank], layout.place_of[rank]
        self._mates, self._hosts = layout.hosts[self._host], len(layout.hosts)
        self._lane, self._reason, self._crossing = Lane(), "", False
        self._inside = ShmGroup(PrefixStore(f"inside{self._host}", store), self._place, len(self._mates), timeout)
        self._pairs = C10dGroup("gloo", PrefixStore("pairs", store), rank, self._size, timeout)
        self._between: C10dGroup | None = None
        if self._place == 0:
            self._between = C10dGroup("gloo", PrefixStore("between", store), self._host, self._hosts, timeout, False)
        self.name_parts("", range(self._size))

    def name_parts(self, name: str, labels: Sequence[int]) -> None:
        super().name_parts(name, labels)
        self._inside.name_parts(f"{name} inside a host", [labels[rank] for rank in self._mates])
        self._pairs.name_parts(name, labels)
        if self._between is not None:
            self._between.name_parts(f"{name} between hosts", [labels[ranks[0]] for ranks in self.layout.hosts])

    def shutdown(self) -> None:
        self._lane.close()
        self._stop()

    def _stop(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for group in (self._between, self._pairs, self._inside):
                if group is not None:
                    all_of_them.callback(group.shutdown)

    def abort(self, reason: str) -> None:
        if not self._reason:
            rank = self.labels[self._rank]
            told = json.dumps([DistRankError.__name__, f"rank {rank} cannot go on: {reason}"])
            with contextlib.suppress(DistError):  # the store may have ended with its master
                told = self._store.compare_set("broken", "", told).decode()
            self._reason = told
            self._inside.abort(reason)
            self._lane.start("abort", self._stop, [], True)  # behind what the lane is in the middle of

    # Running, and failing ---------------------------------------------------------------------------------------

    def _start(
        self,
        what: str,
        like: torch.Tensor | None,
        opts: Options | None,
        result: list[torch.Tensor],
        steps: Callable[[Options], None],
    ) -> Work:
        """Runs the steps of a collective, given options whose reduction and root are those of the steps."""
        opts = opts or Options()
        self.sequence += 1
        words = f"#{self.sequence} {what} {opts.op.name} root {opts.root}"
        if like is not None:
            words += f" {str(like.dtype).removeprefix('torch.')} {list(like.shape)}"

        def guarded() -> None:
            if self._reason:
                raise self._error(self._reason)
            self._crossing = False
            try:
                if self._between is not None:
                    self._cross(lambda between: between.compare(words))
                steps(Options(timeout=opts.timeout))
            except DistError as failure:
                raise self._broken(words, failure) from failure

        return self._lane.start(f"{self!r}: {words}", guarded, result, opts.async_op)

    def _cross(self, step: Callable[[C10dGroup], object]) -> None:
        """A step among the leaders; nothing on other ranks."""
        if self._between is not None:
            self._crossing = True
            step(self._between)
            self._crossing = False

    def _post(self, outs: dict[int, torch.Tensor], ins: dict[int, torch.Tensor]) -> list[Work]:
        """On a leader, starts an exchange with others: ``ins[h]`` goes to host h, ``outs[h]`` comes from it.

        As messages, since those are what Gloo is best at: of 8 MB, 2 leaders, 17 ms, where its all-gather takes 34
        to 49 and its all-to-all 16; of 3 leaders 24, 54 and 42.
        """
        if self._between is None:
            return []
        self._crossing = True
        works = [self._between.send([one], host) for host, one in ins.items() if host != self._host and one.numel()]
        works += [self._between.recv([one], host) for host, one in outs.items() if host != self._host and one.numel()]
        self._crossing = False
        return works

    def _settle(self, works: list[Work], opts: Options) -> None:
        """Ends an exchange."""
        limit = (opts.timeout or self.timeout).total_seconds()
        self._crossing = bool(works)
        for work in works:
            work.wait(limit)
        self._crossing = False

    def _swap(self, outs: dict[int, torch.Tensor], ins: dict[int, torch.Tensor], opts: Options) -> None:
        self._settle(self._post(outs, ins), opts)

    def _broken(self, words: str, failure: DistError) -> DistError:
        """Ends the group on all ranks with one reason: that of a rank which saw the cause, if there is one."""
        self._reason = self._told(words, failure)
        with contextlib.suppress(DistError):  # the store may have ended with its master
            if not self._saw(failure):
                failure = self._listen(failure)
            self._reason = self._store.compare_set("broken", "", self._told(words, failure)).decode()
        self._stop()
        return self._error(self._reason)

    def _told(self, words: str, failure: DistError) -> str:
        return json.dumps([type(failure).__name__, f"rank {self.labels[self._rank]} in {words}: {failure}"])

    def _saw(self, failure: DistError) -> bool:
        """False where the cause lies elsewhere: with other hosts, or with ranks that have left before this one; or
        with a leader that does not come, which may itself wait for other hosts."""
        if isinstance(failure, DistMismatchError):
            return True
        waits_for_leader = isinstance(failure, DistTimeoutError) and self._inside.culprit == 0
        return not (self._crossing or waits_for_leader or isinstance(failure, DistBackendError))

    def _listen(self, failure: DistError) -> DistError:
        """Gives ranks that know more time to speak first. Returns what is known if they do not."""
        others = [ranks[0] for ranks in self.layout.hosts if ranks is not self._mates]
        if self._crossing:
            self._store.set(f"crossing{self._rank}", "1")  # so that nobody blames this leader
        timed_out = isinstance(failure, DistTimeoutError)
        if self._heard(LONGER if self._crossing and timed_out else PATIENCE):
            return failure
        asked = others if self._crossing else self._mates[:1]
        silent = [rank for rank in asked if not self._store.check([f"crossing{rank}"])]
        if len(silent) < len(asked):
            self._heard(LONGER)
        elif self._crossing and not timed_out:
            names = " or ".join(str(self.labels[rank]) for rank in silent)
            return DistRankError(f"rank {names}, which leads another host, has exited or was killed: {failure}")
        return failure

    def _heard(self, limit: float) -> bool:
        with contextlib.suppress(DistStoreError):
            self._store.wait(["broken"], limit)
            return True
        return False

    def _error(self, reason: str) -> DistError:
        kind, text = json.loads(reason)
        made: DistError = getattr(dist_errors, kind)(f"group {self.group_name!r}: {text}")
        return made

    def _later(self, opts: Options) -> Options:
        return Options(timeout=(opts.timeout or self.timeout) + LATER)

    def _hand(self, tensor: torch.Tensor, source: int, to: int) -> None:
        """Brings a tensor from one place of this host to another."""
        if source != to and self._place in (source, to):
            sending = self._place == source
            work = (self._inside.send if sending else self._inside.recv)([tensor], to if sending else source, HAND_TAG)
            work.wait()
