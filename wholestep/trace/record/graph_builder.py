"""The graph under construction: its calls, placeholders and constants, each with a record of where it comes from."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import fx

from wholestep.fake_evaluate import alone, evaluate, is_plain
from wholestep.fake_layouts import strict_fake_mode
from wholestep.ir import Gradient, Input, InputKind, NodeInfo, add_call, set_info
from wholestep.nested import map_leaves
from wholestep.torch_compat import below_autograd, no_modes, sequence_number
from wholestep.trace.functionalize.aliases import Ref, new_root
from wholestep.trace.numbers.symbolic_sizes import Sizes, held
from wholestep.trace.outputs.leaks import Watch
from wholestep.trace.record.provenance import Provenance
from wholestep.trace.record.user_line import user_line


class GraphBuilder:
    """Writes the graph of one run of a step.

    Args:
        provenance: follows modules and optimizers.
        sizes: holds the symbols of tensors whose sizes are some.

    Attributes:
        fake_mode: that of all fake tensors of the run.
        inputs: one for each placeholder.
        gradients: which gradients each backward of the step left, for data parallelism.
        watch: weak references to what must not outlive the trace.
        replayed: where calls are made that were recorded before, the record of the one under way.
    """

    replayed: NodeInfo | None = None

    def __init__(self, provenance: Provenance, sizes: Sizes | None = None) -> None:
        self.provenance, self.sizes = provenance, sizes
        self.graph = fx.Graph()
        self.fake_mode = sizes.mode if sizes else strict_fake_mode()
        self.inputs: list[Input] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.gradients: list[Gradient] = []
        self.watch = Watch()
        self._last_placeholder: fx.Node | None = None

    def emit(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, value: Any = None
    ) -> fx.Node:
        """Adds a call; runs it on the fake values of its arguments unless the value is given."""
        kwargs = kwargs or {}
        if value is None:
            value = evaluate(self.fake_mode, target, args, kwargs)
        if self.sizes is not None:
            args, kwargs = map_leaves(held, args), map_leaves(held, kwargs)
        return set_info(add_call(self.graph, target, args, kwargs), self._record(value))

    def since(self, count: int) -> list[fx.Node]:
        """The nodes that were added when there were so many."""
        return [*islice(reversed(self.graph.nodes), len(self.graph.nodes) - count)][::-1]

    def note_module(self) -> int:
        """Notes whose module the autograd node belongs to that was made last; gives its sequence number.

        Autograd makes an operator's node before it calls the operator.
        """
        seq = (sequence_number() or 1) - 1
        self.provenance.module_of_seq.setdefault(seq, self.provenance.module())
        return seq

    def _record(self, value: Any) -> NodeInfo:
        if self.replayed is not None:
            return replace(self.replayed, value=value)
        place = self.provenance
        line = user_line() if place.called is None else place.called.line(sys._getframe(1))
        seq = place.seq()
        if seq is None:
            seq, module = self.note_module(), place.module()
        else:
            module = place.module_of_seq.get(seq, "")
        return NodeInfo(value, place.phase(), seq, line, module)

    def placeholder(self, source: Any, kind: InputKind, value: Any, **wrapped: Any) -> fx.Node:
        """A new input of the graph, after those there are."""
        with no_modes():  # a source may print a tensor
            source = str(source)
        name = re.sub(r"\W+", "_", re.sub(r"^[LGC]\['(\w+)'\]", r"\1", source)).strip("_") or "value"
        last, at = self._last_placeholder, self.graph
        with at.inserting_after(last) if last else at.inserting_before(next(iter(at.nodes), None)):
            node = self._last_placeholder = self.graph.placeholder(f"v_{name}" if name[0].isdigit() else name)
        node.target = node.name  # which is one of its own
        self.inputs.append(Input(str(node.target), source, kind, **wrapped))
        return set_info(node, NodeInfo(value))

    def root(self, fake: torch.Tensor, node: fx.Node) -> Ref:
        """Makes a tensor the root of memory of its own, with a node's value as content."""
        return new_root(fake, node, self.emit)

    def constant(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that the step builds from Python numbers: a constant of the graph."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = real.detach().clone()
        with self.fake_mode:
            fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)
        self.root(fake, set_info(self.graph.get_attr(name), self._record(self.detached(fake))))
        return fake

    def detached(self, value: Any) -> Any:
        """A fake of the same geometry for the graph to keep: the step's own tensor and memory can be freed."""
        if not isinstance(value, torch.Tensor):
            return value
        if not is_plain(value):
            with self.fake_mode, torch.no_grad(), below_autograd():
                return value.detach()
        return alone(self.fake_mode, value)


def fake_value(leaf: Any) -> Any:
    """What a node of the graph stands for while it is traced; anything else as it is."""
    return leaf.meta["info"].value if isinstance(leaf, fx.Node) else leaf
