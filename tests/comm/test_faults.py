"""What ranks learn when another dies, stops, or calls something else; and that nothing is left behind."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import wholestep as ws
from wholestep import comm
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))  # `make test-long`: 200 kills


def mismatch_in(call_of_zero, call_of_one):
    try:
        (call_of_zero if comm.get_rank() == 0 else call_of_one)()
    except comm.DistError as error:
        message = str(error)
    else:
        message = "nothing was noticed"
    after = torch.ones(1)
    comm.all_reduce(after)
    return message, after.item()


def sum_of(count, dtype=torch.float32):
    comm.all_reduce(torch.ones(count, dtype=dtype))


def sum_of_4():
    sum_of(4)


def sum_of_5():
    sum_of(5)


def sum_of_many():
    sum_of(1_000_000)


def sum_of_4_longs():
    sum_of(4, torch.int64)


def largest_of_4():
    comm.all_reduce(torch.ones(4), "max")


def sum_of_2_by_2():
    comm.all_reduce(torch.ones(2, 2))


def sum_of_a_hole():
    comm.all_reduce(torch.ones(3, 4, 1, 1, 1, 1, 1, 1, 100))


def broadcast_from_0():
    comm.broadcast(torch.ones(4), 0)


def broadcast_from_1():
    comm.broadcast(torch.ones(4), 1)


def exchange_1_and_3():
    comm.all_to_all_single(torch.ones(4), torch.ones(4), None, [1, 3])


def exchange_evenly():
    comm.all_to_all_single(torch.ones(4), torch.ones(4))


def scatter_2_and_3():
    comm.reduce_scatter(torch.ones(2), list(torch.ones(5).split([2, 3])))


def scatter_3_and_2():
    comm.reduce_scatter(torch.ones(2), list(torch.ones(5).split([3, 2])))


MISMATCHES = [
    (sum_of_4, sum_of_5, "float32 [4]", "float32 [5]"),
    (sum_of_4, sum_of_many, "float32 [4]", "float32 [1000000]"),
    (sum_of_4, sum_of_4_longs, "float32", "int64"),
    (sum_of_4, largest_of_4, "all_reduce SUM", "all_reduce MAX"),
    (sum_of_4, sum_of_2_by_2, "float32 [4]", "float32 [2, 2]"),
    (sum_of_4_longs, sum_of_a_hole, "int64 [4]", "float32 4800 bytes of shape"),
    (sum_of_4, broadcast_from_0, "all_reduce", "broadcast"),
    (broadcast_from_0, broadcast_from_1, "root 0", "root 1"),
    (exchange_1_and_3, exchange_evenly, "in #17 all_to_all rank 0 sends 4 bytes", "to rank 0, which expects 8"),
    (scatter_2_and_3, scatter_3_and_2, "float32 [2]", "float32 [3]"),
]


def all_mismatches():
    return [mismatch_in(one, other) for one, other, _, _ in MISMATCHES]


def test_a_mismatch_ends_at_once_on_both_sides_with_both_printed():
    for rank, found in enumerate(run_ranks(all_mismatches, 2, "shm")):
        for (message, after), (_, _, mine, theirs) in zip(found, MISMATCHES, strict=True):
            assert f"the ranks disagree: {mine if mine.startswith('in #') else f'rank {rank} calls'}" in message
            assert mine in message
            assert theirs in message
            assert after == 2.0


def mismatch_at_detail():
    comm.set_debug_level(comm.DebugLevel.DETAIL)
    with pytest.raises(comm.DistMismatchError, match="the ranks disagree"):
        (sum_of_4 if comm.get_rank() == 0 else sum_of_5)()
    sum_of_4()


def test_gloo_compares_at_detail():
    run_ranks(mismatch_at_detail, 2, "gloo")


def mismatch_between_threads():
    with pytest.raises(comm.DistMismatchError, match=r"float32 \[4\].*float32 \[5\]|float32 \[5\].*float32 \[4\]"):
        (sum_of_4 if comm.get_rank() == 0 else sum_of_5)()


def test_threads_compare_always():
    run_ranks(mismatch_between_threads, 2, "thread")


def message_of_wrong_length():
    if comm.get_rank() == 0:
        comm.send(torch.ones(3), 1)
    else:
        with pytest.raises(comm.DistMismatchError, match="8 bytes are required, 12 were sent"):
            comm.recv(torch.ones(2), 0)
    after = torch.full((3,), float(comm.get_rank()))  # as if nothing had been
    comm.send(after, 1) if comm.get_rank() == 0 else comm.recv(after, 0)
    return after.sum().item() == 0


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_message_of_the_wrong_length(transport):
    assert run_ranks(message_of_wrong_length, 2, transport) == [True, True]


# Death ------------------------------------------------------------------------------------------------------------


def busy_rank(pipe, rank, size, folder, seconds):
    """Runs collectives until one fails; reports the failure and when it came."""
    torch.set_num_threads(1)
    os.environ["WHOLESTEP_DUMP"] = folder
    comm.init_process_group("shm", f"file://{folder}/store", timedelta(seconds=seconds), size, rank)
    pipe.send("ready")
    sizes = [1, 100, 50_000, 400_000]
    shared, step = comm.empty(100_000, shared=True).zero_(), 0
    try:
        while True:
            step += 1
            comm.all_reduce(torch.zeros(sizes[step % 4]))
            comm.all_reduce(shared)
            work = comm.all_reduce(torch.zeros(300_000), async_op=True)
            comm.all_gather_into_tensor(torch.empty(size * 10), torch.zeros(10))
            work.wait()
    except comm.DistError as error:
        pipe.send((type(error).__name__, str(error), time.time()))
    comm.destroy_process_group()
    pipe.send("gone")


def until_it_fails(pipe, rank, size, folder, seconds, step):
    """Runs a step again and again in a group of its own; reports the failure and when it came."""
    os.environ["WHOLESTEP_DUMP"] = folder
    comm.init_process_group("shm", f"file://{folder}/store", timedelta(seconds=seconds), size, rank)
    pipe.send("ready")
    try:
        while True:
            step()
    except comm.DistError as error:
        pipe.send((type(error).__name__, str(error), time.time()))
    comm.destroy_process_group()


def world_of(size, folder, setting=30.0, run=busy_rank):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wholestep"])
    pipes, ranks = [], []
    for rank in range(size):
        here, there = context.Pipe()
        ranks.append(context.Process(target=run, args=(there, rank, size, str(folder), setting), daemon=True))
        ranks[-1].start()
        there.close()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * size
    return pipes, ranks


def end_world(ranks):
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join(10)
        assert process.exitcode is not None


def segments():
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_by_every_survivor(size, tmp_path, record_property):
    before, rng, took = segments(), random.Random(size), []
    for turn in range(100 if LONG else 2):
        folder = tmp_path / str(turn)
        folder.mkdir()
        pipes, ranks = world_of(size, folder)
        victim = rng.randrange(size)
        time.sleep(rng.random() * 0.2)
        killed = time.time()
        os.kill(ranks[victim].pid, signal.SIGKILL)
        for rank, pipe in enumerate(pipes):
            if rank == victim:
                continue
            assert pipe.poll(20), f"rank {rank} says nothing after rank {victim} was killed"
            kind, message, at = pipe.recv()
            assert kind == "DistRankError"
            assert f"rank {victim} has exited or was killed" in message
            took.append(at - killed)
            assert pipe.poll(20)
            assert pipe.recv() == "gone"
            [dump] = folder.glob(f"rank{rank}.*.json")
            last = json.loads(dump.read_text())["collectives"][-1]
            assert last["state"] == "failed"
            assert "busy_rank" not in last["where"]
            assert "test_faults.py:" in last["where"]
        end_world(ranks)
    record_property("slowest report after a kill, seconds", max(took))
    print(f"slowest of {len(took)} reports after a kill: {max(took):.2f} s")
    assert segments() <= before


def test_a_stopped_rank_is_named_at_the_timeout_with_where_it_stands(tmp_path):
    pipes, ranks = world_of(2, tmp_path, 1.0)
    time.sleep(0.5)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert pipes[0].poll(30)
    kind, message, _ = pipes[0].recv()
    assert kind == "DistTimeoutError"
    assert "rank 0 waited 1 s" in message
    assert "for rank 1, which last stood at #" in message
    end_world(ranks)


# Compiled steps ---------------------------------------------------------------------------------------------------


def look_up_and_learn(table, layer, opt, x, y):
    loss = torch.nn.functional.cross_entropy(layer(table(x)), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def compiled_step(plan):
    table, layer = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 4)
    opt = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
    mesh = ws.init_device_mesh("cpu", (comm.get_world_size(),), mesh_dim_names=("dp",))
    step = ws.compile(look_up_and_learn, mesh=mesh, plan=getattr(ws, plan)("dp"), fullgraph=True)
    return lambda x, y: step(table, layer, opt, x, y)


def fails_in_the_middle(folder):
    """Rank 1's data are wrong, which its program finds half-way; it catches the error and stays alive."""
    os.environ["WHOLESTEP_DUMP"] = folder
    step, x, y = compiled_step("DataParallel"), torch.arange(12), torch.arange(12) % 4
    step(x, y)
    with pytest.raises((IndexError, comm.DistRankError)) as caught:
        for _ in range(3):
            step(x + 100 if comm.get_rank() == 1 else x, y)
    with pytest.raises(comm.DistRankError, match="of look_up_and_learn failed with IndexError"):
        comm.all_reduce(torch.ones(1))
    comm.destroy_process_group()
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("transport", ["shm", "thread", "gloo"])
def test_a_rank_whose_program_fails_is_named_by_the_others(transport, tmp_path):
    for rank, (kind, message, notes) in enumerate(run_ranks(fails_in_the_middle, 3, transport, (str(tmp_path),))):
        assert kind == ("IndexError" if rank == 1 else "DistRankError")
        if rank != 1:
            what = "its call 2 of look_up_and_learn failed with IndexError: index out of range"
            assert f"rank 1 cannot go on: {what}" in message
            assert any("test_faults.py:" in note and f"rank{rank}." in note for note in notes)


def trains_until(pipe, rank, size, folder, plan):
    """Runs a compiled step until it fails; reports why."""
    torch.set_num_threads(1)
    os.environ["WHOLESTEP_DUMP"] = folder
    comm.init_process_group("shm", f"file://{folder}/store", timedelta(seconds=30), size, rank)
    step, x, y = compiled_step(plan), torch.arange(12), torch.arange(12) % 4
    step(x, y)
    pipe.send("ready")
    try:
        while True:
            step(x, y)
    except comm.DistError as error:
        pipe.send((type(error).__name__, str(error), time.time()))
    comm.destroy_process_group()


@pytest.mark.parametrize("plan", ["DataParallel", "FullyShard"])
def test_a_rank_killed_in_a_compiled_step_is_named_by_every_survivor(plan, tmp_path):
    pipes, ranks = world_of(3, tmp_path, plan, run=trains_until)
    time.sleep(0.1)
    os.kill(ranks[1].pid, signal.SIGKILL)
    for rank in (0, 2):
        assert pipes[rank].poll(20)
        kind, message, _ = pipes[rank].recv()
        assert kind == "DistRankError"
        assert "rank 1 has exited or was killed" in message
        [dump] = tmp_path.glob(f"rank{rank}.*.json")
        failed = [call for call in json.loads(dump.read_text())["collectives"] if call["state"] == "failed"]
        assert failed
        assert "test_faults.py:" in failed[0]["where"]
    end_world(ranks)


def comes_too_late():
    """Rank 1 comes to a barrier that rank 0 has waited for in vain."""
    late = comm.new_group(timeout=timedelta(seconds=0.5))
    comm.barrier(late)
    if comm.get_rank() == 1:
        comm.barrier()  # rank 0 comes here when it has given up there
    with pytest.raises(comm.DistError) as caught:
        comm.barrier(late)
    if comm.get_rank() == 0:
        comm.barrier()
    return type(caught.value).__name__


def test_a_collective_that_others_gave_up_fails_for_who_comes_late():
    assert run_ranks(comes_too_late, 2, "shm") == ["DistTimeoutError", "DistBackendError"]


def leaves_early():
    if comm.get_rank() == 0:
        comm.destroy_process_group()
        comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())
        return ""
    with pytest.raises(comm.DistError) as caught:
        comm.all_reduce(torch.ones(4))
    comm.destroy_process_group()
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())
    return str(caught.value)


def test_a_rank_that_left_is_named():
    assert "rank 0 has" in run_ranks(leaves_early, 2, "shm")[1]


def computing(folder):
    """Says that it is there, and computes for longer than any test takes."""
    Path(folder, str(os.getpid())).touch()
    while True:
        comm.all_reduce(torch.ones(4))


CALLER = "from tests.comm.test_faults import computing, run_ranks; run_ranks(computing, 2, 'shm', ({folder!r},))"


def test_ranks_end_when_the_process_that_waits_for_them_is_killed(tmp_path):
    before = set(os.listdir("/dev/shm"))
    caller = subprocess.Popen([sys.executable, "-c", CALLER.format(folder=str(tmp_path))])
    end = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert caller.poll() is None and time.monotonic() < end, "the ranks do not begin"
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    while any(map(is_running, ranks)):
        assert time.monotonic() < end, "the ranks compute on"
        time.sleep(0.05)
    left = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}  # of other tests' processes
    assert left <= before


def is_running(pid):
    """Whether a process is there and is no zombie, which waits for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
