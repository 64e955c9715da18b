"""What the flight records of several ranks say: who waits for whom, and why. `wholestep doctor` prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
