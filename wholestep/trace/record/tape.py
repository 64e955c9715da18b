"""The tape: the graph under construction, its placeholders, and the memory of the tensors that it makes."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from wholestep.fake_layouts import strict_fake_mode
from wholestep.ir import Gradient, Input, InputKind, NodeInfo, set_info
from wholestep.torch_compat import below_autograd, empty_fake, no_modes, sequence_number
from wholestep.trace.functionalize.aliases import Geometry, Ref, Storage
from wholestep.trace.numbers.symbolic_sizes import held
from wholestep.trace.outputs.leaks import Watch
from wholestep.trace.record.options import Setting
from wholestep.trace.record.provenance import user_line


class Tape:
    """The graph of one run of a step."""

    def __init__(self, setting: Setting) -> None:
        sizes = setting.sizes
        self.whereabouts, self.sizes = setting.whereabouts, sizes
        self.graph = fx.Graph()
        self.fake_mode = sizes.mode if sizes else strict_fake_mode()
        self.inputs: list[Input] = []
        self.taken: set[str] = set()
        self.constants: dict[str, torch.Tensor] = {}
        self.gradients: list[Gradient] = []
        self.last_placeholder: fx.Node | None = None
        self.watch = Watch()

    def emit(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, value: Any = None
    ) -> fx.Node:
        """Adds a call; runs it on the fake values of its arguments unless the value is given."""
        kwargs = kwargs or {}
        if value is None:
            value = self._run(target, args, kwargs)
        if self.sizes is not None:
            args, kwargs = map_leaves(held, args), map_leaves(held, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        return set_info(node, self._record(value))

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fakes = map_leaves(fake_value, args), map_leaves(fake_value, kwargs)
        with self.fake_mode, torch.no_grad(), below_autograd():
            return target(*fakes[0], **fakes[1])

    def note(self) -> int:
        """Notes whose module the autograd node belongs to that was made last; gives its sequence number.

        Autograd makes an operator's node before it calls the operator.
        """
        seq = max(sequence_number() - 1, 0)
        self.whereabouts.module_of_seq.setdefault(seq, self.whereabouts.module())
        return seq

    def _record(self, value: Any) -> NodeInfo:
        place = self.whereabouts
        seq = place.seq()
        if seq is None:
            seq, module = self.note(), place.module()
        else:
            module = place.module_of_seq.get(seq, "")
        return NodeInfo(value, place.phase(), seq, user_line(), module)

    def placeholder(self, source: Any, kind: InputKind, value: Any) -> fx.Node:
        """A new input of the graph, after those there are."""
        with no_modes():  # a source may print a tensor
            source = str(source)
        name = self._name(source)
        position = self.last_placeholder
        with self.graph.inserting_after(position) if position else self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(name)
        self.last_placeholder = node
        self.inputs.append(Input(str(node.target), source, kind))
        return set_info(node, NodeInfo(value))

    def _first(self) -> fx.Node | None:
        return next(iter(self.graph.nodes), None)

    def _name(self, source: str) -> str:
        name = re.sub(r"\W+", "_", re.sub(r"^[LGC]\['(\w+)'\]", r"\1", source)).strip("_") or "value"
        if name[0].isdigit() or keyword.iskeyword(name):
            name = f"v_{name}"
        unique, count = name, 1
        while unique in self.taken:
            unique, count = f"{name}_{count}", count + 1
        self.taken.add(unique)
        return unique

    def root(self, fake: torch.Tensor, node: fx.Node) -> Ref:
        """Makes a tensor the root of memory of its own, with a node's value as content."""
        storage = Storage(node)
        ref = Ref(storage, Geometry.of(fake), node=node, generation=0)
        storage.root = ref
        fake.wholestep_ref = ref  # type: ignore[attr-defined]
        return ref

    def constant(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that the step builds from Python numbers: a constant of the graph."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = real.detach().clone()
        with self.fake_mode:
            fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)
        node = set_info(self.graph.get_attr(name), self._record(self.value(fake)))
        self.root(fake, node)
        return fake

    def value(self, fake: torch.Tensor) -> torch.Tensor:
        """A fake of the same geometry for the graph to keep: the step's own tensor and memory can die."""
        if fake.layout != torch.strided or fake.is_conj() or fake.is_neg():
            with self.fake_mode, torch.no_grad(), below_autograd():
                return fake.detach()
        return empty_fake(self.fake_mode, fake)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to the leaves of nested lists, tuples and dicts."""
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return tuple(map_leaves(function, item) for item in tree)
    if isinstance(tree, list):
        return [map_leaves(function, item) for item in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if isinstance(tree, (tuple, list, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(item)
    else:
        yield tree


def fake_value(leaf: Any) -> Any:
    """What a node of the graph stands for while it is traced; anything else as it is."""
    return leaf.meta["info"].value if isinstance(leaf, fx.Node) else leaf
