"""The server of a `TCPStore`: a table, and its clients, in one thread that never waits for one of them.

Whatever a client sends, or leaves out, ends at worst its own connection. Of clients that have not proven the secret
there are few at a time, for seconds, and little is kept.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wholestep.comm.stores.store import COMMANDS, WRITES, Table
from wholestep.comm.stores.wire_protocol import HELLO, MAX_FRAME, pack, proof, unpack

MAX_GREETING = 128  # bytes that are kept of a client that has not proven the secret
GREETING_SECONDS = 10.0  # that it has for that
MAX_STRANGERS = 256  # such clients at a time, and at most a quarter of the process's descriptors: the oldest gives way
PAUSE = 0.5  # seconds without new clients, when there is no descriptor for one


@dataclass
class _Client:
    """One connection, as the server sees it."""

    socket: socket.socket
    nonce: bytes
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    greeted: bool = False
    known: bool = False
    since: float = field(default_factory=time.monotonic)
    wants: list[str] | None = None
    until: float = 0.0


class Server:
    """The table and its clients, in one thread."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret, self._table = listener, secret, Table()
        self._clients: dict[socket.socket, _Client] = {}
        self._most = max(1, min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._deaf_until: float | None = None
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
        with contextlib.suppress(OSError):  # it has ended already
            self._wake_in.send(b"x")
        self._thread.join(5)

    def forget(self) -> None:
        """In a forked child: closes its copies of the descriptors, so that clients notice when the parent ends."""
        for one in (*self._clients, self._listener, self._wake_out, self._wake_in):
            one.close()
        self._selector.close()

    def _serve(self) -> None:
        try:
            while self._running:
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wake_out:
                        self._guarded(key.data, self._serve_client, events)
                self._expire()
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self.forget()

    def _patience(self) -> float:
        ends = [c.until for c in self._clients.values() if c.wants is not None]
        ends += [c.since + GREETING_SECONDS for c in self._clients.values() if not c.known]
        ends += [self._deaf_until] if self._deaf_until is not None else []
        return min(60.0, max(0.0, min(ends, default=math.inf) - time.monotonic()))

    def _accept(self) -> None:
        strangers = [client for client in self._clients.values() if not client.known]
        if len(strangers) >= self._most:
            self._drop(strangers[0])
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor, or no memory; the connection stays in the queue
            if strangers:
                self._drop(strangers[0])
            else:
                self._selector.unregister(self._listener)
                self._deaf_until = time.monotonic() + PAUSE
            return
        connection.setblocking(False)
        client = self._clients[connection] = _Client(connection, secrets.token_bytes(32))
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()

    def _guarded(self, client: _Client, step: Callable[..., None], *args: object) -> None:
        """Does something for a client; whatever goes wrong costs its connection alone."""
        try:
            step(client, *args)
        except Exception:  # noqa: BLE001 - no client may end the server
            self._drop(client)

    def _serve_client(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if events & selectors.EVENT_READ:
            self._read(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise OSError("closed by the client")
        client.received += data
        if not client.greeted:
            if not HELLO.startswith(client.received[: len(HELLO)]):
                raise ValueError("not a client of this store")
            if len(client.received) < len(HELLO):
                return
            client.greeted = True
            del client.received[: len(HELLO)]
            self._send(client, client.nonce)
        while len(client.received) >= 4:
            (length,) = struct.unpack_from("<I", client.received)
            if length > (MAX_FRAME if client.known else MAX_GREETING):
                raise ValueError(f"frame of {length} bytes")
            if len(client.received) < 4 + length:
                return
            fields = unpack(bytes(client.received[4 : 4 + length]))
            del client.received[: 4 + length]
            self._request(client, fields) if client.known else self._greet(client, fields)

    def _greet(self, client: _Client, fields: list[bytes]) -> None:
        shown, nonce = fields
        if not hmac.compare_digest(shown, proof(self._secret, b"client", client.nonce)):
            self._send(client, b"error", b"wrong secret")
            raise ValueError("wrong secret")
        client.known = True
        self._send(client, b"ok", proof(self._secret, b"server", nonce))

    def _request(self, client: _Client, fields: list[bytes]) -> None:
        command, key, values = fields[0].decode(), fields[1].decode(), fields[2:]
        if client.wants is not None:
            raise ValueError("a request before the answer to the last one")
        if command == "get":
            wants, limit = [name.decode() for name in values[1:]], float(values[0])
            if math.isnan(limit):
                raise ValueError("not a time")
            client.wants, client.until = wants, time.monotonic() + limit
            self._answer(client)
            return
        if command not in COMMANDS:
            raise ValueError(f"unknown command {command!r}")
        try:
            found = getattr(self._table, command)(key, *values)
        except (ValueError, TypeError) as failure:
            self._send(client, b"error", str(failure).encode())
            return
        self._send(client, b"ok", found)
        if command in WRITES:
            for other in [other for other in self._clients.values() if other.wants is not None]:
                self._guarded(other, self._answer)

    def _answer(self, client: _Client) -> None:
        data, keys = self._table.data, client.wants or []
        if not all(key in data for key in keys):
            return
        client.wants, size = None, sum(4 + len(data[key]) for key in keys)
        if size > MAX_FRAME - 100:
            self._send(client, b"error", b"store: %d bytes in one answer, at most %d are allowed" % (size, MAX_FRAME))
        else:
            self._send(client, b"ok", *(data[key] for key in keys))

    def _expire(self) -> None:
        moment = time.monotonic()
        for client in list(self._clients.values()):
            if client.wants is not None and moment >= client.until:
                client.wants = None
                self._guarded(client, self._send, b"late")
            elif not client.known and moment >= client.since + GREETING_SECONDS:
                self._drop(client)
        if self._deaf_until is not None and moment >= self._deaf_until:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _send(self, client: _Client, *fields: bytes) -> None:
        client.to_send += pack(*fields)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        """Sends what the socket takes now; a slow reader never holds up the others."""
        with contextlib.suppress(BlockingIOError):
            while client.to_send:
                del client.to_send[: client.socket.send(client.to_send)]
        if len(client.to_send) > 4 * MAX_FRAME:
            raise OSError("the client does not read")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        self._selector.modify(client.socket, events, client)
