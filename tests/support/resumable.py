"""A walk over many cases that goes on where it stopped: each in a process of its own, results in one JSON file."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 240  # of a core, for one case

Judge = Callable[[str], dict[str, Any]]


def walk(file: Path, names: Iterable[str], judge: Judge) -> None:
    """Judges what has not been judged yet."""
    known = results(file)
    for name in track([name for name in names if name not in known], file.stem):
        found = {name: apart(judge, name)}
        file.write_text(json.dumps(results(file) | found, indent=0, sort_keys=True) + "\n")  # others may walk, too


def results(file: Path) -> dict[str, Any]:
    """What is known, by case."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def apart(judge: Judge, name: str) -> dict[str, Any]:
    """What a forked process finds about one case, or how it ended."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(judge, name, send))
    process.start()
    send.close()
    try:
        if receive.poll(10 * SECONDS):
            found: dict[str, Any] = receive.recv()
            return found
        process.kill()
    except EOFError:
        process.join()
    finally:
        process.join()
    late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
    return {"model": "", "outcome": "time-out" if late else f"ends with {process.exitcode}"}


def _child(judge: Judge, name: str, send: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    send.send(judge(name))
