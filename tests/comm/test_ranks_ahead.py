"""Ranks that go on from collectives whose bytes they do not need, where there are more ranks than cores."""

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch

from tests.comm.test_faults import end_world, until_it_fails, world_of
from wholestep import comm
from wholestep.testing import run_ranks

MANY = 200  # more than a rank goes on from
LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))  # `make test-long`


def crowded(limit=30.0):
    """A group of all ranks, which may run on one core only."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return comm.new_group(timeout=timedelta(seconds=limit))


def root_goes_on(op):
    """Rank 0 gives, tells the others over the store that it has gone on, and only then do they take."""
    group, store, rank = crowded(), comm.default_store(), comm.get_rank()
    x = torch.full((2,), 7.0 + rank)
    parts = [torch.full((2,), float(10 + to)) for to in range(3)]
    if rank != 0:
        store.wait(["gone on"])
    if op == "broadcast":
        comm.broadcast(x, 0, group)
    else:
        comm.scatter(x, parts if rank == 0 else None, 0, group)
    if rank == 0:
        store.set("gone on", "")
    return x.tolist()


@pytest.mark.parametrize(("op", "expected"), [("broadcast", [7.0, 7.0, 7.0]), ("scatter", [10.0, 11.0, 12.0])])
def test_the_root_of_a_small_broadcast_or_scatter_waits_for_nobody(op, expected):
    assert run_ranks(root_goes_on, 3, "shm", (op,)) == [[value] * 2 for value in expected]


def others_go_on(op):
    """All but rank 0 give, and say so; it takes when all have gone on."""
    group, store, rank = crowded(), comm.default_store(), comm.get_rank()
    x = torch.full((2,), 1.0 + rank)
    parts = [torch.zeros(2) for _ in range(3)]
    if rank == 0:
        store.wait(["1", "2"])
    if op == "reduce":
        comm.reduce(x, 0, group=group)
    else:
        comm.gather(x, parts if rank == 0 else None, 0, group)
    store.set(str(rank), "")
    return x.tolist() if op == "reduce" else [part[0].item() for part in parts]


@pytest.mark.parametrize(("op", "expected"), [("reduce", [6.0, 6.0]), ("gather", [1.0, 2.0, 3.0])])
def test_those_who_only_give_to_a_root_wait_for_nobody(op, expected):
    assert run_ranks(others_go_on, 3, "shm", (op,))[0] == expected


def gives_and_leaves(explicitly):
    group, store, rank = crowded(), comm.default_store(), comm.get_rank()
    x = torch.full((3,), float(rank))
    if rank == 0:
        comm.broadcast(x, 0, group)
        if explicitly:
            comm.destroy_process_group(group)
    else:
        time.sleep(0.3)
        comm.broadcast(x, 0, group)
    store.add("through", 1)
    return x.tolist()


@pytest.mark.parametrize("explicitly", [True, False])
def test_what_was_given_is_taken_after_the_root_has_left(explicitly):
    assert run_ranks(gives_and_leaves, 3, "shm", (explicitly,)) == [[0.0] * 3] * 3


# Disagreement -----------------------------------------------------------------------------------------------------


def roots_differ(end):
    """Ranks 0 and 1 each believe that they are the root, so neither waits."""
    group, rank = crowded(), comm.get_rank()
    with pytest.raises(comm.DistMismatchError) as caught:
        comm.broadcast(torch.ones(4), min(rank, 1), group)
        if end == "destroy":
            comm.destroy_process_group(group)
        else:
            comm.all_reduce(torch.ones(1), group=group)
    if end == "go on":  # nobody is further than the others
        x = torch.ones(1)
        comm.all_reduce(x, group=group)
        assert x.item() == 2
    return str(caught.value)


@pytest.mark.parametrize("end", ["go on", "destroy"])
def test_roots_that_differ_are_found_in_the_next_collective_or_at_the_end(end):
    for rank, message in enumerate(run_ranks(roots_differ, 2, "shm", (end,))):
        assert f"rank {rank} calls #1 broadcast root {rank}" in message
        assert f"rank {1 - rank} calls #1 broadcast root {1 - rank}" in message
        gone_on = f"rank {rank} had gone on from #1, which {__file__}:" in message
        assert gone_on == (end == "go on")


def roots_differ_at_detail():
    comm.set_debug_level(comm.DebugLevel.DETAIL)
    group = crowded()
    with pytest.raises(comm.DistMismatchError) as caught:
        comm.broadcast(torch.ones(4), min(comm.get_rank(), 1), group)
    return str(caught.value)


def test_nobody_goes_on_at_detail():
    for rank, message in enumerate(run_ranks(roots_differ_at_detail, 3, "shm")):
        assert f"rank {rank} calls #1 broadcast root {min(rank, 1)}" in message
        assert "gone on" not in message


def others_do_something_else():
    group, store, rank = crowded(), comm.default_store(), comm.get_rank()
    x = torch.ones(1)
    with pytest.raises(comm.DistMismatchError) as caught:
        if rank == 0:
            comm.broadcast(x, 0, group)
            store.wait(["1", "2"])  # the others know before this rank asks
            comm.barrier(group)
        else:
            comm.all_reduce(x, group=group)
    store.set(str(rank), "")
    return str(caught.value)


def test_who_waits_learns_at_once_and_who_went_on_at_its_next_collective():
    found = run_ranks(others_do_something_else, 3, "shm")
    assert "rank 0 calls #1 broadcast root 0" in found[0]
    assert "calls #1 all_reduce" in found[0]
    assert "rank 0 had gone on from #1" in found[0]
    for rank in (1, 2):
        assert f"rank {rank} calls #1 all_reduce" in found[rank]
        assert "gone on" not in found[rank]


KINDS = ["broadcast", "broadcast", "reduce", "gather", "scatter", "all_reduce", "all_gather", "later"]


def random_call(rng, group, rank):
    """One of the collectives, the same on all ranks for the same numbers; what it made and should have."""
    n, kind, size = comm.get_world_size(group), rng.choice(KINDS), rng.choice([1, 8, 9, 500, 3000, 20_000])
    root, base = rng.randrange(n), torch.arange(size, dtype=torch.float64)
    x = base + rank
    if kind == "broadcast":
        comm.broadcast(x, root, group)
        return x, base + root
    if kind == "reduce":
        comm.reduce(x, root, group=group)
        return (x, n * base + n * (n - 1) / 2) if rank == root else (x, x)
    if kind == "gather":
        parts = [torch.zeros_like(x) for _ in range(n)]
        comm.gather(x, parts if rank == root else None, root, group)
        return (torch.stack(parts), torch.stack([base + r for r in range(n)])) if rank == root else (x, x)
    if kind == "scatter":
        parts = [base + 100 * to for to in range(n)]
        comm.scatter(x, parts if rank == root else None, root, group)
        return x, base + 100 * rank
    if kind == "all_gather":
        wide = torch.zeros(n * size, dtype=torch.float64)
        comm.all_gather_into_tensor(wide, x, group)
        return wide, torch.cat([base + r for r in range(n)])
    if kind == "later":
        work = comm.broadcast(x, root, group, async_op=True)
        try:
            if rng.random() < 0.5:
                comm.all_reduce(torch.ones(1), group=group)
        finally:
            work.wait()
        return x, base + root
    comm.all_reduce(x, group=group)
    return x, n * base + n * (n - 1) / 2


def random_program(seed, calls, wrong_at):
    """Calls at random, with pauses; from ``wrong_at`` on, one rank is a call behind the others."""
    group, rank = crowded(), comm.get_rank()
    rng, pauses = random.Random(seed), random.Random(seed * 10 + rank)
    at = 0
    try:
        for at in range(calls):
            if at == wrong_at and rank == seed % comm.get_world_size():
                comm.barrier(group)
            if pauses.random() < 0.1:
                time.sleep(pauses.random() * 1e-3)
            found, expected = random_call(rng, group, rank)
            assert torch.equal(found, expected), f"call {at}"
        comm.barrier(group)
    except comm.DistMismatchError as error:
        comm.destroy_process_group(group)
        return at, str(error)
    return at, ""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_programs(ranks):
    for seed in range(100 if LONG else 3):
        found = run_ranks(random_program, ranks, "shm", (seed, MANY, None))
        assert found == [(MANY - 1, "")] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_disagreement_in_a_random_program_is_found_by_every_rank(ranks):
    for seed in range(100 if LONG else 4):
        wrong_at = 40 + seed
        for at, message in run_ranks(random_program, ranks, "shm", (seed, MANY, wrong_at)):
            assert wrong_at <= at <= wrong_at + 33
            assert "the ranks disagree" in message
            assert "barrier" in message


# Death ------------------------------------------------------------------------------------------------------------


def gives_all_the_time(pipe, rank, size, folder, seconds):
    """Small collectives with roots, until one fails."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    x, more = torch.zeros(4), torch.zeros(1000)

    def step():
        comm.broadcast(x, 0)
        comm.reduce(x, 1)
        comm.broadcast(more, 2)

    until_it_fails(pipe, rank, size, folder, seconds, step)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_those_who_only_give(victim, tmp_path):
    pipes, ranks = world_of(3, tmp_path, run=gives_all_the_time)
    time.sleep(0.05)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        assert pipes[rank].poll(20)
        kind, message, _ = pipes[rank].recv()
        assert kind == "DistRankError"
        assert f"rank {victim} has exited or was killed" in message
    end_world(ranks)


def waits_at_the_end():
    """Rank 1 never comes to what rank 0 has given; rank 0 learns of it when it ends the group."""
    group, store = crowded(1.0), comm.default_store()
    if comm.get_rank() == 1:
        store.wait(["told"])
        return ""
    comm.broadcast(torch.ones(1), 0, group)
    with pytest.raises(comm.DistTimeoutError) as caught:
        comm.destroy_process_group(group)
    store.set("told", "")
    return str(caught.value)


def test_a_rank_that_never_comes_is_named_at_the_time_out():
    message = run_ranks(waits_at_the_end, 2, "shm")[0]
    assert "rank 0 waited 1 s in #1 broadcast root 0" in message
    assert "for rank 1, which last stood at no collective yet" in message
