"""What clients, unauthenticated connections, forks and dead servers can do to a store; ranks that do not all come."""

import contextlib
import errno
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch

from wholestep import comm
from wholestep.comm import flight_recorder, shared_tensors
from wholestep.comm.stores import tcp_server, tcp_store
from wholestep.comm.stores.store_barrier import exchange
from wholestep.comm.stores.tcp_server import HELLO, MAX_FRAME, pack
from wholestep.launcher import World, free_port
from wholestep.testing import run_ranks

LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=0.5)


@pytest.fixture
def store():
    made = comm.TCPStore("localhost", 0, is_master=True, timeout=LONG)
    yield made
    made.close()


def connect(store):
    return socket.create_connection(("localhost", store.port))


def greeted(store):
    """The socket of a client that has been let in."""
    client = comm.TCPStore("localhost", store.port, timeout=LONG)
    taken, client._connection = client._connection, None
    return taken.socket


# What a client sends ----------------------------------------------------------------------------------------------

FRAMES = {
    "an empty frame": struct.pack("<I", 0),
    "a field, no more": pack(b"set"),
    "a command of two fields that needs three": pack(b"set", b"k"),
    "get without a time-out": pack(b"get", b""),
    "get until a word": pack(b"get", b"", b"soon", b"k"),
    "get until nan": pack(b"get", b"", b"nan", b"k"),
    "get for ever": pack(b"get", b"", b"inf", b"k"),
    "get for 26 days": pack(b"get", b"", b"2246400", b"k"),
    "get for ages": pack(b"get", b"", b"1e300", b"k"),
    "get for less than nothing": pack(b"get", b"", b"-inf", b"k"),
    "a command that is none": pack(b"__init__", b""),
    "text that is none": pack(b"set", b"\xff\xfe", b"v"),
    "two requests at once": 2 * pack(b"get", b"", b"9", b"k"),
    "a number that is none": pack(b"add", b"k", b"1" * 10000),
    "too long a frame": struct.pack("<I", MAX_FRAME + 1),
    "half a frame": struct.pack("<I", 60) + b"abc",
    "half a length": b"\x01",
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_request_that_is_none_costs_its_client_alone(store, name):
    bad, good = greeted(store), comm.TCPStore("localhost", store.port, timeout=LONG)
    bad.sendall(FRAMES[name])
    assert good.add("n", 1) == 1
    threading.Timer(0.05, lambda: store.set("late", "here")).start()
    assert good.get("late") == b"here"
    bad.close()
    assert comm.TCPStore("localhost", store.port, timeout=LONG).add("n", 1) == 2


def test_random_bytes_requests_and_ends_cost_their_client_alone(store):
    rng, kept = random.Random(19), []
    words = [b"get", b"set", b"add", b"append", b"compare_set", b"delete", b"count", b"has", b"", b"\xff", b"9" * 5000]

    def sent():
        request = pack(*(rng.choice([*words, b"k", b"1", b"nan", b"1e9"]) for _ in range(rng.randrange(5))))
        length = struct.pack("<I", rng.choice([0, 1, 3, 4, 5, 1 << 16, MAX_FRAME, 2**32 - 1]))
        greeting = HELLO + pack(rng.randbytes(32), rng.randbytes(rng.randrange(60)))
        whole = rng.choice([request, 20 * request, length + rng.randbytes(9), rng.randbytes(300), HELLO, greeting])
        return whole[: rng.randrange(1, len(whole) + 1)]

    for turn in range(300):
        bad = rng.choice([connect, greeted])(store)
        with contextlib.suppress(OSError):
            bad.sendall(sent())
        if rng.random() < 0.3:
            bad.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        bad.close() if rng.random() < 0.8 else kept.append(bad)
        assert store.add("turns", 1) == turn + 1
    for bad in kept:
        bad.close()


@pytest.mark.parametrize("days", [26, 100_000, 999_999_999])
@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_long_timeouts(kind, days, tmp_path):
    limit = timedelta(days=days)
    if kind == "tcp":
        store = comm.TCPStore("localhost", 0, is_master=True, timeout=limit)
        other = comm.TCPStore("localhost", store.port, timeout=limit)
    else:
        store = comm.HashStore(limit) if kind == "hash" else comm.FileStore(str(tmp_path / "store"), timeout=limit)
        other = store
    threading.Timer(0.05, lambda: store.set("late", "here")).start()
    assert other.get("late") == b"here"
    for several in (limit, True, numpy.float64(days)):
        other.wait(["late"], several)
    with pytest.raises(ValueError, match="a time-out is a number of seconds, found nan"):
        other.wait(["late"], math.nan)
    store.close()


def test_keys_and_values_of_the_wrong_type_change_nothing(store):
    for wrong in (5, 2.5, None, [1, 2]):
        for call in (
            lambda wrong=wrong: store.set("k", wrong),
            lambda wrong=wrong: store.append("k", wrong),
            lambda wrong=wrong: store.compare_set("k", "", wrong),
            lambda wrong=wrong: store.set(wrong, "v"),
            lambda wrong=wrong: store.get(wrong),
            lambda wrong=wrong: store.wait([wrong]),
        ):
            with pytest.raises(TypeError):
                call()
    for call in (lambda: store.add("n", 2.5), lambda: store.wait("k"), lambda: store.check("k")):
        with pytest.raises(TypeError):
            call()
    assert store.num_keys() == 0


def test_values_that_are_too_large(store):
    with pytest.raises(ValueError, match="at most 67,108,864"):
        store.set("k", bytes(100 << 20))
    store.set("k", bytes(40 << 20))
    store.append("k", bytes(40 << 20))
    with pytest.raises(ValueError, match="83886[0-9]* bytes in one answer"):
        store.get("k")
    assert store.add("n", 1) == 1


# Unauthenticated connections --------------------------------------------------------------------------------------


def test_of_600_unauthenticated_connections_the_server_keeps_few(store):
    opened = [connect(store) for _ in range(600)]
    for connection in opened[::3]:
        with contextlib.suppress(OSError):
            connection.sendall(HELLO[:5])
    client = comm.TCPStore("localhost", store.port, timeout=LONG)
    assert client.add("n", 1) == 1
    assert len(store._server.connections) <= tcp_server.MAX_UNAUTHENTICATED + 2
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("drips", [False, True])
def test_a_connection_that_is_not_authenticated_in_time_is_closed(store, monkeypatch, drips):
    monkeypatch.setattr(tcp_server, "GREETING_SECONDS", 0.2)
    connection, begin = connect(store), time.monotonic()
    connection.settimeout(10)
    with contextlib.suppress(OSError):
        for byte in HELLO if drips else b"":
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        assert connection.recv(100) == b""
    assert time.monotonic() - begin < 5


def test_a_client_that_goes_while_it_waits_leaves_nothing(store, monkeypatch):
    monkeypatch.setattr(tcp_server, "POLL", 0.05)
    client, before = greeted(store), threading.active_count()
    client.sendall(pack(b"get", b"", b"inf", b"never"))
    client.close()
    while len(store._server.connections) > 1 or threading.active_count() >= before:
        time.sleep(0.01)


FEW_DESCRIPTORS = """
import os, resource, socket, time
from datetime import timedelta
from wholestep import comm
store = comm.TCPStore("localhost", 0, is_master=True)
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = [os.dup(0) for _ in range(3)]
print(store.port, flush=True)
input()
for one in taken:
    os.close(one)
print(store.add("n", 1), flush=True)
input()
"""


def test_a_server_without_descriptors_waits_for_some():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        port = int(process.stdout.readline())
        threading.Timer(0.3, lambda: (process.stdin.write("\n"), process.stdin.flush())).start()
        client = comm.TCPStore("localhost", port, timeout=LONG)
        assert process.stdout.readline() == "1\n"
        assert client.add("n", 1) == 2
        client.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0


def test_a_client_that_has_authenticated_gives_way_to_none(store, monkeypatch):
    """A listener that lacks descriptors while it waits drops the oldest unauthenticated of that moment."""
    accept, accepted = tcp_server.Server._accept, iter([True, False, True])

    def once(server):
        if next(accepted, True):
            return accept(server)
        while not all(server.connections.values()):  # authenticated since the listener has looked last
            time.sleep(0.01)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tcp_server.Server, "_accept", once)
    monkeypatch.setattr(tcp_server, "PAUSE", 0.0)
    comm.TCPStore("localhost", store.port, timeout=LONG).close()  # the call that waits is of the former method
    client = comm.TCPStore("localhost", store.port, timeout=LONG)
    comm.TCPStore("localhost", store.port, timeout=LONG).close()  # served after the failure
    assert client.add("n", 1) == 1


# Interrupts, forks, dead servers ----------------------------------------------------------------------------------


def test_an_interrupted_wait_leaves_no_answer_behind(store):
    client = comm.TCPStore("localhost", store.port, timeout=LONG)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            client.get("later")
    finally:
        signal.signal(signal.SIGALRM, before)
    store.set("later", "a value that nobody waits for any more")
    assert client.add("n", 1) == 1
    assert client.get("later") == b"a value that nobody waits for any more"


def in_a_fork(step):
    child = os.fork()
    if child == 0:
        try:
            step()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_fork_uses_a_store_beside_its_parent(kind, tmp_path):
    if kind == "tcp":
        store = comm.TCPStore("localhost", 0, is_master=True, timeout=LONG)
    else:
        store = comm.FileStore(str(tmp_path / "store"), timeout=LONG)
    children = [in_a_fork(lambda: [store.add("n", 1) for _ in range(200)]) for _ in range(2)]
    for _ in range(200):
        store.add("n", 1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert store.add("n", 0) == 600
    store.close()


def serve(pipe, forks):
    store = comm.TCPStore("localhost", 0, is_master=True, timeout=LONG)
    if forks:
        in_a_fork(lambda: time.sleep(30))  # a worker, say, which outlives it
    pipe.send(store.port)
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("forks", [False, True])
def test_a_server_that_is_killed_or_stopped_is_named(number, forks, monkeypatch):
    monkeypatch.setattr(tcp_store, "SLACK", 0.3)
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, forks), daemon=True)
    process.start()
    client = comm.TCPStore("localhost", here.recv(), timeout=timedelta(seconds=2))
    threading.Timer(0.2, lambda: os.kill(process.pid, number)).start()
    with pytest.raises(comm.DistNetworkError, match=rf"lost localhost:{client.port}: .*process of rank 0"):
        client.get("never")
    with pytest.raises(comm.DistNetworkError, match="closed"):
        client.set("k", "v")
    process.kill()
    process.join()


def test_closing_a_store_ends_who_waits_on_it(store):
    client, errors = comm.TCPStore("localhost", store.port, timeout=timedelta(days=1)), []

    def wait():
        try:
            client.get("never")
        except comm.DistNetworkError as ended:
            errors.append(ended)

    thread = threading.Thread(target=wait)
    thread.start()
    while not client._lock.locked():
        time.sleep(0.01)
    time.sleep(0.05)  # the request is on its way, or its answer is waited for
    client.close()
    thread.join(10)
    assert len(errors) == 1


# Ranks that do not all come ---------------------------------------------------------------------------------------


def too_few(backend, address):
    comm.destroy_process_group()
    with pytest.raises(comm.DistStoreError) as late:
        comm.init_process_group(backend, address, timedelta(seconds=1.5), 5, 2 * int(os.environ["RANK"]))
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())
    return str(late.value)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_every_rank_names_those_that_have_not_come(backend, method, tmp_path):
    address = f"file://{tmp_path}/store" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    for said in run_ranks(too_few, 2, "shm", (backend, address)):
        assert "num_workers_joined=2" in said
        assert "these have not come: [1, 3, 4]" in said


def test_two_processes_with_one_rank():
    store = comm.HashStore()
    with pytest.raises(comm.DistStoreError, match=r"not come: \[0\]"):
        exchange(1, store, "g", 2, timedelta(seconds=0.1))
    with pytest.raises(ValueError, match=f"rank 1 of 2 is there already: process {os.getpid()} on .* two jobs"):
        exchange(1, store, "g", 2, LONG)
    with pytest.raises(comm.DistStoreError, match=r"not come: \[0\]"):  # who comes later is told at once
        exchange(0, store, "g", 2, LONG)


def again(address):
    total = torch.ones(1)
    for _ in range(3):
        comm.destroy_process_group()
        comm.init_process_group("shm", address, LONG, 2, int(os.environ["RANK"]))
        comm.all_reduce(total)
    return total.item()


def test_a_file_serves_one_world_after_another(tmp_path):
    for _ in range(2):
        assert run_ranks(again, 2, "shm", (f"file://{tmp_path}/store",)) == [8.0, 8.0]
        assert not (tmp_path / "store").exists()


def test_a_file_that_is_no_store_stays_as_it_is(tmp_path):
    (tmp_path / "data").write_bytes(b"important")
    with pytest.raises(ValueError, match="is not a store"):
        comm.FileStore(str(tmp_path / "data"))
    assert (tmp_path / "data").read_bytes() == b"important"


# Shared memory and groups -----------------------------------------------------------------------------------------


def full_on(rank, how):
    """Makes shared memory scarce on one rank, and says what `new_group` tells."""
    if comm.get_rank() == rank and how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    if comm.get_rank() == rank and how == "folder":
        shared_tensors.SHARED_FOLDER = "/no/such/folder"
    try:
        with pytest.raises(comm.DistBackendError) as full:
            comm.new_group([0, 1], timeout=LONG)
        return str(full.value)
    finally:
        shared_tensors.SHARED_FOLDER = "/dev/shm"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize(("how", "words"), [("limit", "ulimit -f"), ("folder", "/no/such/folder")])
def test_no_shared_memory_is_told_to_every_rank(how, words):
    first, second = run_ranks(full_on, 2, "shm", (0, how))
    assert words in first
    assert words in second
    assert "rank 0 of the group cannot go on" in second


def test_signals_do_not_keep_shared_memory_from_being_made():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)  # as profilers do
    try:
        assert comm.empty(50 << 18, shared=True).fill_(1).sum() == 50 << 18
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def begun_without_shared_memory(rank, port, told):
    os.environ.update(World(3).environment(rank, port, "of this test"))
    shared_tensors.SHARED_FOLDER = "/no/such/folder"
    try:
        comm.init_process_group("shm", timeout=LONG)
    except comm.DistBackendError as full:
        Path(told).write_text(str(full))


def test_no_shared_memory_is_told_to_every_rank_though_the_first_ends_at_once(tmp_path):
    port, told = free_port(), [tmp_path / str(rank) for rank in range(3)]
    make = multiprocessing.get_context("forkserver").Process
    ranks = [make(target=begun_without_shared_memory, args=(rank, port, told[rank])) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank, words in zip(ranks, told, strict=True):
        rank.join(60)
        assert "no file can be made in /no/such/folder" in words.read_text()


def counted():
    comm.barrier()
    maps = sum(1 for _ in open("/proc/self/maps", encoding="utf8"))
    keys = comm.default_store().num_keys() if comm.get_backend() == "shm" else 0  # Gloo leaves its addresses
    held = len(os.listdir("/proc/self/fd")), threading.active_count(), keys
    comm.barrier()
    return maps, held


def groups_that_end(count):
    total = torch.ones(4)
    for turn in range(count):
        group = comm.new_group([0, 1], use_local_synchronization=turn % 2 == 1)
        comm.all_reduce(total, group=group)
        comm.destroy_process_group(group)


def what_groups_leave():
    groups_that_end(5)
    maps, held = counted()
    groups_that_end(40)
    more, after = counted()
    assert after == held
    assert more - maps < 20


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_groups_leave_nothing_behind(backend):
    run_ranks(what_groups_leave, 2, backend)


# Flight records ---------------------------------------------------------------------------------------------------


def test_flight_records_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.delenv(flight_recorder.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(flight_recorder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(flight_recorder, "FILES", 10)
    folder = flight_recorder.dump(0).parent
    (folder / "notes.json").write_text("mine")
    for number in range(30):
        old = folder / f"rank{number}.{number + 10}.json"
        old.write_text("{}")
        os.utime(old, (time.time() - number * 24 * 3600,) * 2)
    written = flight_recorder.dump(0)
    left = {file.name for file in folder.iterdir()}
    young = {f"rank{number}.{number + 10}.json" for number in range(7)}
    assert {"notes.json", written.name} <= left
    assert left - {"notes.json", written.name} == young
    monkeypatch.setenv(flight_recorder.FOLDER_VARIABLE, str(folder))  # the user's own folder is the user's
    flight_recorder.dump(0)
    assert {file.name for file in folder.iterdir()} == left


def test_a_folder_for_flight_records_that_somebody_laid_out(tmp_path, monkeypatch):
    monkeypatch.delenv(flight_recorder.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(flight_recorder.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "home").mkdir()
    (tmp_path / f"wholestep-{os.getuid()}").symlink_to(tmp_path / "home")
    with pytest.raises(OSError, match="belongs to somebody else"):
        flight_recorder.dump(0)
