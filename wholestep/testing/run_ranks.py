"""`run_ranks`: one function in every rank of a small world, with comm initialised."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.api.groups import World, set_thread_world
from wholestep.comm.flight_recorder import FOLDER_VARIABLE

GRACE = 5.0  # seconds the other ranks get to report after one has failed


class RankError(RuntimeError):
    """An error inside a rank whose own type could not be brought to the caller."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    transport: str = "shm",
    args: tuple[Any, ...] = (),
    timeout: float = 120.0,
) -> list[Any]:
    """Runs ``fn(*args)`` in ``world_size`` ranks and returns their results in rank order.

    Args:
        fn: an importable function; results and arguments must pickle.
        world_size: number of ranks.
        transport: "shm" or "gloo": spawned processes; "thread": threads of this process.
        args: arguments, the same for each rank (`comm.get_rank` tells ranks apart).
        timeout: seconds for the whole run; what is still running then is killed.

    Raises:
        Exception: the first failing rank's own exception, with its rank and traceback as a note.
        RankError: a rank died, ran past the time-out, or its exception does not pickle.
    """
    if transport == "thread":
        return _run_threads(fn, world_size, args, timeout)
    return _run_processes(fn, world_size, transport, args, timeout)


def _run_threads(fn: Callable[..., Any], size: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
    store = comm.HashStore()
    replies: dict[int, tuple[bool, Any, str]] = {}

    def body(rank: int) -> None:
        set_thread_world(World())
        try:
            comm.init_process_group("thread", None, timedelta(seconds=timeout), size, rank, store)
            replies[rank] = (True, fn(*args), "")
        except BaseException as failure:  # noqa: BLE001 - whatever ended the rank goes to the caller
            replies[rank] = (False, failure, traceback.format_exc())
        finally:
            if comm.is_initialized():
                comm.destroy_process_group()
            set_thread_world(None)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return _results(replies, [None] * size, timeout)


def _context() -> Any:
    """Processes forked from a server that has imported torch: 20 ms each, where a fresh interpreter takes 2 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wholestep.comm", "wholestep.testing.preload"])
    return context


def _run_processes(
    fn: Callable[..., Any], size: int, transport: str, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    context = _context()
    work = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="wholestep-") as folder:
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(there, rank, size, transport, f"file://{folder}/store", work), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            replies = _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return _results(replies, processes, timeout)


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> dict[int, tuple[bool, Any, str]]:
    """Replies by rank; ranks that died or ran out of time have none."""
    replies: dict[int, tuple[bool, Any, str]] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    end = time.monotonic() + timeout
    while open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in [pipe for pipe in wait(list(open_pipes), left) if isinstance(pipe, Connection)]:
            rank = open_pipes.pop(pipe)
            with contextlib.suppress(EOFError, ConnectionResetError):
                replies[rank] = pickle.loads(pipe.recv_bytes())
            if rank not in replies or not replies[rank][0]:
                end = min(end, time.monotonic() + GRACE)
    return replies


def _results(replies: dict[int, tuple[bool, Any, str]], processes: list[Any], timeout: float) -> list[Any]:
    """Results by rank, or the likeliest cause: an error of the program, a death, and only then a lost connection."""
    failed = [(rank, value, where) for rank, (good, value, where) in replies.items() if not good]
    silent = [rank for rank in range(len(processes)) if rank not in replies]
    own = [entry for entry in failed if not isinstance(entry[1], comm.DistError)]
    for rank, value, where in own or ([] if silent else failed):
        value.add_note(f"in rank {rank} of {len(processes)}:\n{where}")
        raise value
    codes = [getattr(process, "exitcode", -9) for process in processes]
    for rank in sorted(silent, key=lambda rank: codes[rank] == -9):
        code = codes[rank]
        how = "did not finish and was killed" if code == -9 else f"ended with exit code {code}"
        raise RankError(f"rank {rank} of {len(processes)} {how} and sent no result (time-out {timeout:g} s)")
    return [replies[rank][1] for rank in range(len(processes))]


def _rank_main(pipe: Connection, rank: int, size: int, transport: str, address: str, work: bytes) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault(FOLDER_VARIABLE, os.path.dirname(address.removeprefix("file://")))
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_caller, name="end with caller", daemon=True).start()
    try:
        comm.init_process_group(transport, address, timedelta(seconds=60), size, rank)
        fn, args = pickle.loads(work)
        reply = _reply(True, fn(*args), "")
        if comm.is_initialized():
            comm.barrier()
            comm.destroy_process_group()
    except BaseException as failure:  # noqa: BLE001 - whatever ended the rank goes to the caller
        reply = _reply(False, failure, traceback.format_exc())
    with contextlib.suppress(OSError):
        pipe.send_bytes(reply)
    pipe.close()


def _end_with_caller() -> None:
    """Ends this rank when the process that waits for its result is gone, killed perhaps; others would compute on."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)


def _reply(good: bool, value: Any, where: str) -> bytes:
    try:
        packed = pickle.dumps((good, value, where))
        pickle.loads(packed)  # an exception with arguments of its own may only fail here
        return packed
    except Exception as failure:  # noqa: BLE001 - pickling runs the class's own code
        kind = "result" if good else type(value).__name__
        return pickle.dumps((False, RankError(f"{kind} does not pickle ({failure}): {value!r}"), where))
