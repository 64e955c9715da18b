"""The flight recorder: the last 1,000 collectives of this rank, written out as JSON when one fails.

The file goes to the folder that WHOLESTEP_DUMP names, else to a private folder under the system's temporary one, where
the last ones stay for a week.
`diagnose` merges the files of several ranks into one sentence, who waits for whom, and why; `wholestep doctor` prints
it.
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
from collections.abc import Sequence
from dataclasses import dataclass
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


# What the records of several ranks say --------------------------------------------------------------------------

Call = dict[str, Any]  # a collective, as the recorder writes it
MESSAGES = ("send", "recv")
LATE = 0.5  # seconds after the first rank from which on a rank is said to be late


@dataclass
class Record:
    """What one rank wrote.

    Attributes:
        calls: its collectives, oldest first.
        groups: the ranks of each group that it knows.
    """

    rank: int
    written: float
    calls: list[Call]
    groups: dict[str, list[int]]

    def at(self, group: str) -> Call | None:
        """Where it stands in a group: the first call there that did not end, else the last."""
        here = [call for call in self.calls if call["group"] == group]
        return next((call for call in here if call["state"] != "completed"), here[-1] if here else None)

    def waiting(self) -> Call | None:
        """The first call that did not end."""
        return next((call for call in self.calls if call["state"] != "completed"), None)


def diagnose(paths: Sequence[str | Path]) -> str:
    """One sentence from the flight records of several ranks: who waits for whom, and why.

    Args:
        paths: records, or folders of them; of several from one rank the latest counts.

    Raises:
        ValueError: no record, or a file that is not one.
    """
    files = [file for path in map(Path, paths) for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    records: dict[int, Record] = {}
    for file in files:
        record = _read(file)
        if record.rank not in records or records[record.rank].written < record.written:
            records[record.rank] = record
    if not records:
        raise ValueError("diagnose: at least one flight record is required, or a folder that holds some")
    waiting = [call for record in records.values() if (call := record.waiting()) is not None]
    if not waiting:
        return f"All collectives of ranks {sorted(records)} completed."
    return _sentence(min(waiting, key=lambda call: float(call["started"]))["group"], records)


def _read(path: Path) -> Record:
    try:
        found = json.loads(path.read_text())
        return Record(found["rank"], found["written"], found["collectives"], found["groups"])
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ValueError(f"{path} is not a flight record: {failure!r}") from failure


def _sentence(group: str, records: dict[int, Record]) -> str:
    lasts = {rank: call for rank, record in records.items() if (call := record.at(group)) is not None}
    ahead = max(call["seq"] for call in lasts.values())
    at = {rank: call for rank, call in sorted(lasts.items()) if call["seq"] == ahead}
    if len({(call["op"], str(call["shape"]), call["dtype"]) for call in at.values()}) > 1:
        said = "; ".join(f"rank {rank} calls {_words(call)}" for rank, call in at.items())
        return f"Group {group!r} does not agree on collective #{ahead}: {said}."
    if all(call["op"] in MESSAGES for call in at.values()):
        return " ".join(f"Rank {rank} waits in {_words(call)}. {call['error']}".strip() for rank, call in at.items())
    members = {rank for record in records.values() for rank in record.groups.get(group, [])}
    absent = [_absence(rank, group, records) for rank in sorted((members | set(lasts)) - set(at))]
    who, call = ", ".join(map(str, at)), next(iter(at.values()))
    wait = f"In group {group!r} rank(s) {who} wait in #{ahead} {_words(call)}"
    error = next((call["error"] for call in at.values() if call["error"]), "")
    if absent:
        return f"{wait} for others that did not come: {'; '.join(absent)}." + (f" {error}" if error else "")
    first, last = (choose(at, key=lambda rank: float(at[rank]["started"])) for choose in (min, max))
    late = float(at[last]["started"]) - float(at[first]["started"])
    came = f", rank {last} {late:.1f} s after rank {first}" if late > LATE else ""
    return f"{wait}, where all have come{came}. {error}".strip()


def _absence(rank: int, group: str, records: dict[int, Record]) -> str:
    """Where a rank is that others wait for."""
    if rank not in records:
        return f"rank {rank} left no record"
    last, elsewhere = records[rank].at(group), records[rank].waiting()
    said = f"rank {rank} stopped after #{last['seq']} {_words(last)}" if last else f"rank {rank} has called nothing"
    if elsewhere is not None and elsewhere["group"] != group:
        said += f" and waits in #{elsewhere['seq']} {_words(elsewhere)} of group {elsewhere['group']!r}"
    return said


def _words(call: Call) -> str:
    tensor = "" if call["shape"] is None else f" of {call['dtype']} {call['shape']}"
    return f"{call['op']}{tensor} at {call['where']}"
