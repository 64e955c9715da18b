"""From what a traced step returned and left behind to a graph's outputs, and the slots that refer to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.trace.functionalize.aliases import Ref
from wholestep.trace.functionalize.autograd_flags import counts_alone, facts_of, is_leaf
from wholestep.trace.functionalize.dtype_views import kind_of, offset_from
from wholestep.trace.numbers.symbolic_sizes import is_made, is_size
from wholestep.trace.outputs.state_outputs import Made, Slot, View
from wholestep.trace.record.inputs import Lifted
from wholestep.trace.record.recorder import Recorder
from wholestep.trace.record.tape import leaves

aten = torch.ops.aten

_ALIAS: tuple[View, ...] = ((aten.alias.default, (), None),)


class Outlet:
    """Collects the graph's outputs and the slots that refer to them.

    Args:
        apart: each rank may come to hold a part of any tensor: strides of a whole one lead nowhere in it, so that what
            stays for later steps, and results in the memory of inputs, are values of their own.
    """

    def __init__(self, recorder: Recorder, apart: bool = False) -> None:
        self.recorder, self.apart = recorder, apart
        self.outputs: list[fx.Node] = []
        self.slots: list[Slot] = []
        self.by_tensor: dict[int, int] = {}
        self.by_storage: dict[int, int] = {}
        self.first: dict[int, torch.Tensor] = {}  # id of a memory -> the tensor that is all of it, or was met first
        self.keep: list[Any] = []
        self.facts: dict[int, dict[str, Any]] = {}

    def observe(self, values: list[Any]) -> None:
        """Notes what autograd says of the tensors to come, before anything is done to find out more."""
        for value in values:
            if is_made(value):
                bases = [value._base] if value._is_view() and is_made(value._base) else []
                grad = _gradient(value)
                seen = (value, *bases, *([] if grad is None else [grad]))
                self.facts |= {id(v): facts_of(v) for v in seen}
                for one in seen:
                    self._note_whole(one)

    def _note_whole(self, tensor: torch.Tensor) -> None:
        """Chooses which of several tensors that are all of a memory is it: one with a history, else the first."""
        ref = self.recorder.ref(tensor)
        if ref.parent is None and not tensor._is_view():
            held = self.first.setdefault(id(ref.storage), tensor)
            if tensor.grad_fn is not None and held.grad_fn is None:
                self.first[id(ref.storage)] = tensor

    def slot(self, tensor: torch.Tensor, stays: bool = False) -> int:
        """The index of the slot for a tensor made in the step; ``stays`` where its object is kept for later steps."""
        if id(tensor) in self.by_tensor:
            return self.by_tensor[id(tensor)]
        ref = self.recorder.ref(tensor)
        storage, root = ref.storage, ref.storage.root
        assert root is not None
        here, whole = ref.geometry, root.geometry
        other = here.dtype != whole.dtype or here.lazy
        kind = kind_of(tensor, ref) if other and not self.apart else None
        base = tensor._base if tensor._is_view() else None
        if other and (kind is None or (base is not None and is_made(base) and not self._same_kind(base, tensor))):
            output = self._output(ref.read(self.recorder.emit))
            return self._add(tensor, Slot(output, None, None, **self.facts[id(tensor)]))
        place = (tuple(here.shape), here.stride, offset_from(here, whole))
        is_first = base is None and here == whole and self.first.setdefault(id(storage), tensor) is tensor
        if self.apart and self._leads_nowhere(ref, stays, is_first):
            copy = self.recorder.emit(torch.ops.aten.clone.default, (ref.read(self.recorder.emit),))
            alone = self.facts[id(tensor)] | {"is_view": False, "several": False, "outdated": False}
            return self._add(tensor, Slot(self._output(copy), None, None, **alone))
        parent = self.slot(base) if base is not None and is_made(base) and self._same_kind(base, tensor) else None
        if storage.input is not None:
            item = self.recorder.lifted[storage.input]
            itself = item.source is None and is_first  # state that the step makes is the input
            inside: list[Any] = [*item.members] or [item.value]
            own = all(counts_alone(tensor, real) for real in inside)
            known = self.facts[id(tensor)] | {"kind": kind}
            inside_it = None if itself else place
            origin = base if parent is not None else None if item.members else item.value
            start = item.ref if origin is None else self.recorder.ref(origin)  # type: ignore[arg-type]
            views = None if own else self._views(tensor, start)
            slot = Slot(None, storage.input, inside_it, **known, own_counter=own, apart=own, base=parent, views=views)
        else:
            if id(storage) not in self.by_storage:
                self.by_storage[id(storage)] = self._output(root.read(self.recorder.emit))
            output = self.by_storage[id(storage)]
            first = self.first.setdefault(id(storage), tensor)
            own = counts_alone(tensor, first)
            known = self.facts[id(tensor)] | {"kind": kind}
            apart = own and first is not tensor
            place_in = None if is_first else place
            views = self._views(tensor, self.recorder.ref(base)) if base is not None and parent is not None else None
            slot = Slot(output, None, place_in, **known, own_counter=own, apart=apart, base=parent, views=views)
        return self._add(tensor, slot)

    def _views(self, view: torch.Tensor, start: Ref | None) -> tuple[View, ...] | None:
        """The operators that lead from a tensor to a view of it, as autograd knows them.

        A view that is used after its memory was written is known to it as `as_strided` of the whole.
        """
        ref: Ref | None = self.recorder.ref(view)
        assert ref is not None
        used = ref.born if self.facts[id(view)]["several"] else ref.storage.generation
        views: list[View] = []
        while ref is not None and ref is not start and ref.parent is not None and start is not None:
            if ref.kwargs or any(isinstance(leaf, fx.Node) for leaf in leaves(ref.args)):
                return None
            if ref.born != used:
                if ref.geometry.dtype != start.geometry.dtype or ref.geometry.lazy:
                    return None
                place = tuple(ref.geometry.shape), ref.geometry.stride, offset_from(ref.geometry, start.geometry)
                return ((aten.as_strided.default, place, None), *views[::-1])
            views.append((ref.view, _frozen(ref.args), ref.index))
            used, ref = ref.born, ref.parent
        return tuple(views[::-1]) or _ALIAS if ref is start else None

    def _leads_nowhere(self, ref: Ref, stays: bool, is_first: bool) -> bool:
        if ref.storage.input is None:
            return stays and not is_first
        return self.recorder.lifted[ref.storage.input].source is not None or not is_first

    def _same_kind(self, base: torch.Tensor, view: torch.Tensor) -> bool:
        """Whether a view can be made again from its base, which shows the memory's own elements."""
        ref = self.recorder.ref(base)
        assert ref.storage.root is not None
        own = ref.geometry.dtype == ref.storage.root.geometry.dtype and not ref.geometry.lazy
        return id(base) in self.facts and own

    def _add(self, tensor: torch.Tensor, slot: Slot) -> int:
        self.slots.append(replace(slot, parameter=isinstance(tensor, torch.nn.Parameter)))
        self.by_tensor[id(tensor)] = len(self.slots) - 1
        self.keep.append(tensor)
        return len(self.slots) - 1

    def set(self, tensor: torch.Tensor, **changes: Any) -> None:
        """Changes what is known of a tensor's slot."""
        index = self.slot(tensor)
        self.slots[index] = replace(self.slots[index], **changes)

    def refuse(self, index: int, why: str) -> None:
        """Notes that a slot's tensor has a history that cannot be differentiated."""
        self.slots[index] = replace(self.slots[index], refusal=why)

    def move(self, tensor: torch.Tensor, item: Lifted) -> None:
        """Makes a tensor's slot a view of one input, as autograd knows it, where several lie in one memory."""
        assert item.ref is not None
        if item.ref.parent is None:
            return
        if item not in self.recorder.lifted:
            self.recorder.lifted.append(item)
        here, base = self.recorder.ref(tensor).geometry, item.ref.geometry
        place = (tuple(here.shape), here.stride, offset_from(here, base))
        views = self._views(tensor, item.ref)
        self.set(tensor, input=self.recorder.lifted.index(item), geometry=place, views=views)

    def add_output(self, node: fx.Node) -> int:
        """Makes a node an output of the graph; gives its index."""
        return self._output(node)

    def _output(self, node: fx.Node) -> int:
        if node.op == "get_attr":  # each call gives memory of its own
            node = self.recorder.emit(torch.ops.aten.clone.default, (node,))
        self.outputs.append(node)
        return len(self.outputs) - 1

    def place(self, value: Any, stays: bool = False) -> Made:
        """Where a replay finds a tensor or a number that the step made; see `slot`."""
        if isinstance(value, torch.Tensor):
            index, grad = self.slot(value, stays), _gradient(value)
            if grad is not None:
                self.slots[index] = replace(self.slots[index], grad=self.slot(grad))
            return Made(slot=index)
        number = self.recorder.size(value) if is_size(value) else value
        return Made(output=self._output(number.node.fx_node))


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a tensor of the step's own has by now."""
    held = bool(is_leaf(tensor)) or tensor.retains_grad
    return tensor.grad if held and is_made(tensor.grad) else None


def _frozen(args: Any) -> Any:
    return tuple(map(_frozen, args)) if isinstance(args, (list, tuple)) else args
