"""The wire protocol between a `TCPStore` and its server.

A client begins with `HELLO`; all that follows are frames. A frame is its length (4 bytes, little endian), then
fields, each with its length (4 bytes). A request's fields are the command, the key, the values; an answer's are
``ok`` or ``error`` and a value.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import time
from typing import Any

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


def _timeout(end: float) -> float:
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

    @classmethod
    def to(cls, address: tuple[str, int], end: float, slack: float) -> Connection:
        """Connects, until ``end``."""
        return cls(socket.create_connection(address, _timeout(end)), slack)

    def _call(self, end: float, method: str, *args: Any) -> Any:
        """A method of the socket, until ``end``, which may be further away than a socket's time-out can be."""
        while True:
            self.socket.settimeout(_timeout(end))
            try:
                return getattr(self.socket, method)(*args)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise

    def some(self, most: int, end: float, flags: int = 0) -> bytes:
        """What has arrived, at least a byte.

        Raises:
            OSError: nothing has come until ``end``, or the other side has closed the connection.
        """
        data: bytes = self._call(end, "recv", most, flags)
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
