"""The directory of a checkpoint: its layout, and how a new checkpoint replaces it atomically.

A checkpoint is a directory with an ``index.json`` and one directory of shards, ``shards-7``, that it names. A new one
is written beside it, as ``.shards-8``; when all is on the disk that is renamed, and then the index replaced: this one
rename is the instant at which the new checkpoint is the checkpoint. What an index does not name is rubbish, which the
next save removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from wholestep.errors import CheckpointError

INDEX, FORMAT = "index.json", "wholestep-checkpoint-1"
_OURS = re.compile(r"\.?shards-\d+|index\.json(\.new)?")


def read_index(path: Path) -> dict[str, Any]:
    """The index of a complete checkpoint, whose files are all there.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {INDEX}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CheckpointError(f"{path / INDEX} is not of the form {FORMAT!r}")
    for name, size in index["files"].items():
        file = path / index["shards"] / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            raise CheckpointError(f"{file}: expected {size} bytes, found {'no file' if found is None else found}")
    return index


def begin(path: Path) -> str:
    """Makes a directory for new shards, and removes what interrupted saves left; gives the shards' name.

    Raises:
        CheckpointError: something else is there.
    """
    path.mkdir(parents=True, exist_ok=True)
    strange = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
    if strange:
        raise CheckpointError(f"{path} holds {strange[0]!r}, which is no part of a checkpoint: give a path of its own")
    current = None
    if (path / INDEX).exists():
        current = json.loads((path / INDEX).read_text(encoding="utf8"))["shards"]
    _clean(path, current)
    name = f"shards-{int(current.split('-')[1]) + 1 if current else 1}"
    (path / f".{name}").mkdir()
    return name


def commit(path: Path, name: str, index: dict[str, Any]) -> None:
    """Puts complete shards and their index in the place of what was there.

    Args:
        name: as `begin` gave it.
    """
    sync(path / f".{name}")
    os.rename(path / f".{name}", path / name)
    new = path / f"{INDEX}.new"
    with open(new, "w", encoding="utf8") as file:
        json.dump({"format": FORMAT, "shards": name} | index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(path)
    os.replace(new, path / INDEX)
    sync(path)
    sync(path.parent)
    _clean(path, name)


def discard(path: Path, name: str) -> None:
    """Removes shards that are not to be."""
    shutil.rmtree(path / f".{name}", ignore_errors=True)


def sync(path: Path) -> None:
    """Has a file or a directory on the disk before anything that comes later."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clean(path: Path, current: str | None) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and entry.name != current:
            shutil.rmtree(entry)
        elif entry.name == f"{INDEX}.new":
            entry.unlink()
