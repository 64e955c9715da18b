"""Lowered programs: of a whole step, or of a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from torch import fx

from wholestep.aot_autograd import Joint, Partitioned
from wholestep.ir import StepGraph, info
from wholestep.packed_graph import Packed
from wholestep.runtime.backward_programs import Backward, Run, consuming


@dataclass
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

    graph: InitVar[StepGraph]
    run: Run
    fingerprint: str
    backward: Backward | None = None
    consume: Callable[[list[Any]], Sequence[Any]] = field(init=False)
    packed: Packed = field(init=False)
    sizes: Any = field(init=False)
    placements: list[Any] = field(init=False)
    kept: list[Any] = field(init=False)

    def __post_init__(self, graph: StepGraph) -> None:
        self.consume = consuming(self.run)
        self.packed, self.sizes = Packed(graph), graph.signature.sizes
        self.placements = [info(node).placement for node in graph.placeholders]
        self.kept = [info(node).placement if isinstance(node, fx.Node) else None for node in graph.outputs]
        keep = getattr(self.run, "keep", None)
        if keep is not None and self.backward is None:  # else it is the program of another graph, of the forward
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


def saved_places(joint: Joint, halves: Partitioned) -> list[tuple[str, int]]:
    """Where each saved value is found once the forward has run; see `Backward.saved`."""
    inputs = {node.name: i for i, node in enumerate(joint.primals)}
    outputs: dict[str, int] = {}
    for index, node in enumerate(joint.forward_outputs):
        outputs.setdefault(node.name, index)
    places: list[tuple[str, int]] = []
    extra = joint.n_forward
    for name in halves.saved:
        if name in inputs:
            places.append(("input", inputs[name]))
        elif name in outputs:
            places.append(("output", outputs[name]))
        else:
            places.append(("output", extra))
            extra += 1
    return places
