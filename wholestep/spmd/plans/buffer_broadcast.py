"""Buffers in the local view: rank 0's go to all ranks before a model's forward, as under DistributedDataParallel.

While a step is traced, each outermost call of a module that has something to train broadcasts the module's buffers, so
that the collectives are operators of the graph like any other; a pass then sends those of one forward together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from wholestep import comm
from wholestep.ir import StepGraph, info, nbytes, set_info
from wholestep.spmd.expand.graph_edits import call, copy_step, readers
from wholestep.torch_compat import no_modes, set_versions
from wholestep.trace import Recorder, gradient_memory

aten = torch.ops.aten
collectives = torch.ops.wholestep


class BufferSync:
    """Broadcasts buffers while a step is traced.

    DDP does so before each forward but those that come after one without gradients, or after one in `no_sync()`. Here
    that is one whose gradients the next backward adds to before anybody has read them. What the last forward of a step
    says counts for the first one of its next call: where it says no, the step is traced `again`.

    Args:
        groups: the ranks, along one axis after the other.
    """

    def __init__(self, groups: Sequence[comm.ProcessGroup]) -> None:
        self._groups = groups
        self._quiet: set[int] = set()  # ids of modules whose first forward of a step does not broadcast

    def begin(self, recorder: Recorder) -> None:
        """A trace begins."""
        self._recorder = recorder
        self._due: dict[int, bool] = {}
        self._graded: set[int] = set()
        recorder.whereabouts.outermost = self._forward

    def again(self) -> bool:
        """Whether the trace that has ended is to be made once more."""
        quiet = {key for key in self._graded if not self._due[key]}
        changed, self._quiet = quiet != self._quiet, quiet
        return changed

    def _forward(self, module: nn.Module, begins: bool) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:  # DDP does not take such a module
            return
        if begins:
            if self._due.get(id(module), id(module) not in self._quiet) and not self._accumulates(parameters):
                self._broadcast(list(module.buffers()))
            return
        self._due[id(module)] = torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self._graded.add(id(module))

    def _accumulates(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether a backward of this step has left gradients that only backwards have read."""
        left = {gradient.after for gradient in self._recorder.gradients}
        with no_modes():
            memories = [gradient_memory(self._recorder, p.grad) for p in parameters]
        return any(m.name in left and all(info(r).phase == "backward" for r in readers(m)) for m in memories if m)

    def _broadcast(self, buffers: Sequence[torch.Tensor]) -> None:
        versions = tuple(b._version for b in buffers)
        with torch.no_grad():
            for group in self._groups:
                for buffer in buffers:
                    comm.broadcast(buffer.detach(), group=group, group_src=0)
        with no_modes():
            set_versions(tuple(buffers), versions)


def pack_broadcasts(step: StepGraph) -> StepGraph:
    """Sends as one what one rank broadcasts to the same ranks before any of it is needed, of whatever dtypes."""
    step = copy_step(step, "pack_broadcasts")
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    packs: dict[Any, list[_Pack]] = {}
    for node in place:
        waits = [u for u in node.users if u.target is collectives.wait.default]
        if node.target is not collectives.broadcast.default or len(node.users) != 1 or not waits or not waits[0].users:
            continue
        first = min(waits[0].users, key=place.__getitem__)
        alike = packs.setdefault((node.args[1:], info(node).value.device), [])
        sent: Any = node.args[0]
        if not alike or place[sent] > place[alike[-1].first] or any(sent is wait for _, wait in alike[-1].pairs):
            alike.append(_Pack(first))
        alike[-1].pairs.append((node, waits[0]))
        alike[-1].first = min(alike[-1].first, first, key=place.__getitem__)
    for pack in (pack for alike in packs.values() for pack in alike if len(pack.pairs) > 1):
        pack.write(step.graph)
    step.graph.lint()
    step.gm.recompile()
    return step


@dataclass
class _Pack:
    """Broadcasts, each with its wait, that become one right before their first reader."""

    first: fx.Node
    pairs: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def write(self, graph: fx.Graph) -> None:
        record = info(self.pairs[0][0])

        def add(target: Any, *args: Any) -> fx.Node:
            return call(graph, target, *args, phase=record.phase, where=record.where, module=record.module)

        pairs = sorted(self.pairs, key=lambda pair: -info(pair[0]).value.itemsize)  # each at a multiple of its size
        with graph.inserting_before(self.first):
            flat = [add(aten.reshape.default, start.args[0], [-1]) for start, _ in pairs]
            sent = add(aten.cat.default, [add(aten.view.dtype, one, torch.uint8) for one in flat])
            started = add(collectives.broadcast.default, sent, *pairs[0][0].args[1:])
            set_info(started, replace(info(started), placement=tuple(str(start.args[0]) for start, _ in pairs)))
            done, begin = add(collectives.wait.default, started), 0
            for start, wait in pairs:
                value, size = info(wait).value, nbytes(info(wait).value)
                piece = add(aten.slice.Tensor, done, 0, begin, begin := begin + size)
                new = add(aten.view.default, add(aten.view.dtype, piece, value.dtype), list(value.shape))
                set_info(new, replace(info(new), placement=info(wait).placement))
                wait.replace_all_uses_with(new)
                graph.erase_node(wait)
                graph.erase_node(start)
