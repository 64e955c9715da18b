"""The server of a `TCPStore`: a table, and its clients, in one thread that never waits for one of them."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from wholestep.comm.frames import MAX_FRAME, pack, proof, unpack
from wholestep.comm.store import COMMANDS, Table

MAX_GREETING = 128  # before the secret is proven, nobody may make us keep more
GREETING_SECONDS = 10.0


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


class Server:
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
            fields = unpack(bytes(client.received[4 : 4 + length]))
            del client.received[: 4 + length]
            self._request(client, fields) if client.known else self._greet(client, fields)

    def _greet(self, client: _Client, fields: list[bytes]) -> None:
        shown, nonce = fields
        if not hmac.compare_digest(shown, proof(self._secret, b"client", client.nonce)):
            raise ValueError("wrong secret")
        client.known = True
        self._send(client, b"ok", proof(self._secret, b"server", nonce))

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
        client.to_send += pack(*fields)
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
