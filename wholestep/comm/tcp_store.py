"""`TCPStore`: a table in the master's process, served to many clients over TCP.

Every connection begins with a mutual challenge: each side proves that it knows the group's secret by an HMAC of
the other's nonce, so that the secret itself never travels. Frames are bounded, and one selector thread serves all
clients without ever waiting for one of them.

Frame: length (4 bytes, little endian), then fields, each with its length (4 bytes). A request's fields are the
command, the key, the values; an answer's are ``ok`` or ``error`` and a value.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from wholestep.comm.errors import DistNetworkError, DistStoreError
from wholestep.comm.store import COMMANDS, DEFAULT_STORE_TIMEOUT, Store, Table

MAX_FRAME = 64 << 20
MAX_GREETING = 128  # before the secret is proven, nobody may make us keep more
GREETING_SECONDS = 10.0
SECRET_VARIABLE = "WHOLESTEP_SECRET"


def _pack(*fields: bytes) -> bytes:
    body = b"".join(struct.pack("<I", len(part)) + part for part in fields)
    return struct.pack("<I", len(body)) + body


def _unpack(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        (length,) = struct.unpack_from("<I", body, at)
        if at + 4 + length > len(body):
            raise ValueError("a field runs past its frame")
        fields.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    return fields


def _proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), b"wholestep store 1 " + side + nonce, hashlib.sha256).digest()


def is_loopback(host: str) -> bool:
    """True when every address of the host is on the loopback interface."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as failure:
        raise DistNetworkError(f"host {host!r} is unknown: {failure}") from failure
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


@dataclass
class _Client:
    """One connection, as the server sees it."""

    socket: socket.socket
    nonce: bytes
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    known: bool = False
    since: float = field(default_factory=time.monotonic)
    wants: list[str] | None = None
    until: float = 0.0


class _Server:
    """The table and its clients, in one thread."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret, self._table = listener, secret, Table()
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="wholestep-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        self._wake_in.send(b"x")
        self._thread.join(5)

    def _serve(self) -> None:
        while self._running:
            for key, events in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._wake_out:
                    self._guarded(key.data, events)
            self._expire()
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        self._selector.close()
        self._wake_out.close()
        self._wake_in.close()

    def _patience(self) -> float:
        ends = [c.until for c in self._clients.values() if c.wants is not None]
        ends += [c.since + GREETING_SECONDS for c in self._clients.values() if not c.known]
        return max(0.0, min(ends, default=time.monotonic() + 60) - time.monotonic())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            client = _Client(connection, secrets.token_bytes(32))
            self._clients[connection] = client
            self._selector.register(connection, selectors.EVENT_READ, client)
            self._send(client, client.nonce)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()

    def _guarded(self, client: _Client, events: int) -> None:
        """Whatever a client sends ends at worst its own connection."""
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                self._read(client)
        except (OSError, ValueError, struct.error):
            self._drop(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise OSError("closed by the client")
        client.received += data
        while len(client.received) >= 4:
            (length,) = struct.unpack_from("<I", client.received)
            if length > (MAX_FRAME if client.known else MAX_GREETING):
                raise ValueError(f"frame of {length} bytes")
            if len(client.received) < 4 + length:
                return
            fields = _unpack(bytes(client.received[4 : 4 + length]))
            del client.received[: 4 + length]
            self._request(client, fields) if client.known else self._greet(client, fields)

    def _greet(self, client: _Client, fields: list[bytes]) -> None:
        proof, nonce = fields
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", client.nonce)):
            raise ValueError("wrong secret")
        client.known = True
        self._send(client, b"ok", _proof(self._secret, b"server", nonce))

    def _request(self, client: _Client, fields: list[bytes]) -> None:
        command, key, values = fields[0].decode(), fields[1].decode(), fields[2:]
        if command == "get":
            client.wants = [name.decode() for name in values[1:]]
            client.until = time.monotonic() + float(values[0])
            self._answer(client)
            return
        if command not in COMMANDS:
            raise ValueError(f"unknown command {command!r}")
        try:
            self._send(client, b"ok", getattr(self._table, command)(key, *values))
        except (ValueError, TypeError) as failure:
            self._send(client, b"error", str(failure).encode())
            return
        for other in list(self._clients.values()):
            if other.wants is not None:
                self._answer(other)

    def _answer(self, client: _Client) -> None:
        keys = client.wants or []
        if all(key in self._table.data for key in keys):
            client.wants = None
            self._send(client, b"ok", *(self._table.data[key] for key in keys))

    def _expire(self) -> None:
        moment = time.monotonic()
        for client in list(self._clients.values()):
            if client.wants is not None and moment >= client.until:
                client.wants = None
                self._send(client, b"late")
            elif not client.known and moment >= client.since + GREETING_SECONDS:
                self._drop(client)

    def _send(self, client: _Client, *fields: bytes) -> None:
        client.to_send += _pack(*fields)
        try:
            self._flush(client)
        except OSError:
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        """Sends what the socket takes now; a slow reader never holds up the others."""
        with contextlib.suppress(BlockingIOError):
            while client.to_send:
                del client.to_send[: client.socket.send(client.to_send)]
        if len(client.to_send) > 4 * MAX_FRAME:
            raise OSError("the client does not read")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        self._selector.modify(client.socket, events, client)


class TCPStore(Store):
    """A store over TCP.

    Args:
        host_name, port: the master's address; port 0 lets the system choose (`port` tells).
        world_size: users of the store, the master among them; None when that is not fixed.
        is_master: serve the table from this process. It listens on ``host_name``'s own address alone.
        timeout: for connecting, and for keys to appear.
        wait_for_workers: return when ``world_size`` users have connected.
        secret: what the users share; taken from WHOLESTEP_SECRET when not given.

    Raises:
        DistNetworkError: the port is taken, nobody answers, or the other side does not know the secret.
        ValueError: the master would listen beyond loopback without a secret.
    """

    def __init__(
        self,
        host_name: str,
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        secret: str | None = None,
    ) -> None:
        super().__init__(timeout)
        self.host, self.port = host_name, port
        self._secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE, "")
        self._server: _Server | None = None
        self._lock, self._socket = threading.Lock(), None
        if is_master:
            self._listen()
        try:
            self._socket = self._connect()
            if wait_for_workers and world_size and world_size > 0:
                self._gather(world_size)
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        if not is_loopback(self.host) and not self._secret:
            raise ValueError(
                f"TCPStore: {self.host} is reachable from other hosts, so a secret is required: set {SECRET_VARIABLE} "
                "alike on every rank (`wholestep run` does), or use localhost"
            )
        try:
            family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except (OSError, OverflowError) as failure:
            raise DistNetworkError(
                f"TCPStore: cannot listen on {self.host}:{self.port}: {failure}; choose a free port (0 for any)"
            ) from failure
        self.port = listener.getsockname()[1]
        self._server = _Server(listener, self._secret)

    def _connect(self) -> socket.socket:
        """Connects, trying again while the master may not be up yet, and proves both sides' secret."""
        end, pause = time.monotonic() + self._timeout.total_seconds(), 0.01
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), max(0.1, end - time.monotonic()))
                break
            except (OSError, OverflowError) as failure:
                if time.monotonic() >= end:
                    raise DistNetworkError(
                        f"TCPStore: no answer from {self.host}:{self.port} within {self._timeout}: {failure}"
                    ) from failure
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        try:
            (nonce,), mine = self._receive(), secrets.token_bytes(32)
            connection.sendall(_pack(_proof(self._secret, b"client", nonce), mine))
            answer = self._receive()
        except (OSError, ValueError, struct.error) as failure:
            raise DistNetworkError(
                f"TCPStore: {self.host}:{self.port} refused this rank: {failure}; "
                f"is {SECRET_VARIABLE} the same on all ranks?"
            ) from failure
        if len(answer) != 2 or not hmac.compare_digest(answer[1], _proof(self._secret, b"server", mine)):
            raise DistNetworkError(
                f"TCPStore: {self.host}:{self.port} does not know the secret: another program's port?"
            )
        return connection

    def _gather(self, world_size: int) -> None:
        if self.add("store/users", 1) >= world_size:
            self.set("store/complete", "1")
        self.wait(["store/complete"])

    def _receive(self) -> list[bytes]:
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes is too long: not a store?")
        return _unpack(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            assert self._socket is not None
            more = self._socket.recv(count - len(data))
            if not more:
                raise OSError("the connection was closed")
            data += more
        return bytes(data)

    def _call(self, patience: float, *fields: bytes) -> list[bytes]:
        """One request and its answer; a connection that fails in between is closed, since its frames are lost."""
        request = _pack(*fields)
        if len(request) > MAX_FRAME:
            raise ValueError(f"TCPStore: {len(request):,} bytes in one request, at most {MAX_FRAME:,} are allowed")
        with self._lock:
            if self._socket is None:
                raise DistNetworkError(f"TCPStore: the connection to {self.host}:{self.port} is closed")
            try:
                self._socket.settimeout(patience + 30)
                self._socket.sendall(request)
                return self._receive()
            except (OSError, ValueError, struct.error) as failure:
                self._socket.close()
                self._socket = None
                raise DistNetworkError(f"TCPStore: lost {self.host}:{self.port}: {failure}") from failure

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        answer = self._call(0, command.encode(), key.encode(), *values)
        if answer[0] == b"error":
            raise ValueError(answer[1].decode())
        return answer[1]

    def _get(self, keys: list[str], limit: float) -> list[bytes] | None:
        answer = self._call(limit, b"get", b"", repr(limit).encode(), *(key.encode() for key in keys))
        return None if answer[0] == b"late" else answer[1:]

    def local_address(self) -> str:
        with self._lock:
            return str(self._socket.getsockname()[0]) if self._socket is not None else ""

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if self._server is not None:
            self._server.close()
            self._server = None


__all__ = ["DistStoreError", "TCPStore", "is_loopback"]
