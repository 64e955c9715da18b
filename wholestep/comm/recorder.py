"""The flight recorder: the last 1,000 collectives of this rank, written out as JSON when one fails.

The file goes to the folder that WHOLESTEP_DUMP names, else to a private folder under the system's temporary one.
`diagnose` merges the files of several ranks into one sentence.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.work import Work

KEPT = 1000
FOLDER_VARIABLE = "WHOLESTEP_DUMP"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Entry:
    """One collective: what, where in the user's program, and how far it got."""

    __slots__ = ("code", "dtype", "error", "group", "line", "number", "op", "seq", "shape", "started", "state", "work")

    def __init__(self, number: int, group: ProcessGroup, op: str, like: torch.Tensor | None) -> None:
        self.number, self.op, self.group = number, op, group.group_name
        self.seq = group._get_sequence_number_for_group() + 1
        self.shape = None if like is None else like.shape
        self.dtype = None if like is None else like.dtype
        self.started, self.state, self.error = time.time(), "started", ""
        self.work: weakref.ref[Work] | None = None
        frame = sys._getframe(3)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        self.code, self.line = frame.f_code.co_filename, frame.f_lineno

    def now(self) -> str:
        """started, completed or failed."""
        if self.state == "started" and self.work is not None:
            work = self.work()
            if work is not None and work.exception() is not None:
                return "failed"
            if work is None or work.is_completed():
                return "completed"
        return self.state

    def as_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "group": self.group,
            "seq": self.seq,
            "op": self.op,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "where": f"{self.code}:{self.line}",
            "started": self.started,
            "state": self.now(),
            "error": self.error,
        }


_entries: deque[Entry] = deque(maxlen=KEPT)
_numbers = itertools.count(1)


def begin(group: ProcessGroup, op: str, like: torch.Tensor | None) -> Entry:
    """Notes a collective that is about to start."""
    entry = Entry(next(_numbers), group, op, like)
    _entries.append(entry)
    return entry


def fail(entry: Entry, error: BaseException, rank: int) -> None:
    """Notes the failure and writes the dump; a dump that cannot be written must not hide the failure."""
    entry.state, entry.error = "failed", str(error)
    try:
        error.add_note(f"at {entry.code}:{entry.line}; the last collectives are in {dump(rank)}")
    except OSError as second:
        error.add_note(f"at {entry.code}:{entry.line}; no flight record: {second}")


def records() -> list[dict[str, Any]]:
    """The collectives kept, oldest first."""
    return [entry.as_dict() for entry in list(_entries)]


def dump(rank: int, path: str | Path | None = None) -> Path:
    """Writes the record, readable by the user alone, and returns its path."""
    if path is None:
        named = os.environ.get(FOLDER_VARIABLE)
        folder = Path(named) if named else Path(tempfile.gettempdir()) / f"wholestep-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not named and folder.stat().st_uid != os.getuid():
            raise OSError(f"{folder} belongs to somebody else")
        path = folder / f"rank{rank}.{os.getpid()}.json"
    target = Path(path)
    content = json.dumps({"rank": rank, "pid": os.getpid(), "written": time.time(), "collectives": records()}, indent=1)
    unfinished = target.with_suffix(f".{os.getpid()}.part")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    os.replace(unfinished, target)
    return target


def _last(dump: dict[str, Any], group: str) -> dict[str, Any] | None:
    return next((c for c in reversed(dump["collectives"]) if c["group"] == group), None)


def diagnose(paths: Sequence[str | Path]) -> str:
    """One sentence from the dumps of several ranks: who waits for whom, and why.

    Raises:
        ValueError: no dump, or a file that is not one.
    """
    dumps = []
    for path in paths:
        try:
            found = json.loads(Path(path).read_text())
            found["rank"], found["collectives"]
        except (ValueError, KeyError, TypeError) as failure:
            raise ValueError(f"{path} is not a flight record: {failure!r}") from failure
        dumps.append(found)
    if not dumps:
        raise ValueError("diagnose: at least one flight record is required")
    for group in sorted({c["group"] for d in dumps for c in d["collectives"] if c["state"] != "completed"}):
        lasts = {d["rank"]: last for d in dumps if (last := _last(d, group)) is not None}
        return _sentence(group, lasts)
    return f"All collectives of ranks {sorted(d['rank'] for d in dumps)} completed."


def _sentence(group: str, lasts: dict[int, dict[str, Any]]) -> str:
    ahead = max(entry["seq"] for entry in lasts.values())
    at = {rank: entry for rank, entry in lasts.items() if entry["seq"] == ahead}
    behind = {rank: entry for rank, entry in lasts.items() if entry["seq"] < ahead}
    kinds = {(entry["op"], str(entry["shape"]), entry["dtype"]) for entry in at.values()}
    if len(kinds) > 1:
        said = "; ".join(f"rank {r} calls {_call(e)}" for r, e in sorted(at.items()))
        return f"Group {group!r} does not agree on collective #{ahead}: {said}."
    who = ", ".join(str(rank) for rank in sorted(at))
    call = _call(next(iter(at.values())))
    if behind:
        rest = "; ".join(f"rank {r} stopped after #{e['seq']} {_call(e)}" for r, e in sorted(behind.items()))
        return f"In group {group!r} rank(s) {who} wait in #{ahead} {call} for others that did not come: {rest}."
    error = next((e["error"] for e in at.values() if e["error"]), "")
    return f"In group {group!r} rank(s) {who} wait in #{ahead} {call} for a rank that left no record. {error}".strip()


def _call(entry: dict[str, Any]) -> str:
    tensor = "" if entry["shape"] is None else f" of {entry['dtype']} {entry['shape']}"
    return f"{entry['op']}{tensor} at {entry['where']}"
