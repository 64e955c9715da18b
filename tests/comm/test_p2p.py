"""Messages like earlier ones, which the engine sends without Python; long ones, wrong ones, and many at random."""

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch

from tests.comm.test_faults import end_world, until_it_fails, world_of
from tests.comm.test_plan_cache import never
from wholestep import comm
from wholestep.comm import flight_recorder
from wholestep.comm.api import issue
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))  # `make test-long`


def ring_of_messages(size):
    """A message from each rank to the next; who sent, and what."""
    n, rank = comm.get_world_size(), comm.get_rank()
    mine, came = torch.full((size,), float(rank)), torch.zeros(size)
    after, before = (rank + 1) % n, (rank - 1) % n
    if rank % 2 == 0:
        comm.send(mine, after)
        sender = comm.recv(came, before)
    else:
        sender = comm.recv(came, before)
        comm.send(mine, dst=after)
    assert sender == before
    return came.unique().tolist() == [float(before)]


def messages_in_turn():
    sizes = (1, 1000, 8192, 8193, 300_000)
    first = [ring_of_messages(size) for size in sizes]
    kept, issue.launch = issue.launch, never
    try:
        again = [ring_of_messages(size) for size in sizes]
        last = flight_recorder.records()[-1]
    finally:
        issue.launch = kept
    return first + again, last["op"], last["state"], last["where"].startswith(__file__)


def test_messages_like_earlier_ones_go_past_python():
    for good, op, state, here in run_ranks(messages_in_turn, 4, "shm"):
        assert all(good)
        assert op in ("send", "recv") and state == "completed" and here


def messages_of_any_layout():
    """Into every second column, and as complex numbers: what came, with what lies between."""
    rank, found = comm.get_rank(), []
    for dtype in (torch.float32, torch.complex64):
        mine, came = torch.arange(6).view(3, 2).t().to(dtype) + rank, torch.full((2, 6), -1.0, dtype=dtype)
        other = 1 - rank
        for work in comm.batch_isend_irecv([comm.P2POp(comm.isend, mine, other),
                                            comm.P2POp(comm.irecv, came[:, ::2], other)]):  # fmt: skip
            work.wait()
        found += [torch.equal(came[:, ::2], mine - rank + other), bool((came[:, 1::2] == -1).all())]
    return found


@pytest.mark.parametrize("engine", ["thread", "shm", "gloo"])
def test_messages_of_any_layout(engine):
    assert run_ranks(messages_of_any_layout, 2, engine) == [[True] * 4] * 2


def messages_that_fail():
    rank, late = comm.get_rank(), comm.new_group(timeout=timedelta(seconds=1))
    two, three = torch.ones(2), torch.ones(3)
    for _ in range(2):
        if rank == 0:
            comm.send(two, 1)
            comm.send(three, 1)
        else:
            comm.recv(two, 0)
            comm.recv(three, 0)
    if rank == 0:
        comm.send(three, 1)
        comm.send(two, 1, late)
        comm.barrier()
        return [], "", 0.0
    notes = []
    with pytest.raises(comm.DistMismatchError, match="recv from rank 0: 8 bytes are required, 12 were sent") as wrong:
        comm.recv(two, 0)
    notes += wrong.value.__notes__
    comm.recv(two, 0, late)
    with pytest.raises(comm.DistTimeoutError, match="recv from rank 0 did not end within 1 s") as nothing:
        comm.recv(two, 0, late)
    notes += nothing.value.__notes__
    comm.barrier()
    return notes, flight_recorder.records()[-2]["state"], two.sum().item()


def test_messages_like_earlier_ones_that_fail():
    notes, state, total = run_ranks(messages_that_fail, 2, "shm")[1]
    assert len(notes) == 2 and all(note.startswith(f"at {__file__}:") for note in notes)
    assert state == "failed" and total == 2.0


def random_messages(seed, crowded):
    """Sends and receives in one order that all ranks know; tags, and works waited for later."""
    if crowded:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    group, rng, rank, n = comm.new_group(), random.Random(seed), comm.get_rank(), comm.get_world_size()
    under_way = []
    for number in range(150):
        source, target = rng.sample(range(n), 2)
        size, tag, later = rng.choice([1, 14, 500, 8192, 9000, 400_000]), rng.choice([0, 0, 0, 7]), rng.random() < 0.3
        x = torch.full((size,), float(number))
        if rank == source:
            if later:
                under_way.append((comm.isend(x, target, group, tag), x))
            else:
                comm.send(x, target, group, tag)
        elif rank == target:
            found = torch.zeros(size)
            assert comm.recv(found, source, group, tag) == source
            assert torch.equal(found, x), f"message {number}"
    for work, _ in under_way:
        work.wait()
    comm.barrier(group)
    return True


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_messages(ranks, crowded):
    for seed in range(100 if LONG else 2):
        assert run_ranks(random_messages, ranks, "shm", (seed, crowded)) == [True] * ranks


def sends_all_the_time(pipe, rank, size, folder, seconds):
    """Messages there and back between ranks 0 and 1, until one fails."""
    x, peer = torch.zeros(50_000), 1 - rank
    first, second = (comm.send, comm.recv) if rank == 0 else (comm.recv, comm.send)

    def step():
        for part in (x[:1], x):
            first(part, peer)
            second(part, peer)

    until_it_fails(pipe, rank, size, folder, seconds, step)


@pytest.mark.parametrize("victim", [0, 1])
def test_who_waits_for_a_message_of_a_killed_rank_is_told(victim, tmp_path):
    pipes, ranks = world_of(2, tmp_path, run=sends_all_the_time)
    time.sleep(0.05)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    assert pipes[1 - victim].poll(20)
    kind, message, _ = pipes[1 - victim].recv()
    assert kind == "DistRankError"
    assert f"rank {victim} has exited or was killed" in message
    end_world(ranks)
