"""Groups over several hosts: one machine divided by WHOLESTEP_HOST, and two networks where they can be made."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.support.comm_programs import run_program
from wholestep import comm
from wholestep.comm.engines.host_groups import Topology
from wholestep.comm.engines.reference_reduce import naive_reduce
from wholestep.comm.engines.shm_segment import host_identity
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import as_op
from wholestep.launcher import free_port
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
LAYOUTS = ["ab", "aabb", "abab", "aaab", "abc", "abbca"]  # the host of each rank


def on_hosts(layout, folder, fn, args):
    """In each rank: leaves the world it was started in for one whose ranks are on the hosts of ``layout``."""
    rank, size = comm.get_rank(), comm.get_world_size()
    comm.destroy_process_group()
    os.environ["WHOLESTEP_HOST"] = layout[rank]
    comm.init_process_group("shm", f"file://{folder}/store", timedelta(seconds=60), size, rank)
    try:
        return fn(*args)
    finally:
        comm.barrier()


def run_on_hosts(layout, tmp_path, fn, *args):
    return run_ranks(on_hosts, len(layout), "gloo", (layout, str(tmp_path), fn, args), timeout=300)


def programs(steps):
    assert comm.get_backend() == "shm+gloo"
    return run_program(23, steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_programs_agree_with_the_oracle_on_every_layout(layout, tmp_path):
    steps = 1000 if LONG else 40
    assert min(run_on_hosts(layout, tmp_path, programs, steps)) > 0.8 * steps


def reductions():
    rank, n = comm.get_rank(), comm.get_world_size()
    for count in (5, 30_001, 300_001):  # whole, in shares, in pieces
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            parts = [torch.randn(count, generator=torch.Generator().manual_seed(i)) * 8 for i in range(n)]
            parts = [part.to(dtype) for part in parts]
            for op in ("sum", "avg", "min", "max", "product", "premul"):
                kind = comm.premul_sum(0.5) if op == "premul" else op
                mine = parts[rank].clone()
                comm.all_reduce(mine, kind)
                seen = [torch.empty_like(mine) for _ in range(n)]
                comm.all_gather(seen, mine)
                assert all(torch.equal(one, mine) for one in seen)
                wanted = naive_reduce(parts, Options(*as_op(kind)))
                if op in ("min", "max") or not dtype.is_floating_point:
                    assert torch.equal(mine, wanted)
                else:
                    torch.testing.assert_close(mine, wanted)
    whole = torch.arange(4.0) + rank
    work = comm.all_reduce(whole, async_op=True)
    assert work.get_future().wait()[0].tolist() == (n * torch.arange(4.0) + n * (n - 1) / 2).tolist()
    complex_flags = torch.tensor([1j * rank, 2]), torch.tensor([rank == 0, False])
    for one in complex_flags:
        comm.all_reduce(one)
    assert complex_flags[0].tolist() == [1j * n * (n - 1) / 2, 2 * n]
    assert complex_flags[1].tolist() == [True, False]


@pytest.mark.parametrize("layout", ["aabb", "abcac"])
def test_reductions_are_those_of_one_host(layout, tmp_path):
    run_on_hosts(layout, tmp_path, reductions)


def groups_messages_objects():
    rank, n = comm.get_rank(), comm.get_world_size()
    alike = comm.new_group([0, 1])
    apart = comm.new_group([1, 2])
    assert alike.name() == ("shm" if rank < 2 else "NonMember")
    assert apart.name() == ("shm+gloo" if rank in (1, 2) else "NonMember")
    for group, members in ((alike, (0, 1)), (apart, (1, 2))):
        if rank in members:
            x = torch.tensor([rank])
            comm.all_reduce(x, group=group)
            assert x.item() == sum(members)
    found = [None] * n
    comm.all_gather_object(found, "x" * rank)
    assert found == ["x" * i for i in range(n)]
    right, left = (rank + 1) % n, (rank - 1) % n
    came = torch.zeros(3)
    for work in comm.batch_isend_irecv(
        [comm.P2POp(comm.isend, torch.full((3,), float(rank)), right), comm.P2POp(comm.irecv, came, left)]
    ):
        work.wait()
    assert came.tolist() == [left] * 3
    comm.monitored_barrier()
    with pytest.raises(comm.DistBackendError, match="any rank cannot be received across hosts: name the source"):
        comm.recv(came)
    with pytest.raises(TypeError, match="float8_e5m2"):
        comm.all_reduce(torch.ones(2, dtype=torch.float8_e5m2))


def test_subgroups_messages_and_objects(tmp_path):
    run_on_hosts("aabb", tmp_path, groups_messages_objects)


def disagree(one, other):
    with pytest.raises(comm.DistError) as caught:
        (one if comm.get_rank() == 2 else other)()
    for call in (one, other):
        with pytest.raises(comm.DistError):
            call()  # the group has ended: nothing hangs
    comm.destroy_process_group()
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())
    return type(caught.value).__name__, str(caught.value)


def sum_of_4():
    comm.all_reduce(torch.ones(4))


def sum_of_5():
    comm.all_reduce(torch.ones(5))


def exchange_1_and_3():
    comm.all_to_all_single(torch.ones(3), torch.ones(3), None, [1, 2, 0])


def exchange_evenly():
    comm.all_to_all_single(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("layout", ["aab", "aba"])
@pytest.mark.parametrize(
    ("one", "other", "words"),
    [(sum_of_4, sum_of_5, ["float32 [4]", "float32 [5]"]), (sum_of_4, comm.barrier, ["all_reduce", "barrier"])],
)
def test_a_mismatch_ends_on_every_host(layout, one, other, words, tmp_path):
    """Inside a host it is seen by shm, between hosts by the leaders."""
    for kind, message in run_on_hosts(layout, tmp_path, disagree, one, other):
        assert kind == "DistMismatchError"
        assert "the ranks disagree" in message
        if layout == "aab":
            assert all(word in message for word in words)


def test_an_exchange_that_does_not_fit_ends_on_every_host(tmp_path):
    for kind, message in run_on_hosts("aab", tmp_path, disagree, exchange_1_and_3, exchange_evenly):
        assert kind == "DistMismatchError"
        assert "rank 2 sends" in message


def busy(pipe, layout, rank, folder, seconds):
    torch.set_num_threads(1)
    os.environ.update(WHOLESTEP_HOST=layout[rank], WHOLESTEP_DUMP=folder)
    comm.init_process_group("shm", f"file://{folder}/store", timedelta(seconds=seconds), len(layout), rank)
    pipe.send("ready")
    try:
        while True:
            comm.all_reduce(torch.ones(20_000))
            comm.all_gather_into_tensor(torch.empty(len(layout) * 10), torch.ones(10))
    except comm.DistError as failure:
        pipe.send((type(failure).__name__, str(failure), time.time()))
    comm.destroy_process_group()
    pipe.send("gone")


@pytest.mark.parametrize(
    ("layout", "victim", "number", "seconds"),
    [
        ("aabb", 1, signal.SIGKILL, 60),
        ("aabb", 2, signal.SIGKILL, 60),
        ("aab", 2, signal.SIGKILL, 60),
        ("aabb", 3, signal.SIGSTOP, 3),
        ("aabb", 0, signal.SIGSTOP, 3),
    ],
)
def test_a_dead_or_stopped_rank_ends_the_group_on_every_host(layout, victim, number, seconds, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wholestep.comm"])
    pipes, ranks = [], []
    for rank in range(len(layout)):
        here, there = context.Pipe()
        ranks.append(context.Process(target=busy, args=(there, layout, rank, str(tmp_path), seconds), daemon=True))
        ranks[-1].start()
        there.close()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * len(layout)
    time.sleep(0.3)
    os.kill(ranks[victim].pid, number)
    for rank in set(range(len(layout))) - {victim}:
        assert pipes[rank].poll(30), f"rank {rank} says nothing"
        kind, message, _ = pipes[rank].recv()
        assert kind == ("DistTimeoutError" if number == signal.SIGSTOP else "DistRankError")
        alone = layout.count(layout[victim]) == 1
        died = f"rank {victim}, which leads another host, has" if alone else f"rank {victim} has"
        assert (f"for rank {victim}" if number == signal.SIGSTOP else died) in message
        assert pipes[rank].poll(30)
        assert pipes[rank].recv() == "gone"
    for process in ranks:
        process.kill()
        process.join(10)


JOB = """
import json, pathlib, sys
import torch
from tests.support.comm_programs import run_program
from wholestep import comm

comm.init_process_group()

def sent():
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "cable:")

def leaves_this_host(call):
    comm.barrier()
    before = sent()
    call()
    comm.barrier()
    return sent() - before

n, flat = comm.get_world_size(), comm.new_group(backend="gloo")
x, many = torch.ones(1_000_000), torch.empty(n * 1_000_000)
counts = {
    "all_reduce": leaves_this_host(lambda: comm.all_reduce(x)),
    "flat all_reduce": leaves_this_host(lambda: comm.all_reduce(x, group=flat)),
    "broadcast": leaves_this_host(lambda: comm.broadcast(x, 0)),
    "all_gather": leaves_this_host(lambda: comm.all_gather_into_tensor(many, x)),
    "reduce_scatter": leaves_this_host(lambda: comm.reduce_scatter_tensor(x, many)),
}
found = {"backend": comm.get_backend(), "compared": run_program(3, 40), "sent": counts}
pathlib.Path(f"{sys.argv[1]}/{comm.get_rank()}.json").write_text(json.dumps(found))
"""


def has_namespaces(own):
    """True where a network namespace can be made, another in it, and a cable between them."""
    attempt = "ip link add cable type veth peer name other && unshare --net true"
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run([*own, "sh", "-c", attempt], capture_output=True, check=False).returncode == 0
    return False


def test_two_hosts_with_a_cable_between_them(tmp_path):
    """A job of two launchers that meet over TCP with their secret. Where no networks can be made: over loopback."""
    own = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--net"]
    cable = has_namespaces(own)
    (tmp_path / "job.py").write_text(JOB)
    master = ["--master-addr", "10.77.0.1" if cable else "127.0.0.2", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "wholestep", "run", "-n", "2", "--nodes", "2", *master]
    script = [str(tmp_path / "job.py"), str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    env = os.environ | {"WHOLESTEP_SECRET": "of this test", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if cable:
        env["WITH"] = " ".join(script)
        starts = [[*own, "sh", str(Path(__file__).parents[1] / "support" / "two_hosts.sh"), *command]]
        jobs = [subprocess.Popen(starts[0], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)]
    else:
        jobs = [
            subprocess.Popen(
                [*command, "--node-rank", str(host), *script],
                env=env | {"WHOLESTEP_HOST": str(host)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for host in range(2)
        ]  # fmt: skip
    said = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), said
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert {one["backend"] for one in found} == {"shm+gloo"}
    assert min(one["compared"] for one in found) > 30
    if cable:  # bytes that left each host, in units of one rank's 4 MB
        sent = [{name: count / 4e6 for name, count in one["sent"].items()} for one in found]
        for host, one in enumerate((sent[0], sent[2])):
            assert 1 <= one["all_reduce"] < 1.2 < one["flat all_reduce"]
            assert (1 - host) <= one["broadcast"] < 1.1 - host
            assert 2 <= one["all_gather"] < 2.5  # a busy host loses segments, which TCP sends anew
            assert 2 <= one["reduce_scatter"] < 2.5


def test_topology():
    topology = Topology(list("abbca"))
    assert topology.hosts == [[0, 4], [1, 2], [3]]
    assert topology.host_of == [0, 1, 1, 2, 0]
    assert topology.place_of == [0, 0, 1, 0, 1]
    assert topology.rows == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert topology.row_of == [0, 2, 3, 4, 1]


def test_a_host_can_be_divided(monkeypatch):
    whole = host_identity()
    assert whole == host_identity()
    monkeypatch.setenv("WHOLESTEP_HOST", "left")
    assert host_identity() != whole
