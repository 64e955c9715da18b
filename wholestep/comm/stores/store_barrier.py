"""Barriers over a store, for ranks that have no process group yet."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from datetime import timedelta

from wholestep import errors
from wholestep.comm.stores.store import Store
from wholestep.errors import DistStoreError

ALL_CAME = "1"
LINGER = timedelta(seconds=5)


def _key(name: str) -> str:
    return f"store_based_barrier_key:{name}"


def _shown(name: str, count: int) -> list[str]:
    """The keys of what the ranks show, in rank order."""
    return [f"{_key(name)}:{rank}" for rank in range(count)]


def store_based_barrier(
    rank: int,
    store: Store,
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta,
    logging_interval: timedelta = timedelta(seconds=10),
) -> None:
    """Returns when ``rendezvous_count`` ranks have called it.

    Raises:
        DistStoreError: they did not within the time-out, or one of them has given up; the missing ranks are named.
        ValueError: two processes have the same rank.
    """
    exchange(rank, store, group_name, rendezvous_count, timeout)


def exchange(rank: int, store: Store, name: str, count: int, timeout: timedelta, value: str = "") -> list[str]:
    """A `store_based_barrier` that returns what every rank showed, in rank order."""
    key = _key(name)
    shown = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(8)}\n{value}"
    there = store.compare_set(f"{key}:{rank}", "", shown).decode()
    if there != shown:
        raise ValueError(
            f"rank {rank} of {count} is there already: {there.splitlines()[0]}. Two processes have the same rank, "
            "two jobs meet at the same address, or its file is left over from an earlier job: give each job its own"
        )
    if store.add(key, 1) == count:
        store.compare_set(f"{key}:last", "", ALL_CAME)
    try:
        outcome = store.get(f"{key}:last", timeout)
    except DistStoreError as late:
        missing = [other for other, shown in enumerate(_shown(name, count)) if not store.check([shown])]
        why = (
            f"Timed out initializing process group in store based barrier on rank {rank}, for key: {key} "
            f"(world_size={count}, num_workers_joined={count - len(missing)}, timeout={timeout}): "
            f"of {count} ranks these have not come: {missing}"
        )
        give_up(store, name, DistStoreError(why))
        leave_together(store, name, count - len(missing))
        raise DistStoreError(why) from late
    kind, _, why = outcome.decode().partition("\n")
    if kind == DistStoreError.__name__:
        with contextlib.suppress(errors.DistError):
            came = sum(store.check([shown]) for shown in _shown(name, count))
            leave_together(store, name, came)
    if kind != ALL_CAME:
        raise getattr(errors, kind)(f"rank {rank}: {why}")
    found = store.multi_get(_shown(name, count))
    with contextlib.suppress(errors.DistError):  # the store may end with its master, once all have come
        if store.add(f"{name} done", 1) == count:  # nobody needs them any more
            for used in (key, f"{key}:last", *_shown(name, count), f"{name} done"):
                store.delete_key(used)
    return [one.decode().split("\n", 2)[2] for one in found]


def give_up(store: Store, name: str, why: errors.DistError) -> None:
    """Ends a barrier on all ranks, because this one cannot go on: the others raise the same error."""
    store.compare_set(f"{_key(name)}:last", "", f"{type(why).__name__}\n{why}")


def leave_together(store: Store, name: str, count: int) -> None:
    """Waits, for seconds, until ``count`` ranks have given up: one that ends may be the one that serves the store."""
    with contextlib.suppress(errors.DistError):
        if store.add(f"{name} left", 1) >= count:
            store.set(f"{name} all left", "1")
        store.get(f"{name} all left", LINGER)
