"""From what a traced step returned and left behind to a graph's outputs.

Every tensor that outlives the step is a *slot*: an output of the graph, or a view of one, or a view of an
input. Results and effects refer to slots, so that one tensor that is both a result and a parameter's
gradient is one object again after a replay.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from wholestep.errors import LeakError
from wholestep.torch_compat import FakeTensor
from wholestep.trace.alias import same_geometry
from wholestep.trace.recorder import Recorder
from wholestep.trace.where import user_line


@dataclass(frozen=True)
class Slot:
    """How a replay makes one tensor that outlives the step.

    Attributes:
        output: index of the graph's output that holds its memory, or None.
        input: index of the input in whose memory it lies, or None.
        geometry: (size, stride, offset from the start of that output or input) for a view, None for the
            whole of it.
        requires_grad: as eager leaves it; `leaf` tells whether it then has a `grad_fn`.
        version: in-place writes that its version counter counts.
        is_view: whether autograd knows it as a view of another tensor.
    """

    output: int | None = None
    input: int | None = None
    geometry: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    requires_grad: bool = False
    leaf: bool = True
    version: int = 0
    is_view: bool = False


@dataclass(frozen=True)
class SlotRef:
    """Stands for a slot's tensor in the results."""

    index: int


@dataclass(frozen=True)
class InputRef:
    """Stands for an input itself."""

    index: int


@dataclass(frozen=True)
class HostRef:
    """Stands for a Python number that the graph computes at an output."""

    output: int


class Outlet:
    """Collects the graph's outputs and the slots that refer to them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.outputs: list[fx.Node] = []
        self.slots: list[Slot] = []
        self.by_tensor: dict[int, int] = {}
        self.by_storage: dict[int, int] = {}
        self.keep: list[Any] = []

    def slot(self, tensor: torch.Tensor) -> int:
        """The index of the slot for a tensor made in the step."""
        known = self.by_tensor.get(id(tensor))
        if known is not None:
            return known
        ref = self.recorder.ref(tensor)
        storage, root = ref.storage, ref.storage.root
        assert root is not None
        geometry = None
        if not (same_geometry(root.fake, ref.fake) and root.fake.storage_offset() == ref.fake.storage_offset()):
            offset = ref.fake.storage_offset() - root.fake.storage_offset()
            if ref.fake.dtype != root.fake.dtype or ref.fake.is_conj() or ref.fake.is_neg():
                return self._add(tensor, Slot(self._output(ref.read(self.recorder.emit)), None, None, *_autograd(tensor)))
            geometry = (tuple(ref.fake.shape), tuple(ref.fake.stride()), offset)
        if storage.input is not None:
            slot = Slot(None, storage.input, geometry or _whole(ref.fake), *_autograd(tensor))
        else:
            if id(storage) not in self.by_storage:
                self.by_storage[id(storage)] = self._output(root.read(self.recorder.emit))
            slot = Slot(self.by_storage[id(storage)], None, geometry, *_autograd(tensor))
        return self._add(tensor, slot)

    def _add(self, tensor: torch.Tensor, slot: Slot) -> int:
        self.slots.append(slot)
        self.by_tensor[id(tensor)] = len(self.slots) - 1
        self.keep.append(tensor)
        return len(self.slots) - 1

    def _output(self, node: fx.Node) -> int:
        if node.op == "get_attr":  # each call gives memory of its own
            node = self.recorder.emit(torch.ops.aten.clone.default, (node,))
        self.outputs.append(node)
        return len(self.outputs) - 1

    def leaf(self, value: Any) -> Any:
        """What stands in the result's template for one of its leaves."""
        if isinstance(value, FakeTensor):
            return SlotRef(self.slot(value))
        if isinstance(value, torch.Tensor):
            lifted = self.recorder.by_id.get(id(value)) or self.recorder._lift(value)
            if lifted not in self.recorder.lifted:  # it lies in shared memory: lift it for its identity alone
                self.recorder.lifted.append(lifted)
            return InputRef(self.recorder.lifted.index(lifted))
        if isinstance(value, (torch.SymFloat, torch.SymInt)):
            return HostRef(self._output(value.node.fx_node))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: self.template(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return Dataclass(type(value), fields)
        holds = [name for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, FakeTensor)]
        if holds:
            raise LeakError(
                f"the step returns a {type(value).__name__} whose attribute {holds[0]!r} is a tensor of the step",
                user_line(),
                "return tensors in dicts, lists, tuples or dataclasses",
            )
        return value

    def template(self, value: Any) -> Any:
        """The result with references in place of tensors."""
        leaves, spec = pytree.tree_flatten(value)
        if spec.is_leaf():
            return self.leaf(value)
        return Tree(spec, [self.leaf(leaf) for leaf in leaves])


@dataclass(frozen=True)
class Tree:
    """A nested container and its leaves."""

    spec: Any
    leaves: list[Any]


@dataclass(frozen=True)
class Dataclass:
    """A dataclass instance that is no registered container."""

    type: type
    fields: dict[str, Any]


def _autograd(tensor: torch.Tensor) -> tuple[bool, bool, int, bool]:
    return tensor.requires_grad, tensor.is_leaf, tensor._version, tensor._is_view()


def _whole(fake: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(fake.shape), tuple(fake.stride()), fake.storage_offset()


def rebuild(template: Any, slots: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
    """The result that a template stands for."""
    if isinstance(template, SlotRef):
        return slots[template.index]
    if isinstance(template, Tree):
        return pytree.tree_unflatten([rebuild(leaf, slots, inputs, outputs) for leaf in template.leaves], template.spec)
    if isinstance(template, InputRef):
        return inputs[template.index]
    if isinstance(template, HostRef):
        return outputs[template.output]
    if isinstance(template, Dataclass):
        fields = {name: rebuild(item, slots, inputs, outputs) for name, item in template.fields.items()}
        made = object.__new__(template.type)
        for name, item in fields.items():
            object.__setattr__(made, name, item)
        return made
    return template


def remap_inputs(template: Any, moved: list[int]) -> Any:
    """The template for inputs that stand in another order: ``moved[old]`` is the new index."""
    if isinstance(template, InputRef):
        return InputRef(moved[template.index])
    if isinstance(template, Tree):
        return Tree(template.spec, [remap_inputs(leaf, moved) for leaf in template.leaves])
    if isinstance(template, Dataclass):
        return Dataclass(template.type, {k: remap_inputs(v, moved) for k, v in template.fields.items()})
    return template
