"""Stores: what they hold, how long they wait, and what bad clients can do to them."""

import os
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch

from wholestep import comm
from wholestep.comm.engines.c10d_adapters import TorchStore

QUICK = timedelta(seconds=0.3)


def make(kind, tmp_path, **more):
    if kind == "hash":
        return comm.HashStore(**more)
    if kind == "file":
        return comm.FileStore(str(tmp_path / "store"), **more)
    if kind == "prefix":
        return comm.PrefixStore("p", comm.HashStore(**more))
    return comm.TCPStore("localhost", 0, is_master=True, **more)


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    made = make(request.param, tmp_path, timeout=QUICK)
    yield made
    made.close()


def test_every_store_does_the_same(store):
    store.set("a", "1")
    store.set("b", b"\x00\xff")
    assert store.get("a") == b"1"
    assert store.multi_get(["a", "b"]) == [b"1", b"\x00\xff"]
    assert store.add("n", 2) == 2
    assert store.add("n", -5) == -3
    store.append("a", "23")
    assert store.get("a") == b"123"
    assert store.compare_set("a", "123", "x") == b"x"
    assert store.compare_set("a", "123", "y") == b"x"
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("absent", "expected", "z") == b"expected"
    assert store.check(["a", "b"])
    assert not store.check(["a", "absent"])
    assert store.num_keys() == 4
    assert store.delete_key("b")
    assert not store.delete_key("b")
    assert store.num_keys() == 3
    store.multi_set(["k", "l"], ["1", "2"])
    store.wait(["k", "l"])
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["k", "l"], ["1"])
    with pytest.raises(ValueError, match="needs a number"):
        store.add("a", 1)


def test_a_store_of_torch_keeps_every_byte():
    store, every = TorchStore(torch.distributed.HashStore(), QUICK), bytes(range(256))
    store.set("a", every)
    assert store.get("a") == every
    store.append("a", every)
    assert store.get("a") == 2 * every
    assert store.compare_set("b", b"", every) == every
    assert store.compare_set("b", every, b"\xff") == b"\xff"
    assert store.add("n", 3) == 3
    assert store.check(["a", "b"])
    assert store.delete_key("a")
    assert not store.check(["a"])


def test_a_key_that_never_comes_times_out(store):
    began = time.monotonic()
    with pytest.raises(comm.DistStoreError, match="Timeout"):
        store.get("nonexistent key")
    with pytest.raises(RuntimeError, match="Timeout"):
        store.wait(["nonexistent key"], timedelta(seconds=0.1))
    assert time.monotonic() - began < 3
    store.set("after", "all is well")
    assert store.get("after") == b"all is well"


def test_time_outs_are_timedeltas(store):
    with pytest.raises(TypeError, match="a time-out is a datetime.timedelta, found int 3"):
        store.set_timeout(3)
    with pytest.raises(TypeError, match="a time-out is a datetime.timedelta, found float"):
        comm.ProcessGroup(0, 1).set_timeout(3.0)
    store.set("after", "all is well")


def test_a_key_that_comes_late_is_waited_for(store):
    store.set_timeout(timedelta(seconds=20))
    other = comm.TCPStore("localhost", store.port) if isinstance(store, comm.TCPStore) else store
    threading.Timer(0.1, lambda: other.set("late", "here")).start()
    assert store.get("late") == b"here"


@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_store_based_barrier(kind, tmp_path):
    first, errors = make(kind, tmp_path), []

    def come(rank):
        if kind == "tcp":
            own = comm.TCPStore("localhost", first.port)
        else:
            own = first if kind == "hash" else make(kind, tmp_path)
        try:
            comm.store_based_barrier(rank, own, "_", 4, timedelta(seconds=0.3))
        except comm.DistStoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, comm.DistError)
        assert "Timed out initializing process group in store based barrier" in error.args[0]
        assert "num_workers_joined=3" in error.args[0]
    first.close()


def test_a_file_store_is_private_and_survives_a_torn_record(tmp_path):
    path = tmp_path / "store"
    one = comm.FileStore(str(path), 2)
    assert path.stat().st_mode & 0o777 == 0o600
    one.set("a", "1")
    with open(path, "ab") as file:
        file.write(struct.pack("<Ii", 5, 100) + b"half")
    two = comm.FileStore(str(path), 2)
    two.set("b", "2")
    assert one.get("b") == b"2"
    assert two.get("a") == b"1"
    one.close()
    assert path.exists()
    two.close()
    assert not path.exists()


def test_many_writers_of_one_counter(tmp_path):
    store = comm.TCPStore("localhost", 0, is_master=True)
    clients = [comm.TCPStore("localhost", store.port) for _ in range(4)]
    threads = [threading.Thread(target=lambda c=c: [c.add("n", 1) for _ in range(100)]) for c in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("n", 0) == 400
    store.close()


def test_secrets_are_required_of_both_sides():
    store = comm.TCPStore("localhost", 0, is_master=True, secret="right")
    with pytest.raises(comm.DistNetworkError, match="refused this rank"):
        comm.TCPStore("localhost", store.port, secret="wrong")
    assert comm.TCPStore("localhost", store.port, secret="right").add("n", 1) == 1
    store.close()


def test_listening_beyond_loopback_needs_a_secret(monkeypatch):
    monkeypatch.delenv("WHOLESTEP_SECRET", raising=False)
    with pytest.raises(ValueError, match="a secret is required"):
        comm.TCPStore("0.0.0.0", 0, is_master=True)
    comm.TCPStore("0.0.0.0", 0, is_master=True, secret="s").close()


def test_an_impostor_on_the_port_is_not_trusted():
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor():
        connection, _ = listener.accept()
        connection.sendall(struct.pack("<II", 36, 32) + secrets.token_bytes(32))
        connection.recv(1000)
        connection.sendall(struct.pack("<II", 42, 2) + b"ok" + struct.pack("<I", 32) + secrets.token_bytes(32))
        connection.recv(1000)

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.raises(comm.DistNetworkError, match="does not know the secret"):
        comm.TCPStore("127.0.0.1", listener.getsockname()[1], secret="s")
    listener.close()


GARBAGE = {
    "noise": os.urandom(500),
    "a huge frame": struct.pack("<I", 0xFFFFFFF0),
    "a field past its frame": struct.pack("<II", 4, 999),
    "a web request": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "half a frame": struct.pack("<I", 60) + b"abc",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_slow_and_half_open_clients_hurt_nobody(name):
    store = comm.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    bad = socket.create_connection(("localhost", store.port))
    bad.sendall(GARBAGE[name])
    assert store.add("n", 1) == 1
    again = comm.TCPStore("localhost", store.port)
    assert again.add("n", 1) == 2
    bad.close()
    assert store.add("n", 1) == 3
    store.close()


def test_garbage_after_the_greeting_ends_one_connection_only():
    store = comm.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    bad = comm.TCPStore("localhost", store.port)
    bad._connection.socket.sendall(struct.pack("<I", 8) + struct.pack("<II", 3, 999))
    with pytest.raises(comm.DistNetworkError, match="lost localhost"):
        bad.get("x")
    with pytest.raises(comm.DistNetworkError, match="closed"):
        bad.get("x")
    assert store.add("n", 1) == 1
    store.close()


def test_a_port_that_is_taken_and_one_where_nobody_is():
    store = comm.TCPStore("localhost", 0, is_master=True)
    with pytest.raises(comm.DistNetworkError, match="Choose a free one"):
        comm.TCPStore("localhost", store.port, is_master=True)
    port = store.port
    store.close()
    with pytest.raises(comm.DistNetworkError, match="no answer"):
        comm.TCPStore("localhost", port, timeout=QUICK)


@pytest.mark.parametrize("port", [-1, 65536, 99999, "22", 1.5, None])
@pytest.mark.parametrize("master", [False, True])
def test_a_port_that_is_none(port, master):
    with pytest.raises(ValueError, match=f"{port!r} is not a port"):
        comm.TCPStore("localhost", port, is_master=master, timeout=QUICK)
    with pytest.raises(TypeError, match="a host is a name or an address as text, found 5"):
        comm.TCPStore(5, 0, is_master=master, timeout=QUICK)
    with pytest.raises(comm.DistNetworkError, match="is unknown" if master else "label too long"):
        comm.TCPStore("a" * 300, 0, is_master=master, timeout=QUICK)


def test_the_default_store_times_out_too(tmp_path):
    comm.init_process_group("null", f"file://{tmp_path}/s", QUICK, 1, 0)
    with pytest.raises(RuntimeError, match="Timeout"):
        comm.default_store().get("nonexistent key")
    comm.destroy_process_group()
