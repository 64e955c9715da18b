"""What bad input gets: an error that names what was found and required, and nothing left behind.

Elsewhere: dtypes, shapes, list lengths, roots and ranks outside the group of one rank's arguments
(`test_comm_collectives`: wrong_dtypes, wrong_sizes), the same between ranks (`test_comm_faults`: all_mismatches, and
`test_comm_hosts` between hosts), a second init (`test_comm_groups`), garbage sent to a store and the secrets of both
sides (`test_comm_stores`).
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from wholestep import comm
from wholestep.launcher import free_port
from wholestep.testing import run_ranks

SHORT = timedelta(seconds=1)


def held():
    """What this process holds of the system: open files and sockets, threads, files in shared memory."""
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    files = [name for name in files if not name.startswith("pipe:")]  # those are the server's that starts ranks
    return sorted(files), {thread.name for thread in threading.enumerate()}, set(os.listdir("/dev/shm"))


@pytest.fixture(autouse=True)
def nothing_leaks():
    files, threads, shared = held()
    yield
    assert not comm.is_initialized()
    for _ in range(50):  # a thread that was told to end may take a moment, and so may what other tests have there
        now, running, there = held()
        if len(now) <= len(files) and running <= threads and there <= shared:
            break
        threading.Event().wait(0.1)
    assert len(now) <= len(files), set(now) - set(files)
    assert running <= threads
    assert there <= shared


# Meeting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("tcp://127.0.0.1:70000", "(?i)port.*0-65535"),
        ("tcp://127.0.0.1", "is not an address"),
        ("tcp://127.0.0.1:x", "Port could not be cast|is not an address"),
        ("tcp://no.such.host.invalid:1", "no.such.host.invalid"),
        ("file://", "is not an address"),
        ("file://relative/path", "is not an address"),
        ("file:///no/such/folder/store", "/no/such/folder/store"),
    ],
)
def test_addresses_that_are_none(address, words):
    with pytest.raises((ValueError, OSError, comm.DistNetworkError), match=words):
        comm.init_process_group("null", address, SHORT, 1, 0)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(comm.DistNetworkError, match=f"cannot listen on 127.0.0.1:{port}.*Choose a free one"):
            comm.init_process_group("null", f"tcp://127.0.0.1:{port}", SHORT, 1, 0)


def test_a_master_that_does_not_come():
    with pytest.raises(comm.DistNetworkError, match="no answer from 127.0.0.1:"):
        comm.init_process_group("null", f"tcp://127.0.0.1:{free_port()}", SHORT, 2, 1)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_that_do_not_come(backend, tmp_path):
    with pytest.raises(comm.DistError, match="(?i)time"):
        comm.init_process_group(backend, f"file://{tmp_path}/store", SHORT, 2, 0)


def another_world_size(address):
    rank = comm.get_rank()
    comm.destroy_process_group()
    if rank == 1:
        store = Path(address.removeprefix("file://"))
        while not (store.exists() and store.stat().st_size):  # until rank 0 has said how many ranks there are
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
        with pytest.raises(ValueError, match="rank 1 says world_size 3, another rank says 2"):
            comm.init_process_group("shm", address, SHORT, 3, 1)
    else:
        with pytest.raises(comm.DistStoreError, match="num_workers_joined=1"):
            comm.init_process_group("shm", address, SHORT, 2, 0)
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())


def test_ranks_of_different_worlds(tmp_path):
    run_ranks(another_world_size, 2, "gloo", (f"file://{tmp_path}/store",))


def test_a_rank_with_another_secret(monkeypatch):
    with contextlib.closing(comm.TCPStore("127.0.0.1", 0, is_master=True, secret="ours")) as store:
        monkeypatch.setenv("WHOLESTEP_SECRET", "theirs")
        with pytest.raises(comm.DistNetworkError, match="refused this rank.*WHOLESTEP_SECRET the same"):
            comm.init_process_group("null", f"tcp://127.0.0.1:{store.port}", SHORT, 2, 1)


@pytest.mark.parametrize(
    "sent", [b"", b"\x24\x00", struct.pack("<I", 36) + b"abc", struct.pack("<I", 0xFFFFFFFF), struct.pack("<II", 4, 9)]
)
def test_a_store_whose_answer_is_cut_short(sent):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            connection.sendall(sent)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(comm.DistNetworkError, match="refused this rank"):
            comm.TCPStore("127.0.0.1", listener.getsockname()[1], timeout=SHORT)
        thread.join()


def test_a_file_that_is_no_store(tmp_path):
    (tmp_path / "store").write_bytes(struct.pack("<Ii", 4, 4) + b"\xff\xfe\xfd\xfcdata")
    with pytest.raises(ValueError, match="utf-8|not a store"):
        comm.init_process_group("null", f"file://{tmp_path}/store", SHORT, 1, 0)


# Shared memory ----------------------------------------------------------------------------------------------------

FULL = """
import torch
from wholestep import comm

def said(call):
    try:
        call()
    except comm.DistBackendError as refusal:
        print(refusal)

store = comm.HashStore()
said(lambda: comm.init_process_group("shm", rank=0, world_size=1, store=store))
print(comm.is_initialized())
said(lambda: comm.empty(1 << 20, shared=True))
small = comm.empty(1000, shared=True).fill_(1)
print(small.sum().item())
"""


def test_a_full_dev_shm(tmp_path):
    """In a namespace where /dev/shm has 64 KB; where none can be made, the errors' words alone are tested."""
    own = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
    mount = "mount -t tmpfs -o size=64k none /dev/shm"
    if subprocess.run([*own, "sh", "-c", mount], capture_output=True, check=False).returncode:
        with pytest.raises(comm.DistBackendError, match="bytes of shared memory are required, /dev/shm has .* free"):
            comm.empty(1 << 44, shared=True)
        return
    (tmp_path / "full.py").write_text(FULL)
    command = [*own, "sh", "-c", f"{mount} && exec {sys.executable} {tmp_path}/full.py"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    group, initialised, tensor, total = out.stdout.splitlines()
    assert "shm group: " in group
    assert "bytes of shared memory are required, /dev/shm has 65,536 free" in group
    assert initialised == "False"
    assert "comm.empty(shared=True): 4,194,304 bytes of shared memory are required" in tensor
    assert total == "1000.0"


# Groups -----------------------------------------------------------------------------------------------------------


def destroyed():
    part = comm.new_group([0, 1])
    x = torch.ones(2)
    comm.all_reduce(x, group=part)
    comm.destroy_process_group(part)
    calls = [
        lambda: comm.all_reduce(x, group=part),
        lambda: comm.broadcast(x, 0, group=part),
        lambda: comm.barrier(part),
        lambda: comm.isend(x, 1 - comm.get_rank(), group=part),
        lambda: comm.destroy_process_group(part),
        lambda: comm.get_rank(part),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not registered"):
            call()
    comm.all_reduce(x)
    return x.tolist()


@pytest.mark.parametrize("transport", ["shm", "thread", "gloo"])
def test_a_destroyed_group(transport):
    assert run_ranks(destroyed, 2, transport) == [[4.0, 4.0]] * 2


def alone(call):
    comm.init_process_group("null", rank=0, world_size=1, store=comm.HashStore())
    try:
        return call()
    finally:
        comm.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: comm.all_reduce(torch.ones(2), "median"), "unknown reduction 'median'"),
        (lambda: comm.all_reduce(torch.ones(2), group="nope"), "group 'nope' is not registered"),
        (lambda: comm.broadcast(torch.ones(2), 3), "Global rank 3 is not part of group"),
        (lambda: comm.reduce(torch.ones(2), group_dst=1), "group_dst 1 is not in a group of 1"),
        (lambda: comm.send(torch.ones(2), 0), "Invalid destination rank"),
        (lambda: comm.new_group([1]), r"ranks \[1\] are not in a world of 1"),
        (lambda: comm.get_global_rank(None, -1), "Group rank -1 is not part of group"),
        (lambda: comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "convert to bfloat16 or float32 first"),
        (lambda: comm.all_reduce("x"), "Expected parameter `tensor` of type torch.Tensor"),
        (lambda: comm.scatter_object_list([]), "one entry is required"),
        (lambda: comm.batch_isend_irecv([1]), "P2POp is required"),
    ],
)
def test_arguments_that_mean_nothing(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        alone(call)
