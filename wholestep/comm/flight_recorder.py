"""The flight recorder: the last 1,000 collectives of this rank, written out as JSON when one fails.

The file goes to the folder that WHOLESTEP_DUMP names, else to a private folder under the system's temporary one, where
the last ones stay for a week.
`doctor.py` merges the files of several ranks into one sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
import time
import weakref
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from wholestep.comm.api.groups import world
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.shared_tensors import native
from wholestep.comm.work import Work

KEPT = 1000
FILES = 512  # records in the folder of those who name none: two jobs of the largest size
WEEK = 7 * 24 * 3600.0  # seconds
FOLDER_VARIABLE = "WHOLESTEP_DUMP"
_LIBRARIES = ("wholestep.", "torch.")


# An entry is a list: 0.2 us, where an object with named fields takes 0.5. native/flight.c makes them too.
WHAT, NUMBER, SEQ, STARTED, CODE, INSTRUCTION, STATE, WORK, ERROR = range(9)
Entry = list[Any]
Shown = tuple[str, str, torch.Size | None, torch.dtype | None]

ring: list[Entry | None] = [None] * KEPT  # an entry is at its number modulo KEPT


def shown(group: ProcessGroup, op: str, like: torch.Tensor | None) -> Shown:
    """Group, operation, shape and dtype, as entries hold them."""
    return group.group_name, op, None if like is None else like.shape, None if like is None else like.dtype


def begin(group: ProcessGroup, op: str, like: torch.Tensor | None) -> Entry:
    """Notes a collective that is about to start, at the first line above that is neither the package's nor torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_LIBRARIES):
        frame = frame.f_back
    seq = group._get_sequence_number_for_group() + 1
    where = frame.f_code, frame.f_lasti
    number = native.number()
    entry: Entry = [shown(group, op, like), number, seq, time.time(), *where, "started", None, None]
    ring[number % KEPT] = entry
    return entry


def under_way(entry: Entry, work: Work, group: ProcessGroup) -> Work:
    """Notes the work that the collective ends with; if that fails, so does the collective."""
    entry[WORK] = weakref.ref(work)
    work._report = partial(fail, entry, group)
    return work


def done(entry: Entry) -> None:
    """Notes that the collective ended well."""
    entry[STATE] = "completed"


def _state(entry: Entry) -> str:
    """started, completed or failed."""
    if entry[STATE] == "started" and entry[WORK] is not None:
        work = entry[WORK]()
        if work is not None and work.exception() is not None:
            return "failed"
        if work is None or work.is_completed():
            return "completed"
    return str(entry[STATE])


def _where(entry: Entry) -> str:
    """The user's file and line."""
    code, at = entry[CODE], entry[INSTRUCTION]
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


def _as_dict(entry: Entry) -> dict[str, Any]:
    group, op, shape, dtype = entry[WHAT]
    return {
        "number": entry[NUMBER],
        "group": group,
        "seq": entry[SEQ],
        "op": op,
        "shape": None if shape is None else list(shape),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "where": _where(entry),
        "started": entry[STARTED],
        "state": _state(entry),
        "error": entry[ERROR] or "",
    }


def fail(entry: Entry, group: ProcessGroup, error: BaseException) -> None:
    """Notes the failure and writes the dump; a dump that cannot be written must not hide the failure."""
    rank = group.labels[group.rank()]
    entry[STATE], entry[ERROR] = "failed", str(error)
    try:
        error.add_note(f"at {_where(entry)}; the last collectives are in {dump(rank)}")
    except OSError as second:
        error.add_note(f"at {_where(entry)}; no flight record: {second}")


def _entries() -> list[Entry]:
    """Those kept, oldest first."""
    kept = [entry for entry in ring if entry is not None]
    return sorted([*kept, *native.flights()], key=itemgetter(NUMBER))[-KEPT:]  # these ended at once


def records() -> list[dict[str, Any]]:
    """The collectives kept, oldest first."""
    return [_as_dict(entry) for entry in _entries()]


def place(group_name: str, seq: int) -> str:
    """The user's file and line that called a group's collective of that number; empty if it is not kept."""
    found = (entry for entry in reversed(_entries()) if entry[SEQ] == seq and entry[WHAT][0] == group_name)
    return next(map(_where, found), "")


def _clear(folder: Path) -> None:
    """Removes records that are a week old, and of more than `FILES` the oldest."""
    found = []
    for file in folder.glob("rank*.*.*"):  # and what a rank that was killed had begun to write
        with contextlib.suppress(OSError):  # another rank clears too
            found.append((file.stat().st_mtime, file))
    kept = sorted(found, reverse=True)[: FILES - 1]
    for written, file in found:
        if written < time.time() - WEEK or (written, file) not in kept:
            with contextlib.suppress(OSError):
                file.unlink()


def dump(rank: int, path: str | Path | None = None) -> Path:
    """Writes the record of this rank of the world, readable by the user alone, and returns its path."""
    if path is None:
        named = os.environ.get(FOLDER_VARIABLE)
        folder = Path(named) if named else Path(tempfile.gettempdir()) / f"wholestep-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not named:
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                raise OSError(f"{folder} belongs to somebody else")
            _clear(folder)
        path = folder / f"rank{rank}.{os.getpid()}.json"
    target = Path(path)
    about = {"rank": rank, "pid": os.getpid(), "written": time.time(), "groups": world().members()}
    content = json.dumps({**about, "collectives": records()}, indent=1)
    unfinished = target.with_suffix(f".{os.getpid()}.part")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    os.replace(unfinished, target)
    return target
