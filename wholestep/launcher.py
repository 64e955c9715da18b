"""Starts the ranks of a job on this host, with the environment variables that torchrun sets.

The ranks live and die together: when one fails, or the launcher is stopped, the others are stopped too.
May import: nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO

PR_SET_PDEATHSIG = 1  # prctl(2): the signal a process gets when the one that started it dies
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STREAMS = ("stdout", "stderr")
STOPPED = 128 + signal.SIGTERM  # how a rank ends that has saved and stopped because it was told to
SECRET_VARIABLE = "WHOLESTEP_SECRET"  # read by the store that the ranks meet over, comm/stores/tcp_store.py


@dataclass(frozen=True)
class World:
    """How many ranks a job has and where they meet.

    Args:
        ranks: ranks on this host.
        nodes: hosts of the job, each with as many ranks.
        node: which of them this is, from 0.
        address: host of rank 0, seen from all others.
        port: a TCP port of that host; 0 picks a free one, which only one host can do.

    Raises:
        ValueError: numbers that make no world, or several hosts without a secret.
    """

    ranks: int
    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1:
            raise ValueError(f"a job has at least one rank on one host: found {self.ranks} on {self.nodes}")
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"host {self.node} is not one of 0..{self.nodes - 1}")
        if self.nodes > 1 and self.port == 0:
            raise ValueError("with several hosts give the port that all of them know")
        if self.nodes > 1 and not os.environ.get(SECRET_VARIABLE):
            raise ValueError(
                f"with several hosts the ranks need a secret that all know: set {SECRET_VARIABLE} alike on each host, "
                "to the output of `openssl rand -hex 32`, say"
            )

    def environment(self, local_rank: int, port: int, secret: str) -> dict[str, str]:
        """The variables of one rank, under torchrun's names, and the secret that its store asks for."""
        return {
            SECRET_VARIABLE: secret,
            "RANK": str(self.node * self.ranks + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node),
            "WORLD_SIZE": str(self.nodes * self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
        }


def free_port() -> int:
    """A TCP port of the loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]


# a rank and its exit code, or None and the signal that ends the job, negative
_Events = queue.SimpleQueue[tuple[_Rank | None, int]]


def launch(
    command: Sequence[str], world: World, grace: float = 5.0, max_restarts: int = 0, min_ranks: int | None = None
) -> int:
    """Runs a command once per rank and waits for all; anew after a failure, if it may. On the main thread.

    A rank that ends with status 143, as after a SIGTERM that it has heeded, is no failure.

    Each line that a rank prints appears at once, headed by ``[rank N]``; standard input is empty.

    Args:
        command: program and arguments.
        world: the ranks.
        grace: seconds that a rank has between SIGTERM and SIGKILL.
        max_restarts: how often all ranks are started anew after a failure.
        min_ranks: each time there is a rank less, but at least so many; None for always all.

    Returns:
        0 when every rank ended with 0, else the exit code of the first that did not (128 + n for signal n).
    """
    for attempt in range(max_restarts + 1):
        counts = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(max_restarts)}
        code, failed = _once(command, world, grace, counts)
        if not failed or attempt == max_restarts:
            break
        if min_ranks is not None:
            world = replace(world, ranks=max(min_ranks, world.ranks - 1))
        _say(f"starting {world.ranks} ranks again, restart {attempt + 1} of {max_restarts}")
    return code


def _once(command: Sequence[str], world: World, grace: float, variables: dict[str, str]) -> tuple[int, bool]:
    """Runs a command once per rank; gives the exit code, and whether that is a failure of the job's own."""
    events: _Events = queue.SimpleQueue()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, lambda found, _frame: events.put((None, -found)))
    ranks = _start(command, world, variables)
    streams = [(rank, name, events) for rank in ranks for name in STREAMS]
    threads = [threading.Thread(target=_relay, args=stream, daemon=True) for stream in streams]
    threads += [threading.Thread(target=lambda r=rank: events.put((r, r.process.wait()))) for rank in ranks]
    try:
        for thread in threads:
            thread.start()
        return _watch(ranks, events)
    finally:
        _stop(ranks, grace)
        for thread in threads:
            thread.join(grace)  # something that a rank left behind may hold a pipe: no reason to wait for ever
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], world: World, variables: dict[str, str]) -> list[_Rank]:
    port, secret = world.port or free_port(), os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
    # all cores shared out; a script that prints should be seen when it does
    usual = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world.ranks)), "PYTHONUNBUFFERED": "1"}
    ranks: list[_Rank] = []
    try:
        for local_rank in range(world.ranks):
            process = subprocess.Popen(
                command,
                env=usual | os.environ | variables | world.environment(local_rank, port, secret),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that what a rank starts is stopped with it
                preexec_fn=_die_with_launcher(os.getpid()),
            )
            ranks.append(_Rank(world.node * world.ranks + local_rank, process))
    except BaseException:
        _stop(ranks, grace=0.0)
        raise
    return ranks


def _die_with_launcher(launcher: int) -> Callable[[], None]:
    """For a new process: the kernel is to send SIGKILL when the launcher dies, in whatever way."""
    libc = ctypes.CDLL(None)  # loaded before the fork: loading takes locks

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _relay(rank: _Rank, name: str, events: _Events) -> None:
    """Copies a stream of a rank to the launcher's own of that name, line by line; if nobody reads it, the job ends."""
    source: IO[bytes] = getattr(rank.process, name)
    target: IO[bytes] = getattr(sys, name).buffer
    head = f"[rank {rank.number}] ".encode()
    try:
        for line in source:
            target.write(head + line.rstrip(b"\r\n") + b"\n")  # one write: lines of two ranks do not mix
            target.flush()
    except BrokenPipeError:
        events.put((None, -signal.SIGPIPE))


def _watch(ranks: list[_Rank], events: _Events) -> tuple[int, bool]:
    """Waits until all ranks ended well, or for the first thing that ends the job."""
    running = len(ranks)
    while running:
        try:
            rank, code = events.get(timeout=0.2)  # a signal that comes right before it waits wakes nobody
        except queue.Empty:
            continue
        if rank is None:
            _say(f"stopped by {signal.Signals(-code).name}")
            return 128 - code, False
        running -= 1
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            others = f"; stopping the {running} that still ran" if running else ""
            _say(f"rank {rank.number} (process {rank.process.pid}) {how}{others}")
            return 128 - code if code < 0 else code, code != STOPPED
    return 0, False


def _stop(ranks: list[_Rank], grace: float) -> None:
    """Ends every rank and what it started: SIGTERM, then SIGKILL."""
    for rank in ranks:
        if rank.process.poll() is None:
            _signal_session(rank, signal.SIGTERM)
    deadline = time.monotonic() + grace
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _say(f"rank {rank.number} did not end within {grace:.0f} s of SIGTERM: killing it")
        _signal_session(rank, signal.SIGKILL)
        rank.process.wait()


def _signal_session(rank: _Rank, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended already
        os.killpg(rank.process.pid, number)


def _say(what: str) -> None:
    print(f"wholestep run: {what}", file=sys.stderr, flush=True)
