"""Lowered programs, of a whole step, or of a forward and its backward; the memory that calls and captures give up."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep.ir import InputKind, StepGraph, info
from wholestep.packed_graph import Packed
from wholestep.runtime.backward_programs import Backward, Run, consuming
from wholestep.trace import Traced


class Program:
    """A graph after all passes and the callable that a backend made of it.

    Args:
        graph: the whole graph; the joint graph of a program with a backward.

    Attributes:
        run: inputs -> outputs; then, with a backward, the values that only the forward has to save.
        consume: the same for a list of inputs, which it may let go of as soon as they are read.
        packed: the graph, pickled.
        sizes: what was decided on symbolic sizes, where it may serve many.
        placements, kept: of each input and of each output, as the graph's records have them.
    """

    def __init__(self, graph: StepGraph, run: Run, backward: Backward | None = None) -> None:
        self.run, self.consume, self.backward = run, consuming(run), backward
        self.packed = Packed(graph)
        self.sizes: Any = graph.signature.sizes
        self.placements = [info(node).placement for node in graph.placeholders]
        self.kept = [info(node).placement if isinstance(node, fx.Node) else None for node in graph.outputs]
        keep = getattr(run, "keep", None)
        if keep is not None and backward is None:  # else it is the program of another graph, of the forward
            keep(self.packed)

    @property
    def step(self) -> StepGraph:
        """The graph, unpacked for as long as somebody holds it."""
        return self.packed.unpack()

    def release_memory(self) -> None:
        """Gives back the memory that it works in, until the next call."""
        for run in (self.run, *(s.run for s in (self.backward.served.values() if self.backward else ()))):
            release = getattr(run, "release_memory", None)
            if release is not None:
                release()

    @property
    def code(self) -> str:
        """The program as text: what the backend generated, or the graph's own code; forward, then backward."""
        if self.backward is None:
            return _text(self.run, self.step)
        forward = _text(self.run, self.backward.halves.forward)
        return f"{forward}\n\n{_text(self.backward.run, self.backward.halves.backward)}"


def _text(run: Run, step: StepGraph) -> str:
    return str(getattr(run, "code", "") or step.gm.code)


# What lasts from call to call is somebody else's to free.
LASTING: frozenset[InputKind] = frozenset(["parameter", "buffer", "state", "grad", "generator", "number"])


@dataclass(frozen=True)
class DonatedInputs:
    """Which tensors of a list, its first argument, each call donates.

    Attributes:
        items: indices of the inputs that nothing looks at again once the program has.
        freed: those of them that a program reads, and may free.
        kept: positions in the list that the replay of effects still looks at.
    """

    items: frozenset[int] = frozenset()
    freed: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()

    def take(self, given: list[Any], values: list[Any]) -> None:
        """Takes out of the list, and of the values bound for a call, what the call gives up."""
        given[:] = [tensor if i in self.kept else None for i, tensor in enumerate(given)]
        for index in self.items:
            values[index] = None


def donated_inputs(traced: Traced, count: int, read: Collection[str]) -> DonatedInputs:
    """What a call may donate.

    Args:
        count: length of the list.
        read: paths of what effects and result are made from.
    """
    signature = traced.step.signature
    looked_at = {i for alias in traced.aliases if (i := alias.input) is not None} | set(signature.mutations.values())
    looked_at |= {*traced.versions, *(i for i, _ in traced.moved)}
    looked_at |= {i for i, before, after in traced.storage_sizes if before != after}
    paths = [f"args[0][{i}]" for i in range(count)]
    kept = frozenset(i for i, path in enumerate(paths) if any(path in r for r in read))  # in its middle, too
    donated = {path for i, path in enumerate(paths) if i not in kept}
    sources = [item.source.path for item in traced.inputs]
    items = frozenset(i for i, path in enumerate(sources) if path in donated and i not in looked_at)
    freed = frozenset(i for i in items if i < traced.n_inputs and signature.inputs[i].kind not in LASTING)
    return DonatedInputs(items, freed, kept)


try:
    _trim: Any = ctypes.CDLL(None).malloc_trim  # of the GNU C library
except (AttributeError, OSError):
    _trim = None


def give_back() -> None:
    """Frees cycles among new objects (graphs, snapshots), then hands free pages back to the system.

    A capture under `no_collection` has all of its objects among the new ones, which alone are searched. Without this,
    the first steps of a GPT of 3 M parameters peak 20 MB higher.
    """
    gc.collect(0)
    if _trim is not None:
        _trim(0)
