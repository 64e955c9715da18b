"""Inputs: the real tensors, numbers and generators that a step reads, each a placeholder from its first use on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.capture import Snapshot, TensorInput
from wholestep.capture.guards.compared_values import memory, metadata
from wholestep.errors import CaptureError, UnsupportedError
from wholestep.fake_evaluate import results
from wholestep.functional import OFFSETS
from wholestep.ir import InputKind
from wholestep.marks import wrapped_as
from wholestep.nested import leaves, map_leaves
from wholestep.torch_compat import HOOK_TABLES, IS_VIEW, FakeTensor, fake_of, generator_id, is_zero_tensor, no_modes
from wholestep.trace.functionalize.aliases import Geometry, Ref, elements
from wholestep.trace.record.graph_builder import GraphBuilder, fake_value

# What Python may ask a tensor from outside without reading it, and how it is answered.
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "storage offset": torch.Tensor.storage_offset, "being a view": IS_VIEW, "inference mode": torch.Tensor.is_inference,
    "base": lambda tensor: None if tensor._base is None else metadata(tensor._base),
    "bytes of memory": lambda tensor: tensor.untyped_storage().nbytes(),
    "elements of memory": lambda tensor: flat_memory(tensor).numel(),
}  # fmt: skip


@dataclass(eq=False)
class TracedInput:
    """One input: a real tensor with its fake, a number, a generator, or memory that several tensors share.

    Attributes:
        source: where the value is found (for shared memory, where its first member is).
        ref: itself as a view of its storage.
        members: the tensors in a shared memory, whose value is then the memory as one flat tensor.
        index: its position among the inputs.
    """

    node: fx.Node
    source: Any
    value: torch.Tensor | torch.Generator | float
    ref: Ref | None = None
    fake: Any = None
    members: list[torch.Tensor] = field(default_factory=list)
    index: int = -1

    @property
    def is_written(self) -> bool:
        """Whether the step writes to its memory."""
        return self.ref is not None and self.ref.storage.generation > 0


class Inputs:
    """The inputs of one run, and what operators read of them.

    Args:
        world: tells where real tensors are found.
        shared: memories that several inputs share, of which one is written; each becomes one input.

    Attributes:
        items: the inputs, in the order of their first use.
        by_id: id of a real tensor -> its input.
        reached: memory -> an input in it beyond whose elements the step reads.
        moved: id of a tensor that was given other memory, by `tensor.data = other` -> its input, and itself there.
        asked: (id of an input, a question of `QUESTIONS` that the graph or Python has asked of it) -> the input.
        on_new: called with each new input that is a tensor.
    """

    def __init__(self, builder: GraphBuilder, world: Snapshot, shared: frozenset[int] = frozenset()) -> None:
        self.builder, self.world, self.shared = builder, world, shared
        self.items: list[TracedInput] = []
        self.by_id: dict[int, TracedInput] = {}
        self.reached: dict[int, TracedInput] = {}
        self.moved: dict[int, tuple[TracedInput, TracedInput]] = {}
        self.asked: dict[tuple[int, str], TracedInput] = {}
        self.on_new: Callable[[TracedInput, torch.Tensor], None] = lambda item, tensor: None
        self._flat: dict[int, TracedInput] = {}
        self._generators: dict[int, TracedInput] = {}
        self._symbolic: list[tuple[torch.Tensor, bool, dict[str, Any]]] = []  # fakes, with their flag and attributes

    def add(self, item: TracedInput) -> TracedInput:
        """Adds an input; memory that it is the root of is known by it."""
        item.index = len(self.items)
        if item.ref is not None and item.ref.parent is None:
            item.ref.storage.input = item.index
        self.items.append(item)
        return item

    def _root(self, name: Any, source: Any, kind: InputKind, value: torch.Tensor, fake: torch.Tensor) -> TracedInput:
        wrapped = wrapped_as(value) if kind == "parameter" else {}
        node = self.builder.placeholder(name, kind, fake, **wrapped)
        return self.add(TracedInput(node, source, value, self.builder.root(fake, node), fake))

    def number(self, source: Any, value: float) -> TracedInput:
        """A Python number as an input."""
        return self.add(TracedInput(self.builder.placeholder(source, "number", value), source, value))

    def generator(self, generator: torch.Generator) -> fx.Node | None:
        """The input that a random generator which the step can see is, or becomes; None for the default generator."""
        key = generator_id(generator)
        if key == generator_id(torch.default_generator):
            return None
        found = self.world.reachable.generators.get(key)
        if found is None:
            what = "a random operator with a generator that the step makes, or that is out of its sight"
            raise UnsupportedError(what, "make it before the step")
        if self.world.substitutes.parts:
            what = "a random operator with its own generator, in a step that is spread over ranks"
            raise UnsupportedError(what, "draw from torch's default generator")
        if key not in self._generators:
            node = self.builder.placeholder(found[1], "generator", None)
            self._generators[key] = self.add(TracedInput(node, found[1], found[0]))
        return self._generators[key].node

    def with_symbolic_sizes(self, found: TensorInput) -> torch.Tensor:
        """An input that the step is given as a fake with symbolic sizes."""
        assert self.builder.sizes is not None
        fake = self.builder.sizes.fake(found.tensor, found.source)
        self.by_id[id(fake)] = self._root(found.source, found.source, found.kind, fake, fake)
        self._symbolic.append((fake, bool(fake.requires_grad), vars(fake) | vars(found.tensor)))
        return fake

    def refuse_changed(self) -> None:
        """Refuses what a step did to the Python object of a fake with symbolic sizes: the real tensor lacks it."""
        for fake, required, attributes in self._symbolic:
            hooked = any(getattr(fake, name) for name in HOOK_TABLES)
            now = {name: value for name, value in vars(fake).items() if not name.startswith(("_", "wholestep_"))}
            set_anew = any(name not in attributes or attributes[name] is not now[name] for name in now)
            flag = fake.is_leaf and fake.requires_grad != required
            if (fake.is_leaf and fake.grad is not None) or hooked or flag or set_anew:
                source = self.by_id[id(fake)].source
                raise UnsupportedError(f"{source}, of symbolic size, gets a gradient, a hook, a flag or an attribute")

    def ref(self, tensor: torch.Tensor) -> Ref:
        """A tensor that the step uses, as a view of its storage."""
        if isinstance(tensor, FakeTensor):
            found: Ref | None = getattr(tensor, "wholestep_ref", None)
            if found is None and getattr(tensor, "fake_mode", None) is not self.builder.fake_mode:
                raise UnsupportedError(
                    f"the step reads a fake tensor of shape {list(tensor.shape)} from outside",
                    "give models of fake tensors to explain(), as arguments of the step; they have no values to run on",
                )
            if found is None:
                raise UnsupportedError("an operator's result was made outside of the recorder")
            return found
        item = self.of(tensor)
        assert item.ref is not None
        return item.ref

    def read(self, tensor: torch.Tensor) -> fx.Node:
        """The node that holds a tensor's content now."""
        return self.ref(tensor).read()

    def of(self, tensor: torch.Tensor) -> TracedInput:
        """The input that a real tensor is, or becomes.

        Raises:
            CaptureError: it is found nowhere, or tracing cannot follow it.
        """
        known = self.by_id.get(id(tensor))
        if known is None:
            found = self._found(tensor)
            if memory(tensor) in self.shared:
                known = self._member(tensor, found)
            else:
                fake = fake_of(self.builder.fake_mode, tensor)
                known = self._root(found.source, found.source, found.kind, tensor, fake)
            self.by_id[id(tensor)] = known
            self.on_new(known, tensor)
        return known

    def move(self, tensor: torch.Tensor, there: torch.Tensor) -> None:
        """``tensor.data = there``: a tensor from outside lies in the memory of a fake from here on."""
        before = self.moved[id(tensor)][0] if id(tensor) in self.moved else self.of(tensor)
        self.by_id[id(tensor)] = TracedInput(before.node, before.source, tensor, self.ref(there), there)
        self.moved[id(tensor)] = before, self.by_id[id(tensor)]

    def _found(self, tensor: torch.Tensor) -> TensorInput:
        found = self.world.find(tensor)
        if found is None:
            raise CaptureError(
                f"the step reads a tensor of shape {list(tensor.shape)} that none of its arguments, closures, "
                "globals, modules or optimizers holds, so a replay could not find its value",
                "pass the tensor to the step as an argument; if a library keeps it, compile the parts beside it",
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
            raise UnsupportedError(f"{found.source} holds a {kind} tensor between calls", "use dense tensors")
        if is_zero_tensor(tensor):
            what = f"{found.source} is zeros without memory, as forward-mode differentiation makes them"
            raise UnsupportedError(what, "pass zeros with memory: torch.zeros_like(x)")
        if found.unlike:
            what = f"{found.source} has a history, and is a view of a tensor that the step can see too"
            raise UnsupportedError(what, "make the view inside of the step, or pass it detached")
        begins_inside = found.detached or tensor._base is not None or id(tensor) in self.world.substitutes.aliases.found
        if tensor.requires_grad and not tensor.is_leaf and not begins_inside:
            raise UnsupportedError(
                f"{found.source} is the result of an earlier differentiable computation",
                "compute it inside of the step, or pass it detached",
            )
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            what = f"{found.source} is a {type(tensor).__name__}, a tensor subclass"
            raise UnsupportedError(what, "pass a plain tensor: x.as_subclass(torch.Tensor)")
        return found

    def _member(self, tensor: torch.Tensor, found: TensorInput) -> TracedInput:
        """A tensor in a memory that other inputs share: a view of the memory, which is the input."""
        address = memory(tensor)
        if address not in self._flat:
            flat = flat_memory(tensor)
            fake = fake_of(self.builder.fake_mode, flat)
            self._flat[address] = self._root(f"memory of {found.source}", found.source, found.kind, flat, fake)
        base = self._flat[address]
        self.asked[id(base), "elements of memory"] = base
        assert base.ref is not None
        if tensor.dtype != base.ref.geometry.dtype:
            raise UnsupportedError(f"{found.source} shares written memory under another dtype")
        base.members.append(tensor)
        ref = base.ref.strided(Geometry.of(tensor))
        with no_modes(), self.builder.fake_mode, torch.no_grad():  # a collective asks, with the recorder on
            view = torch.as_strided(base.fake, *ref.args)
        item = TracedInput(base.node, found.source, tensor, ref, view)
        self.asked[id(item), "storage offset"] = item
        return item

    def check_reach(self, place: Geometry, root: Ref) -> None:
        """Notes that a view reaches beyond the elements of an input: its memory has to be an input then."""
        here, index = root.geometry, root.storage.input
        inside = here.offset <= place.offset and place.offset + place.extent <= here.offset + here.extent
        inside = inside and (here.is_dense or place == here)  # else it may reach what lies between them
        if index is None or inside or place.dtype != here.dtype or not elements(place.shape):
            return
        item = self.items[index]
        if isinstance(item.value, torch.Tensor) and not isinstance(item.value, FakeTensor) and not item.members:
            self.reached[memory(item.value)] = item

    def read_offset(self, tensor: torch.Tensor) -> None:
        """The storage offset of an input, or of a view of one, decides what the step does: it becomes a guard."""
        if isinstance(tensor, FakeTensor):
            ref = getattr(tensor, "wholestep_ref", None)
        else:
            with no_modes():  # Python asks, with the recorder on
                ref = self.ref(tensor) if self.world.find(tensor) is not None else None
        item = self.items[ref.storage.input] if ref is not None and ref.storage.input is not None else None
        if item is not None and isinstance(item.value, FakeTensor):
            raise UnsupportedError(f"the storage offset of {item.source}, of symbolic size, is read")
        if item is not None and not item.members:
            self.asked[id(item), "storage offset"] = item

    def ask(self, tensor: torch.Tensor, question: str) -> Any:
        """The answer to one of `QUESTIONS` about an input, which decides what the step does: it becomes a guard."""
        with no_modes():  # Python asks, with the recorder on
            item = self.of(tensor)
        if isinstance(item.value, FakeTensor):
            raise UnsupportedError(f"the step asks {item.source}, of symbolic size, for its {question}")
        if id(tensor) in self.moved:
            raise UnsupportedError(f"the step assigns .data of {item.source}, and asks it for its {question}")
        self.asked[id(item), question] = item
        return QUESTIONS[question](self.world.substitutes.original(tensor))

    def counted_from_first(self, func: Any, args: Any) -> Any:
        """The arguments of an operator, with its offset from the operand's first element, as graphs have it."""
        place = OFFSETS.get(func, len(args))
        if place >= len(args) or args[place] is None:
            return args
        self.read_offset(args[0])
        return (*args[:place], args[place] - args[0].storage_offset(), *args[place + 1 :])

    def fake(self, leaf: Any) -> Any:
        """The fake tensor or number that an argument stands for while it is traced."""
        if isinstance(leaf, torch.Tensor):
            self.ref(leaf)
            return leaf if isinstance(leaf, FakeTensor) else self.by_id[id(leaf)].fake
        return fake_value(leaf)

    def operand(self, leaf: Any) -> Any:
        """An argument as the graph has it: for a tensor the node that holds its content now."""
        return self.ref(leaf).read() if isinstance(leaf, torch.Tensor) else leaf

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on fakes."""
        out = results(self.builder.fake_mode, func, map_leaves(self.fake, args), map_leaves(self.fake, kwargs))
        made = (t for t in leaves(out) if isinstance(t, torch.Tensor) and not hasattr(t, "wholestep_ref"))
        self.builder.watch.add(made)
        return out

    def describe(self, tensor: torch.Tensor) -> str:
        """What errors call a tensor."""
        item = self.by_id.get(id(tensor))
        return str(item.source) if item else f"a tensor of shape {list(tensor.shape)}"


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory of a tensor, as one flat view of its dtype that shares its version counter."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
