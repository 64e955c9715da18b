"""`TCPStore`: a table in the master's process, served to many clients over TCP.

Every connection begins with a mutual challenge: each side proves that it knows the group's secret by an HMAC of
the other's nonce, so that the secret itself never travels. Frames (`frames.py`) are bounded; `store_server.py` has the
server.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta

from wholestep.comm.errors import DistNetworkError, DistStoreError
from wholestep.comm.frames import MAX_FRAME, pack, proof, unpack
from wholestep.comm.store import DEFAULT_STORE_TIMEOUT, Store
from wholestep.comm.store_server import Server

SECRET_VARIABLE = "WHOLESTEP_SECRET"


def is_loopback(host: str) -> bool:
    """True when every address of the host is on the loopback interface."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as failure:
        raise DistNetworkError(f"host {host!r} is unknown: {failure}") from failure
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


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
        self._server: Server | None = None
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
        self._server = Server(listener, self._secret)

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
            connection.sendall(pack(proof(self._secret, b"client", nonce), mine))
            answer = self._receive()
        except (OSError, ValueError, struct.error) as failure:
            raise DistNetworkError(
                f"TCPStore: {self.host}:{self.port} refused this rank: {failure}; "
                f"is {SECRET_VARIABLE} the same on all ranks?"
            ) from failure
        if len(answer) != 2 or not hmac.compare_digest(answer[1], proof(self._secret, b"server", mine)):
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
        return unpack(self._exactly(length))

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
        request = pack(*fields)
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
