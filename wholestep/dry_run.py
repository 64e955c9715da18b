"""Dry run of a script: one process plays one rank of any world, up to the first compiled call, which is explained.

May import: comm, compiled, launcher, report.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wholestep.comm.api.rendezvous import alone
from wholestep.compiled import Compiled
from wholestep.launcher import World
from wholestep.report import Explanation


class DryRunError(ValueError):
    """There is no compiled call to explain."""


class _Explained(BaseException):  # no `except Exception` of the script is to catch it
    def __init__(self, explanation: Explanation) -> None:
        super().__init__()
        self.explanation = explanation


def dry_run(target: str, arguments: Sequence[str], *, module: bool, ranks: int, rank: int) -> Explanation:
    """What the first compiled call of a script does on one rank; nothing of it runs or communicates.

    Args:
        target: a path, or with ``module`` the name of a module.
        arguments: of the script.
        ranks: of the world that the script sees.
        rank: the one that it sees itself as.

    Raises:
        DryRunError: no such rank or file, or the script ended before it called anything compiled.
    """
    if not 0 <= rank < ranks:
        raise DryRunError(f"rank {rank} is not one of {ranks}: 0 to {ranks - 1}")
    if not module and not os.path.isfile(target):
        raise DryRunError(f"{target} is no file: the path of a Python script is required, or -m and a module")
    place = World(ranks).environment(rank, 1, "")
    paths = [os.getcwd() if module else os.path.dirname(os.path.abspath(target)), *sys.path]
    run: Any = runpy.run_module if module else runpy.run_path
    with _environment(place, [target, *arguments], paths), alone(), _explain_in_place_of_running():
        try:
            run(target, run_name="__main__")
        except _Explained as found:
            return found.explanation
        except SystemExit as end:
            raise DryRunError(f"{target} ended ({end.code}) before it called a compiled step") from None
    raise DryRunError(f"{target} ended before it called a compiled step: nothing that ws.compile gave was called")


@contextmanager
def _explain_in_place_of_running() -> Iterator[None]:
    def serve(step: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Any = None) -> Any:
        raise _Explained(step.explain(*args, **kwargs))

    before = Compiled.serve
    Compiled.serve = serve  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Compiled.serve = before  # type: ignore[method-assign]


@contextmanager
def _environment(variables: dict[str, str], argv: list[str], paths: list[str]) -> Iterator[None]:
    """The surroundings in which a launcher starts a script."""
    kept = dict(os.environ), sys.argv, sys.path
    os.environ.update(variables)
    sys.argv, sys.path = argv, paths
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept[0])
        sys.argv, sys.path = kept[1:]
