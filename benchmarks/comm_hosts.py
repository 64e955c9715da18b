"""Collectives over two hosts: shared memory inside each and Gloo between them, against Gloo between all ranks.

Two network namespaces on one machine, joined by a cable of a given speed (needs `unshare`, `ip` and `tc`):

    python benchmarks/comm_hosts.py --ranks 2 --rate 1gbit

Prints, for each collective, medians of both in milliseconds, the ratio (above 1 in favour of the hierarchy), and the
bytes that leave the first host, in units of the largest buffer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from wholestep import comm
from wholestep.comm.stores.tcp_store import SECRET_VARIABLE

ROOT = Path(__file__).parents[1]
COUNT = 2_000_000  # floats of the largest buffer
ROUNDS = 7


def sent() -> int:
    """Bytes that have left this host through the cable."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "cable:")


def measure(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and bytes that left the host."""
    comm.barrier()
    before, began = sent(), time.perf_counter()
    call()
    took = time.perf_counter() - began
    comm.barrier()
    return took, sent() - before


def body() -> None:
    """One rank."""
    comm.init_process_group("shm")
    n, flat = comm.get_world_size(), comm.new_group(backend="gloo")
    x, part = torch.ones(COUNT), torch.ones(COUNT // n)
    whole = torch.empty(n * len(part))
    calls: dict[str, Callable[[comm.ProcessGroup | None], object]] = {
        "all_reduce": lambda group: comm.all_reduce(x, group=group),
        "all_reduce, 1 KB": lambda group: comm.all_reduce(x[:256], group=group),
        "broadcast": lambda group: comm.broadcast(x, 0, group=group),
        "all_gather": lambda group: comm.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: comm.reduce_scatter_tensor(part, whole, group=group),
    }
    if comm.get_rank() == 0:
        print("| collective | hierarchical ms | Gloo ms | Gloo / hierarchical | bytes | Gloo bytes |")
        print("|---|---|---|---|---|---|")
    for name, call in calls.items():
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(measure(lambda call=call: call(None)))  # type: ignore[misc]
            theirs.append(measure(lambda call=call: call(flat)))  # type: ignore[misc]
        if comm.get_rank() == 0:
            times = [statistics.median(one[0] for one in side) * 1e3 for side in (ours, theirs)]
            ratio = statistics.median(b[0] / a[0] for a, b in zip(ours, theirs, strict=True))
            volumes = [min(one[1] for one in side) / x.nbytes for side in (ours, theirs)]
            print(f"| {name} | {times[0]:.2f} | {times[1]:.2f} | {ratio:.2f} | {volumes[0]:.2f} | {volumes[1]:.2f} |")
    comm.destroy_process_group()


def main() -> None:
    """Makes the two hosts and runs `body` in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc writes it")
    options = parser.parse_args()
    own = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--net", "sh"]
    job = [sys.executable, "-m", "wholestep", "run", "-n", str(options.ranks), "--nodes", "2"]
    job += ["--master-addr", "10.77.0.1", "--master-port", "29400"]
    env = {SECRET_VARIABLE: "of this run", "OMP_NUM_THREADS": "1", "RATE": options.rate, "WITH": __file__}
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [*own, str(ROOT / "tests" / "support" / "two_hosts.sh"), *job]
    sys.exit(subprocess.run(command, env=os.environ | env | {"PYTHONPATH": path}, check=False).returncode)


if __name__ == "__main__":
    body() if "RANK" in os.environ else main()
