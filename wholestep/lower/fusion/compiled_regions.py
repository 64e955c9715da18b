"""Regions as kernels of Inductor's: compiled aside, by processes of their own, while the step runs without them.

Each unique region is compiled once, and kept on disk: in ``$WHOLESTEP_CACHE``, or ``~/.cache/wholestep``. Until all
regions of a step are compiled it runs as if there were none; one that cannot be compiled stays as it was, which is
said once.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from wholestep import comm
from wholestep.functional import Functionalized, is_collective
from wholestep.ir import GETITEM, StepGraph, add_call, copy_node, info, set_info
from wholestep.passes import Region
from wholestep.torch_compat import lazy_graph_module, parse_schema

aten = torch.ops.aten
FAILED, PENDING, READY = range(3)
PROCESSES = 4  # that compile at once, at most; no more than there are cores
_SCHEMA = parse_schema("wholestep_region::fused_region(Tensor[] reads, Tensor(a!)[] writes) -> ()")


class Kernel:
    """A compiled region: writes its results, and temporaries, into memory that it is given."""

    __module__ = "wholestep.lower"
    _schema = _SCHEMA

    def __init__(self, name: str, operators: str, folder: Path) -> None:
        found = json.loads((folder / f"{name}.json").read_text())
        self.__name__, self.operators, self.temporaries = f"fused_region_{name[:8]}", operators, found["temporaries"]
        self._calls = []
        for library, places in found["calls"]:
            function = ctypes.CDLL(str(folder / library)).kernel
            function.argtypes, function.restype = [ctypes.c_void_p] * len(places), None
            self._calls.append((function, places))

    def name(self) -> str:
        return self.__name__

    def __call__(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        at = [tensor.data_ptr() for tensor in (*reads, *writes)]
        for function, places in self._calls:
            function(*[at[place] for place in places])


class _Compilation:
    """Compiles regions in processes of their own, those of one `start` shared out among them.

    Attributes:
        kernels: by name; None for what failed.
        errors: by cause, the operators of these, until somebody was told.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel | None] = {}
        self.errors: dict[str, list[str]] = {}
        self._begun: set[str] = set()
        self._processes: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def start(self, regions: Iterable[Region]) -> list[str]:
        """Begins with those that are neither compiled nor begun; gives the names of all."""
        named = {self.name(region): region for region in regions}
        with self._lock:
            new = {name: region for name, region in named.items() if name not in self._begun}
            self._begun.update(new)
        missing = [name for name, region in new.items() if not self._load(name, region)]
        count = min(PROCESSES, len(os.sched_getaffinity(0)), len(missing))
        for number in range(count):
            share = {name: new[name] for name in missing[number::count]}
            threading.Thread(target=self._compile, args=(share,), name="compiles regions", daemon=True).start()
        return list(named)

    @staticmethod
    def name(region: Region) -> str:
        """What tells a region's kernel from all others."""
        made_for = torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), region.text
        return hashlib.sha256(repr(made_for).encode()).hexdigest()[:40]

    def state(self, names: Iterable[str]) -> int:
        """Of regions together: `FAILED` where one did, `PENDING` where one is under way, else `READY`."""
        found = [self.kernels[name] is not None if name in self.kernels else None for name in names]
        return FAILED if False in found else PENDING if None in found else READY

    def settled(self, names: Iterable[str]) -> bool:
        """Whether none is under way; warns of what has failed."""
        if not self.kernels.keys() >= {*names}:
            return False
        while self.errors:
            why, which = self.errors.popitem()
            warnings.warn(f"fuse_pointwise: regions that stay as they were ({'; '.join(which)}): {why}", stacklevel=1)
        return True

    def _load(self, name: str, region: Region) -> bool:
        with suppress(OSError, ValueError, LookupError, AttributeError):  # not there, or not whole: it is made anew
            self.kernels[name] = Kernel(name, region.operators, folder())
        return name in self.kernels

    def _compile(self, regions: dict[str, Region]) -> None:
        compiler = os.environ.get("CXX", "g++")  # as Inductor chooses it
        try:
            if shutil.which(compiler) is None:
                raise FileNotFoundError(f"there is no C++ compiler {compiler!r}: install one, or name yours in $CXX")
            folder().mkdir(parents=True, exist_ok=True, mode=0o700)
            errors = self._run({name: [region.text, region.inputs] for name, region in regions.items()})
        except OSError as error:
            errors = dict.fromkeys(regions, str(error))
        for name, region in regions.items():
            if not self._load(name, region):
                why = errors.get(name, "the process that compiles it ended").partition("\n")[0]
                self.errors.setdefault(why, []).append(region.operators)
                self.kernels[name] = None

    def _run(self, request: dict[str, Any]) -> dict[str, str]:
        """Has one process compile regions; gives the errors of those that failed."""
        command = [sys.executable, "-m", "wholestep.lower.fusion.region_compiler", str(folder())]
        process = subprocess.Popen(
            [*command, str(torch.get_num_threads())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        self._processes.add(process)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()  # and stays open: its end tells that nobody waits
        errors = dict(json.loads(line) for line in process.stdout if line.startswith('["'))
        process.wait()
        process.stdin.close()
        self._processes.discard(process)
        return errors

    def end(self) -> None:
        """Ends its processes."""
        for process in [*self._processes]:
            process.kill()


def folder() -> Path:
    """Where kernels are kept."""
    return Path(os.environ.get("WHOLESTEP_CACHE") or Path.home() / ".cache" / "wholestep")


COMPILATION = _Compilation()
atexit.register(COMPILATION.end)
os.register_at_fork(after_in_child=COMPILATION.__init__)  # type: ignore[misc]


def regions_of(step: StepGraph) -> list[Region]:
    """The regions that a graph calls."""
    return [node.target for node in step.graph.nodes if isinstance(node.target, Region)]


class Awaited:
    """The regions of a graph, until their kernels are used.

    Ranks begin to use them at the same call, or not at all: what they compute alike has to stay so.
    """

    def __init__(self, step: StepGraph) -> None:
        self.names = COMPILATION.start(regions_of(step))
        groups = (node.args[-1] for node in step.graph.nodes if is_collective(node.target)) if self.names else ()
        self.groups = [comm.get_group(group) for group in dict.fromkeys(groups)] if comm.is_initialized() else []

    def ready(self) -> bool:
        """Whether kernels are to be used from now on; true once."""
        if not self.names:
            return False
        settled, state = COMPILATION.settled(self.names), COMPILATION.state(self.names)
        if self.groups:
            flag = torch.tensor([state])
            for group in self.groups:
                comm.all_reduce(flag, comm.ReduceOp.MIN, group=group)
            state = int(flag)
            settled = state != PENDING
        if settled:
            self.names = []
        return settled and (state == READY or not self.groups)


def with_kernels(step: StepGraph, fused: bool) -> StepGraph:
    """The graph with each region as a call of its kernel; as the calls that it stands for where it has none.

    Args:
        fused: whether kernels are used.
    """
    if not regions_of(step):
        return step
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in step.graph.nodes:
        if isinstance(node.target, Region):
            kernel = COMPILATION.kernels.get(COMPILATION.name(node.target)) if fused else None
            given = [copies[operand] for operand in node.args]
            if kernel is None:
                inner = dict(zip(node.target.graph.find_nodes(op="placeholder"), given, strict=True))
                copies[node] = graph.graph_copy(node.target.graph, inner)
            else:
                copies[node] = _called(graph, node, given, kernel)
        elif node.target is GETITEM and isinstance(copies[node.args[0]], tuple):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return StepGraph(lazy_graph_module(step.gm, graph), step.signature, step.stage)


def _called(graph: fx.Graph, node: fx.Node, given: list[fx.Node], kernel: Kernel) -> tuple[fx.Node, ...]:
    record, writes = info(node), []
    spaces = [record.value[0].new_empty(size, dtype=torch.uint8) for size in kernel.temporaries]
    for value in (*record.value, *spaces):
        how = {"dtype": value.dtype, "device": value.device}
        memory = add_call(graph, aten.empty_strided.default, (tuple(value.shape), value.stride()), how)
        writes.append(set_info(memory, replace(record, value=value)))
    call = add_call(graph, Functionalized(kernel, (1,)), (given, writes))  # type: ignore[arg-type]
    set_info(call, replace(record, value=(*record.value, *spaces), where=kernel.operators))
    results = []
    for index, value in enumerate(record.value):
        results.append(set_info(add_call(graph, GETITEM, (call, index)), replace(record, value=value)))
    return tuple(results)
