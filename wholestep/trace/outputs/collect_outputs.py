"""From what a traced step returned and left behind to a graph's outputs, and the aliases that refer to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.nested import leaves
from wholestep.trace.functionalize.aliases import Ref
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.outputs.output_records import (
    Counter,
    NewValue,
    OutputAlias,
    TensorState,
    View,
    counts_alone,
    is_leaf,
)
from wholestep.trace.record.inputs import TracedInput
from wholestep.trace.record.recorder import Recorder

aten = torch.ops.aten


class OutputCollector:
    """Collects the graph's outputs and the aliases that refer to them.

    Args:
        apart: each rank may come to hold a part of any tensor: strides of a whole one mean nothing in it, so that what
            stays for later steps, and results in the memory of inputs, are values of their own.
    """

    def __init__(self, recorder: Recorder, apart: bool = False) -> None:
        self.recorder, self.inputs, self.apart = recorder, recorder.inputs, apart
        self.outputs: list[fx.Node] = []
        self.aliases: list[OutputAlias] = []
        self.moved: dict[TracedInput, int] = {}  # an input that was given other memory -> an alias of that
        self._by_tensor: dict[int, int] = {}
        self._by_storage: dict[int, int] = {}
        self._first: dict[int, torch.Tensor] = {}  # id of a storage -> the tensor that is all of it, or the first seen
        self._keep: list[Any] = []  # what is known by its id
        self._states: dict[int, TensorState] = {}

    def observe(self, values: list[Any]) -> None:
        """Notes what autograd says of the tensors to come, before anything is done to find out more."""
        for value in values:
            if is_made(value):
                bases = [value._base] if value._is_view() and is_made(value._base) else []
                for tensor in (value, *bases, _gradient(value)):
                    if tensor is not None:
                        self._states[id(tensor)] = TensorState.of(tensor)
                        self._note_whole(tensor)

    def _note_whole(self, tensor: torch.Tensor) -> None:
        """Chooses which of several tensors that are all of a memory is it: one with a history, else the first."""
        ref = self.inputs.ref(tensor)
        if ref.parent is None and not tensor._is_view():
            held = self._first.setdefault(id(ref.storage), tensor)
            if tensor.grad_fn is not None and held.grad_fn is None:
                self._first[id(ref.storage)] = tensor

    def alias(self, tensor: torch.Tensor, stays: bool = False) -> int:
        """The index of the alias of a tensor made in the step.

        Args:
            stays: its object is kept for later steps.
        """
        if id(tensor) not in self._by_tensor:
            described = self._described(tensor, self.inputs.ref(tensor), self._states[id(tensor)], stays)
            self.aliases.append(described)
            self._by_tensor[id(tensor)] = len(self.aliases) - 1
            self._keep.append(tensor)
        return self._by_tensor[id(tensor)]

    def _described(self, tensor: torch.Tensor, ref: Ref, state: TensorState, stays: bool) -> OutputAlias:
        storage, here, whole = ref.storage, ref.geometry, ref.whole.geometry
        for before, there in () if self.apart else self.inputs.moved.values():
            # what shares the counter of an input, in the memory that it was given, is a view of it
            if there.ref.storage is storage and not counts_alone(tensor, there.value):  # type: ignore[union-attr]
                if before not in self.inputs.items:  # it was a part of memory that several share
                    self.inputs.add(before)
                views = self._place(tensor, there.ref)  # type: ignore[arg-type]
                return OutputAlias(state, None, before.index, "shared", None, views, moved=True)
        base = tensor._base if tensor._is_view() and is_made(tensor._base) else None
        viewed = base if base is not None and id(base) in self._states else None
        start = ref.whole if viewed is None else self.inputs.ref(viewed)
        strided = ref.follows_strides and start.follows_strides
        if not strided and (self.apart or self._views(tensor, start) is None):
            return OutputAlias(state, self.add_output(ref.read()))
        is_whole = not tensor._is_view() and here == whole
        is_first = is_whole and self._first.setdefault(id(storage), tensor) is tensor
        item = None if storage.input is None else self.inputs.items[storage.input]
        if self.apart and (item is not None or (stays and not is_first)):
            copy = self.recorder.builder.emit(aten.clone.default, (ref.read(),))
            alone = replace(state, is_view=False, several=False, leaf=bool(state.leaf))
            return OutputAlias(alone, self.add_output(copy))
        parent = self.alias(viewed) if viewed is not None else None
        if item is not None:
            inside: list[Any] = [*item.members] or [item.value]
            own = all(counts_alone(tensor, real) for real in inside)
            views = self._place(tensor, start, not own)
            return OutputAlias(state, None, item.index, "own" if own else "shared", parent, views)
        if id(storage) not in self._by_storage:
            self._by_storage[id(storage)] = self.add_output(ref.whole.read())
        first = self._first.setdefault(id(storage), tensor)
        counter: Counter = "memory" if first is tensor else "own" if counts_alone(tensor, first) else "shared"
        views = None if is_first else self._place(tensor, start, viewed is not None)
        return OutputAlias(state, self._by_storage[id(storage)], None, counter, parent, views)

    def _place(self, tensor: torch.Tensor, start: Ref, known: bool = True) -> tuple[View, ...] | None:
        """What leads from one tensor to another in its memory: operators, or strides where they say how.

        Args:
            known: whether autograd knows the other as a view of it.
        """
        ref = self.inputs.ref(tensor)
        strided = ref.follows_strides and start.follows_strides
        views = self._views(tensor, start) if known or not strided else None
        return (_strided(ref, start),) if strided and views is None else views

    def _views(self, view: torch.Tensor, start: Ref) -> tuple[View, ...] | None:
        """The operators that lead from a tensor to a view of it, as autograd knows them.

        A view that is used after its memory was written is known to it as `as_strided` of the whole.
        """
        ref: Ref | None = self.inputs.ref(view)
        assert ref is not None
        used = ref.born if self._states[id(view)].several else ref.storage.generation
        views: list[View] = []
        while ref is not None and ref is not start and ref.parent is not None:
            if ref.kwargs or any(isinstance(leaf, fx.Node) for leaf in leaves(ref.args)):
                return None
            if ref.born != used and ref.follows_strides and start.follows_strides:
                return (_strided(ref, start), *views[::-1])
            views.append((ref.view, _frozen(ref.args), ref.index))
            used, ref = ref.born, ref.parent
        return tuple(views[::-1]) or ((aten.alias.default, (), None),) if ref is start else None

    def change(self, index: int, **changes: Any) -> None:
        """Changes an alias."""
        self.aliases[index] = replace(self.aliases[index], **changes)

    def move_inputs(self) -> None:
        """Inputs that were given other memory are given it after a replay; parts get what is in it where they are."""
        for item, there in self.inputs.moved.values():
            if self.apart:
                item.ref.write(there.ref.read())  # type: ignore[union-attr]
            else:
                self.moved[item] = self.alias(there.fake)

    def move(self, tensor: torch.Tensor, item: TracedInput) -> None:
        """Makes a tensor's alias a view of one input, as autograd knows it, where several share memory."""
        if item.ref is None or item.ref.parent is None or item.ref.storage is not self.inputs.ref(tensor).storage:
            return
        if item not in self.inputs.items:
            self.inputs.add(item)
        self.change(self.alias(tensor), input=item.index, views=self._place(tensor, item.ref))

    def cut(self, tensor: torch.Tensor) -> None:
        """Makes a tensor's alias none of another's: it has a history of its own."""
        index = self.alias(tensor)
        views = self.aliases[index].views and self._place(tensor, self.inputs.ref(tensor).whole, False)
        self.change(index, base=None, views=views)

    def add_output(self, node: fx.Node) -> int:
        """Makes a node an output of the graph; gives its index."""
        if node.op == "get_attr":  # each call gives memory of its own
            node = self.recorder.builder.emit(aten.clone.default, (node,))
        self.outputs.append(node)
        return len(self.outputs) - 1

    def new_value(self, value: Any, stays: bool = False) -> NewValue:
        """Where a replay finds a tensor or a number that the step made; see `alias`."""
        if isinstance(value, torch.Tensor):
            index, grad = self.alias(value, stays), _gradient(value)
            if grad is not None:
                self.change(index, grad=self.alias(grad))
            return NewValue(alias=index)
        return NewValue(output=self.add_output(self.recorder.numbers.size(value).node.fx_node))


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a tensor of the step's own has by now."""
    held = bool(is_leaf(tensor)) or tensor.retains_grad
    return tensor.grad if held and is_made(tensor.grad) else None


def _strided(ref: Ref, start: Ref) -> View:
    """A tensor as `as_strided` of another, with an offset from that one's first element."""
    here = ref.geometry
    return aten.as_strided.default, (tuple(here.shape), here.stride, here.offset - start.geometry.offset), None


def _frozen(args: Any) -> Any:
    return tuple(map(_frozen, args)) if isinstance(args, (list, tuple)) else args
