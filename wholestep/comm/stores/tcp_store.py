"""`TCPStore`: a table in the master's process, served to many clients over TCP.

Every connection begins with a mutual challenge: each side proves that it knows the group's secret by an HMAC of
the other's nonce, so that the secret itself never travels. Frames are bounded; `tcp_server.py` has them
and the server.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from datetime import timedelta

from wholestep.comm.stores.store import DEFAULT_STORE_TIMEOUT, Store
from wholestep.comm.stores.tcp_server import HELLO, MAX_FRAME, MAX_GREETING, Connection, Server, pack, proof, remaining
from wholestep.errors import DistNetworkError

SECRET_VARIABLE = "WHOLESTEP_SECRET"
SLACK = 5.0  # seconds that the server's answer may take beyond what it was asked to wait
CLOSINGS = 5.0  # seconds for which a connection that is closed at once is made again: the server may lack descriptors
SILENCE = 60.0  # seconds that whoever listens has to greet
ANOTHER = "is it the port of another program, or of torch.distributed's own process group? Choose a free one (0: any)"

_open: weakref.WeakSet[TCPStore] = weakref.WeakSet()


def _forked() -> None:
    """In a child: connections are the parent's, whose answers both would read; the child makes its own at need."""
    for store in _open:
        store._lock = threading.Lock()
        store._hang_up(again=store._connection is not None)
        if store._server is not None:
            store._server.forget()
            store._server = None


os.register_at_fork(after_in_child=_forked)


def is_loopback(host: str) -> bool:
    """True when every address of the host is on the loopback interface."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as failure:
        raise DistNetworkError(f"host {host!r} is unknown: {failure}") from failure
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


class TCPStore(Store):
    """A store over TCP.

    Args:
        host_name, port: the master's address; port 0 lets the system choose (`port` tells).
        world_size: users of the store, the master among them; None when that is not fixed.
        is_master: serve the table from this process. It listens on ``host_name``'s own address alone.
        timeout: for connecting, and for keys to appear.
        wait_for_workers: the master returns when ``world_size`` users have connected.
        secret: what the users share; taken from WHOLESTEP_SECRET when not given.

    Raises:
        DistNetworkError: the port is taken, nobody answers, or the other side does not know the secret.
        ValueError: not a port, or the master would listen beyond loopback without a secret.
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
        if not hasattr(port, "__index__") or not 0 <= port <= 65535:
            raise ValueError(f"TCPStore: {port!r} is not a port: 0 to 65535 is required")
        if not isinstance(host_name, str):
            raise TypeError(f"TCPStore: a host is a name or an address as text, found {host_name!r}")
        self.host, self.port = host_name, port
        self._secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE, "")
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._again = False  # the connection ended without a fault of the server's
        _open.add(self)
        if is_master:
            self._listen()
        try:
            self._connect()
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
        except OSError as failure:
            remedy = ANOTHER
            if failure.errno == errno.EADDRNOTAVAIL:
                remedy = f"{self.host} is no address of this host: start rank 0 where it is"
            raise DistNetworkError(
                f"TCPStore: cannot listen on {self.host}:{self.port}: {failure}; {remedy}"
            ) from failure
        self.port = listener.getsockname()[1]
        self._server = Server(listener, self._secret)
        weakref.finalize(self, self._server.close).atexit = False

    def _connect(self) -> None:
        """Connects, trying again while the master may not be up yet, and proves both sides' secret."""
        end, reached, pause = time.monotonic() + self._timeout.total_seconds(), 0.0, 0.01
        while True:
            try:
                self._connection = Connection(socket.create_connection((self.host, self.port), remaining(end)), SLACK)
            except (OSError, UnicodeError) as failure:
                if time.monotonic() >= end:
                    raise DistNetworkError(
                        f"TCPStore: no answer from {self.host}:{self.port} within {self._timeout}: {failure}; "
                        "has rank 0, which serves the store there, been started?"
                    ) from failure
            else:
                reached = reached or time.monotonic()
                try:
                    self._authenticate(self._connection, end)
                    return
                except OSError as failure:
                    if time.monotonic() >= min(end, reached + CLOSINGS):
                        raise self._foreign(f"it listens, but does not greet: {failure}") from failure
                except (ValueError, struct.error) as failure:
                    raise self._foreign(f"it does not answer as a store: {failure}") from failure
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _foreign(self, what: str) -> DistNetworkError:
        return DistNetworkError(f"TCPStore: {self.host}:{self.port} refused this rank: {what}; {ANOTHER}")

    def _authenticate(self, connection: Connection, end: float) -> None:
        connection.send(HELLO, end)
        begun = min(end, time.monotonic() + SILENCE)
        (nonce,), mine = connection.receive(begun, MAX_GREETING), secrets.token_bytes(32)
        connection.send(pack(proof(self._secret, b"client", nonce), mine), end)
        answer = connection.receive(end, MAX_GREETING)
        if answer[0] == b"error":
            raise DistNetworkError(
                f"TCPStore: {self.host}:{self.port} refused this rank: {answer[1].decode()}; "
                f"is {SECRET_VARIABLE} the same on all ranks?"
            )
        if len(answer) != 2 or not hmac.compare_digest(answer[1], proof(self._secret, b"server", mine)):
            raise DistNetworkError(
                f"TCPStore: {self.host}:{self.port} does not know the secret: another program's port?"
            )

    def _gather(self, world_size: int) -> None:
        if self.add("store/users", 1) >= world_size:
            self.set("store/complete", "1")
        if self._server is not None:
            self.wait(["store/complete"])

    def _hang_up(self, again: bool = False) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._again = None, again

    def _call(self, limit: float, *fields: bytes) -> list[bytes]:
        """One request and its answer. A connection that fails, or is left, in between is closed: its next answer would
        be taken for that to another request."""
        request = pack(*fields)
        if len(request) > MAX_FRAME:
            raise ValueError(f"TCPStore: {len(request):,} bytes in one request, at most {MAX_FRAME:,} are allowed")
        with self._lock:
            if self._connection is None and self._again:
                self._connect()
            if self._connection is None:
                raise DistNetworkError(f"TCPStore: the connection to {self.host}:{self.port} is closed")
            end = time.monotonic() + limit + SLACK
            try:
                self._connection.send(request, end)
                answer = self._connection.receive(end)
            except (OSError, ValueError, struct.error) as failure:
                self._hang_up()
                raise DistNetworkError(
                    f"TCPStore: lost {self.host}:{self.port}: {failure}; has the process of rank 0, which serves the "
                    "store there, ended or been stopped?"
                ) from failure
            except BaseException:  # an interrupt
                self._hang_up(again=True)
                raise
        if answer[0] == b"error":
            raise ValueError(answer[1].decode())
        return answer

    def _apply(self, command: str, key: str, *values: bytes) -> bytes:
        return self._call(self._timeout.total_seconds(), command.encode(), key.encode(), *values)[1]

    def _get(self, keys: list[str], limit: float) -> list[bytes] | None:
        answer = self._call(limit, b"get", b"", repr(limit).encode(), *(key.encode() for key in keys))
        return None if answer[0] == b"late" else answer[1:]

    def local_address(self) -> str:
        with self._lock:
            return str(self._connection.socket.getsockname()[0]) if self._connection is not None else ""

    def close(self) -> None:
        if (connection := self._connection) is not None:
            connection.shutdown()  # another thread may wait on it
        with self._lock:
            self._hang_up()
        if self._server is not None:
            self._server.close()
            self._server = None
