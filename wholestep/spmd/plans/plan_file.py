"""Plans as files that a person can read and review: JSON, one entry for each plan, with what is not as by default.

    {"wholestep": 1, "plans": [
      {"plan": "TensorParallel", "axis": "tp", "roles": {"*.up": "column", "*.down": ["row", "sequence"]}},
      {"plan": "FullyShard", "axis": "dp", "batch": {"batch.mask": "Replicate()"}}]}
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.errors import PlanError
from wholestep.spmd.placements import Replicate, Shard
from wholestep.spmd.plans.plan import DataParallel, FullyShard, ShardedOptimizer, TensorParallel

_KINDS: tuple[type[Any], ...] = (DataParallel, ShardedOptimizer, FullyShard, TensorParallel)
PLANS = {kind.__name__: kind for kind in _KINDS}
VERSION = 1

_SHARD = re.compile(r"Shard\((-?\d+)\)")


def save_plan(path: str | os.PathLike[str], plan: Any) -> None:
    """Writes plans to a file, at once or not at all.

    Args:
        path: of the file.
        plan: a plan, or several, as for `wholestep.compile`.

    Raises:
        PlanError: a plan of a class of your own.
    """
    plans = list(plan) if isinstance(plan, (list, tuple)) else [plan]
    entries = [_written(one) for one in plans]
    rows = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    text = f'{{\n  "wholestep": {VERSION},\n  "plans": [\n{rows}\n  ]\n}}\n'
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_plan(path: str | os.PathLike[str]) -> list[Any]:
    """Reads plans from a file.

    Returns:
        The plans in their order, for `wholestep.compile`.

    Raises:
        PlanError: what the file says is no plan; naming the entry, what was found and what is required.
    """
    text = Path(path).read_text()
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: no JSON: {error.msg}") from error
    if not isinstance(found, dict) or found.get("wholestep") != VERSION or not isinstance(found.get("plans"), list):
        raise PlanError(f'{path}: {{"wholestep": {VERSION}, "plans": [...]}} is required')
    return [_read(f"{path}, plan {number}", entry) for number, entry in enumerate(found["plans"], 1)]


def _written(plan: Any) -> dict[str, Any]:
    if PLANS.get(type(plan).__name__) is not type(plan):
        raise PlanError(f"save_plan: {type(plan).__name__} is not one of {', '.join(PLANS)}, which files can say")
    entry = {"plan": type(plan).__name__, "axis": plan.axis}
    plain = type(plan)(plan.axis)
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if value != getattr(plain, field.name):
            entry[field.name] = _said(value)
    return entry


def _said(value: Any) -> Any:
    if isinstance(value, (Shard, Replicate)):
        return f"Shard({value.dim})" if isinstance(value, Shard) else "Replicate()"
    if isinstance(value, Mapping):
        return {name: _said(one) for name, one in value.items()}
    return [_said(one) for one in value] if isinstance(value, (list, tuple)) else value


def _read(where: str, entry: Any) -> Any:
    kind = PLANS.get(entry.get("plan", "")) if isinstance(entry, dict) else None
    if kind is None:
        named = entry.get("plan") if isinstance(entry, dict) else entry
        raise PlanError(f'{where}: "plan": {json.dumps(named)}: one of {_list(PLANS)} is required{_near(named, PLANS)}')
    known = {field.name: field for field in dataclasses.fields(kind)}
    given = {name: _meant(value) for name, value in entry.items() if name != "plan"}
    for name, value in given.items():
        if name not in known:
            raise PlanError(f'{where}: "{name}": {kind.__name__} has {_list(known)}{_near(name, known)}')
        wanted = type(known[name].default)
        if wanted in (bool, int) and type(value) is not wanted:
            like = json.dumps(known[name].default)
            raise PlanError(f'{where}: "{name}": {json.dumps(entry[name])}: a value such as {like} is required')
    if not isinstance(given.get("axis"), str):
        raise PlanError(f'{where}: "axis": the name of a mesh axis is required')
    try:
        return kind(**given)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def _meant(value: Any) -> Any:
    """A placement for its text."""
    if isinstance(value, str):
        shard = _SHARD.fullmatch(value)
        return Shard(int(shard[1])) if shard else Replicate() if value == "Replicate()" else value
    if isinstance(value, dict):
        return {name: _meant(one) for name, one in value.items()}
    return [_meant(one) for one in value] if isinstance(value, list) else value


def _list(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _near(name: Any, names: Iterable[str]) -> str:
    close: Sequence[str] = difflib.get_close_matches(str(name), list(names), n=1)
    return f'; nearest is "{close[0]}"' if close else ""
