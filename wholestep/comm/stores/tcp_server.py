"""The server of a `TCPStore`: a `HashStore`, and a thread for each connection.

Whatever a client sends, or leaves out, ends at worst its own connection. Of unauthenticated connections, whose clients
have not proven the secret, there are few at a time, for seconds, and little is kept.

The wire protocol: a client begins with `HELLO`; all that follows are frames. A frame is its length (4 bytes, little
endian), then fields, each with its length (4 bytes). A request's fields are the command, the key, the values; an
answer's are ``ok`` or ``error`` and a value.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import resource
import secrets
import socket
import struct
import threading
import time
from typing import Any

from wholestep.comm.stores.store import COMMANDS, HashStore

MAX_FRAME = 64 << 20
HELLO = b"\0wholestep store 2\n"


def pack(*fields: bytes) -> bytes:
    """A frame."""
    body = b"".join(struct.pack("<I", len(part)) + part for part in fields)
    return struct.pack("<I", len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """The fields of a frame's body.

    Raises:
        ValueError, struct.error: it is none.
    """
    fields, at = [], 0
    while at < len(body):
        (length,) = struct.unpack_from("<I", body, at)
        if at + 4 + length > len(body):
            raise ValueError("a field runs past its frame")
        fields.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    return fields


def proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    """That a side, ``client`` or ``server``, knows the secret; ``nonce`` is the other side's."""
    return hmac.new(secret.encode(), b"wholestep store 2 " + side + nonce, hashlib.sha256).digest()


def remaining(end: float) -> float:
    """Seconds until ``end`` that a socket takes as a time-out."""
    return max(0.001, min(end - time.monotonic(), 3600.0))


class Connection:
    """A socket that carries frames.

    Args:
        slack: seconds beyond its time that a peer may take for the rest of what it has begun to send or to read.
    """

    def __init__(self, connected: socket.socket, slack: float = 0.0) -> None:
        self.socket, self._slack = connected, slack
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _call(self, end: float, method: str, *args: Any) -> Any:
        """A method of the socket, until ``end``, which may be further away than a socket's time-out can be."""
        while True:
            self.socket.settimeout(remaining(end))
            try:
                return getattr(self.socket, method)(*args)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise

    def some(self, most: int, end: float) -> bytes:
        """What has arrived, at least a byte.

        Raises:
            OSError: nothing has come until ``end``, or the other side has closed the connection.
        """
        data: bytes = self._call(end, "recv", most)
        if not data:
            raise OSError("the connection was closed")
        return data

    def send(self, data: bytes, end: float) -> None:
        """Sends all of it."""
        left = memoryview(data)
        while left:
            left = left[self._call(end, "send", left) :]
            end = max(end, time.monotonic() + self._slack)

    def receive(self, end: float, most: int = MAX_FRAME) -> list[bytes]:
        """The fields of the next frame.

        Raises:
            ValueError, struct.error: it is none, or longer than ``most`` bytes.
        """
        (length,) = struct.unpack("<I", self._exactly(4, end))
        if length > most:
            raise ValueError(f"a frame of {length} bytes is too long: not a store?")
        return unpack(self._exactly(length, end))

    def _exactly(self, count: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            data += self.some(min(count - len(data), 1 << 20), end)
            end = max(end, time.monotonic() + self._slack)
        return bytes(data)

    def is_closed(self) -> bool:
        """True when the other side has closed the connection; what it has sent stays."""
        self.socket.settimeout(0)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False

    def shutdown(self) -> None:
        """Ends what other threads wait for on it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


MAX_GREETING = 128  # bytes of a frame from an unauthenticated connection
GREETING_SECONDS = 10.0  # until a connection must be authenticated
# Unauthenticated connections at a time, and at most a quarter of the process's descriptors: the oldest gives way.
MAX_UNAUTHENTICATED = 256
PAUSE = 0.5  # seconds without new connections, when there is no descriptor or thread for one
POLL = 1.0  # seconds after which a client that waits for keys is looked at: it may have gone


class Server:
    """The keys, and the connections of the clients.

    Attributes:
        connections: those that are open, oldest first, and whether each is authenticated.
    """

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret, self._keys = listener, secret, HashStore()
        self.connections: dict[Connection, bool] = {}
        self._lock = threading.Lock()
        self._most = max(1, min(MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._running = True
        self._thread = threading.Thread(target=self._accept_all, name="wholestep-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        with contextlib.suppress(OSError):  # it has ended already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        for connection in list(self.connections):
            self._drop(connection)

    def forget(self) -> None:
        """In a forked child: closes its copies of the descriptors, so that clients notice when the parent ends."""
        for connection in self.connections:
            connection.close()
        self._listener.close()

    def _accept_all(self) -> None:
        with self._listener:
            while self._running:
                self._drop_unauthenticated(self._most)
                try:
                    self._accept()
                except ConnectionError:  # it has gone already
                    pass
                except (OSError, RuntimeError):  # no descriptor, memory or thread; others wait in the listener's queue
                    self._drop_unauthenticated(1)
                    time.sleep(PAUSE if self._running else 0)

    def _accept(self) -> None:
        connection = Connection(self._listener.accept()[0])
        self.connections[connection] = False
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._drop(connection)
            connection.close()
            raise

    def _drop_unauthenticated(self, many: int) -> None:
        """Ends the oldest unauthenticated connection, where there are so ``many``."""
        with self._lock:  # none that is authenticated in between
            unauthenticated = [one for one, known in list(self.connections.items()) if not known]
            if len(unauthenticated) >= many:
                self._drop(unauthenticated[0])

    def _drop(self, connection: Connection) -> None:
        """Ends a connection; its thread closes it."""
        self.connections.pop(connection, None)
        connection.shutdown()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(Exception):  # no client may end the server
            self._authenticate(connection, time.monotonic() + GREETING_SECONDS)
            while True:
                command, key, *values = connection.receive(math.inf)
                answer = pack(*self._answer(connection, command.decode(), key.decode(), values))
                connection.send(answer, math.inf)
        self._drop(connection)
        connection.close()

    def _authenticate(self, connection: Connection, end: float) -> None:
        greeting, nonce = b"", secrets.token_bytes(32)
        while greeting != HELLO:
            greeting += connection.some(len(HELLO) - len(greeting), end)
            if not HELLO.startswith(greeting):
                raise ValueError("not a client of this store")
        connection.send(pack(nonce), end)
        shown, other = connection.receive(end, MAX_GREETING)
        if not hmac.compare_digest(shown, proof(self._secret, b"client", nonce)):
            connection.send(pack(b"error", b"wrong secret"), end)
            raise ValueError("wrong secret")
        with self._lock:
            if connection not in self.connections:
                raise OSError("the connection gave way to others")
            self.connections[connection] = True
        connection.send(pack(b"ok", proof(self._secret, b"server", other)), end)

    def _answer(self, connection: Connection, command: str, key: str, values: list[bytes]) -> list[bytes]:
        """The fields of the answer to a request."""
        if command == "get":
            return self._get(connection, [name.decode() for name in values[1:]], float(values[0]))
        if command not in COMMANDS:
            raise ValueError(f"unknown command {command!r}")
        try:
            return [b"ok", self._keys._apply(command, key, *values)]
        except (ValueError, TypeError) as failure:
            return [b"error", str(failure).encode()]

    def _get(self, connection: Connection, names: list[str], limit: float) -> list[bytes]:
        """Values when all keys are there within ``limit`` seconds."""
        end = time.monotonic() + limit
        while (found := self._keys._get(names, min(POLL, end - time.monotonic()))) is None:
            if not time.monotonic() < end:  # nor is any time before one that is no number
                return [b"late"]
            if connection.is_closed():
                raise OSError("closed by the client")
        size = sum(4 + len(value) for value in found)
        if size > MAX_FRAME - 100:
            return [b"error", b"store: %d bytes in one answer, at most %d are allowed" % (size, MAX_FRAME)]
        return [b"ok", *found]
