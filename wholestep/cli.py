"""The command line of Wholestep.

Of a dry run of a script, one process plays one rank of any world, up to the first compiled call, which is explained.

May import: comm, compiled, launcher, report.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import click

from wholestep.comm import diagnose
from wholestep.comm.api.rendezvous import alone
from wholestep.compiled import Compiled
from wholestep.launcher import World, launch
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

    def serve(step: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Any = None) -> Any:
        raise _Explained(step.explain(*args, **kwargs))

    seen: dict[str, Any] = {"argv": [target, *arguments], "path": paths}
    with patch.dict(os.environ, place), patch.multiple(sys, **seen), patch.object(Compiled, "serve", serve), alone():
        try:
            run(target, run_name="__main__")
        except _Explained as found:
            return found.explanation
        except SystemExit as end:
            raise DryRunError(f"{target} ended ({end.code}) before it called a compiled step") from None
    raise DryRunError(f"{target} ended before it called a compiled step: nothing that ws.compile gave was called")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wholestep")
def main() -> None:
    """Wholestep: whole PyTorch training steps, on any number of processes."""


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", default=1, show_default=True, help="Ranks to start on this host.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as in python -m.")
@click.option("--nodes", default=1, show_default=True, help="Hosts of the job; run this command on each.")
@click.option("--node-rank", "node", default=0, show_default=True, help="Which of the hosts this one is.")
@click.option("--master-addr", "address", default="127.0.0.1", show_default=True, help="Host of rank 0.")
@click.option("--master-port", "port", default=0, help="TCP port on that host.  [default: a free one]")
@click.option("--standalone", is_flag=True, help="One host and a free port, as without this; for torchrun's users.")
@click.option("--max-restarts", default=0, type=click.IntRange(0), show_default=True, help="Starts after a failure.")
@click.option("--min-ranks", type=int, help="Start again with a rank less each time, but at least so many.")
@click.option("--grace", default=5.0, show_default=True, help="Seconds from SIGTERM to SIGKILL: time to save.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    target: str, arguments: tuple[str, ...], module: bool, standalone: bool, max_restarts: int, min_ranks: int | None,
    grace: float, **place: Any,
) -> None:  # fmt: skip
    """Run TARGET, a Python script, once per rank.

    Each rank finds its place in the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT, …). Lines are printed with their rank. When one rank fails the others are stopped, and its exit code
    is the command's. Ranks on several hosts need the same WHOLESTEP_SECRET on each; those of one host get one made
    for the run.

    With --max-restarts a failed job is started again, to go on from its last checkpoint
    (wholestep.parallel.Checkpointer). SIGTERM, and ranks that end with status 143 after it, end the job.
    """
    ranks, nodes = place["ranks"], place["nodes"]
    if standalone and (nodes > 1 or place["port"]):
        raise click.UsageError("--standalone is one host and a free port: leave out --nodes and --master-port")
    if min_ranks is not None and (nodes > 1 or not 1 <= min_ranks <= ranks):
        raise click.UsageError(f"--min-ranks is from 1 to {ranks}, on one host: found {min_ranks} on {nodes}")
    try:
        world = World(**place)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    command = [sys.executable, *(["-m"] if module else []), target, *arguments]
    sys.exit(launch(command, world, grace, max_restarts, min_ranks))


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", default=1, show_default=True, help="Ranks of the world that TARGET sees.")
@click.option("-r", "--rank", default=0, show_default=True, help="Which of them it sees itself as.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as in python -m.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain(ranks: int, rank: int, module: bool, target: str, arguments: tuple[str, ...]) -> None:
    """Say what the first compiled step of TARGET, a Python script, sends and holds on one rank of many.

    The script runs in this process alone, as one rank of so many, until it calls something that ws.compile gave. In
    place of that call this prints, along each axis of the mesh, the collectives with their bytes and lines, and peak
    memory by class. Models of fake tensors do: torch's FakeTensorMode.
    """
    try:
        click.echo(dry_run(target, arguments, module=module, ranks=ranks, rank=rank))
    except DryRunError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.argument("dumps", nargs=-1, required=True, type=click.Path(exists=True))
def doctor(dumps: tuple[str, ...]) -> None:
    """Say who waits for whom, and why, from the flight records DUMPS of a job's ranks (or folders of them).

    A rank writes its record when a collective fails, into the folder that WHOLESTEP_DUMP names; the error says where.
    `comm.dump(rank)` writes one at any time.
    """
    try:
        click.echo(diagnose(dumps))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
