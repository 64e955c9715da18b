"""Buffers in the local view: rank 0's go to all ranks before a model's forward, as under DistributedDataParallel.

While a step is traced, each outermost call of a module that has something to train broadcasts the module's buffers, so
that the collectives are operators of the graph like any other; `pack_broadcasts` then sends those of one forward
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from wholestep import comm
from wholestep.ir import info
from wholestep.spmd.expand.graph_edits import readers
from wholestep.torch_compat import no_modes, set_versions
from wholestep.trace import Recorder, gradient_memory


class BufferBroadcast:
    """Broadcasts buffers while a step is traced, or where its Python runs at each call.

    DDP does so before each forward but those that come after one without gradients, or after one in `no_sync()`. Here
    that is one whose gradients the next backward adds to before anybody has read them. What the last forward of a step
    says counts for the first one of its next call: where it says no, the step is traced `again`.

    Args:
        groups: the ranks, along one axis after the other.
        accumulates: whether some of a module's parameters have gradients that nobody but a backward has read; as the
            trace shows it, where it is not given.
        at_once: inside of it, nothing is deferred.
    """

    def __init__(
        self, groups: Sequence[comm.ProcessGroup],
        accumulates: Callable[[Sequence[nn.Parameter]], bool] | None = None,
        at_once: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._groups, self._at_once = groups, at_once
        self._accumulates = accumulates or self._accumulates_in_trace
        self._quiet: set[int] = set()  # ids of modules whose first forward of a step does not broadcast
        self._due: dict[int, bool] = {}
        self._graded: set[int] = set()

    def begin(self, recorder: Recorder) -> None:
        """A trace begins."""
        self._recorder = recorder
        self._due, self._graded = {}, set()
        recorder.builder.provenance.outermost = self.forward

    def again(self) -> bool:
        """Whether the trace that has ended is to be made once more."""
        quiet = {key for key in self._graded if not self._due[key]}
        changed, self._quiet = quiet != self._quiet, quiet
        return changed

    def forward(self, module: nn.Module, begins: bool) -> None:
        """A forward inside of no other begins or ends."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:  # DDP does not take such a module
            return
        if begins:
            if self._due.get(id(module), id(module) not in self._quiet) and not self._accumulates(parameters):
                buffers = list(module.buffers())
                with self._at_once() if buffers else nullcontext():
                    self._broadcast(buffers)
            return
        self._due[id(module)] = torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self._graded.add(id(module))

    def _accumulates_in_trace(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether a backward of this step has left gradients that only backwards have read."""
        left = {gradient.after for gradient in self._recorder.builder.gradients}
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
