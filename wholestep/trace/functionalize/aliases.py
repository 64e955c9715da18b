"""Functionalisation: which value each tensor has at each moment, when tensors share memory.

Every tensor of the traced step has a `Ref`: a storage and the chain of view operators that leads from the storage's
root to it. A storage has one current value, a graph node of the root's geometry, and a generation that grows with each
write. Reading a tensor replays its views on the current value; writing to it applies their inverses (`select` becomes
`select_scatter`) and gives the storage a new value. So no node of the graph ever writes, and a later reader of any
alias sees every earlier write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.ir import is_dense

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


def elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of a shape has, symbols among its sizes or not."""
    count = 1
    for size in shape:
        count *= size
    return count


def _hint(number: Any) -> int:
    """A size of the call that is traced, where it is a symbol."""
    return number if type(number) is int else number.node.hint  # type: ignore[no-any-return]


def _is_sum(total: int, steps: Sequence[tuple[int, tuple[int, int]]]) -> bool:
    """Whether a number is a sum of steps, largest first, each taken a number of times between two bounds."""
    if not steps:
        return total == 0
    (step, (low, high)), *rest = steps
    least, most = (sum(other * bounds[end] for other, bounds in rest) for end in (0, 1))
    times = range(max(low, -((most - total) // step)), min(high, (total - least) // step) + 1)
    return any(_is_sum(total - step * n, rest) for n in times)


@dataclass(frozen=True)
class Geometry:
    """A tensor's dtype, size, stride and offset, in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int = 0
    lazy: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """A tensor's geometry; `lazy` when a conjugation or negation is still to be done."""
        if tensor.layout != torch.strided:
            return cls(tensor.dtype, tensor.shape, ())
        lazy = tensor.is_conj() or tensor.is_neg()
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), lazy)  # type: ignore[arg-type]

    @property
    def repeats(self) -> bool:
        """Whether several elements share an address, as after `expand`."""
        pairs = zip(self.shape, self.stride, strict=True)
        return any(stride == 0 and size > 1 for size, stride in pairs) and elements(self.shape) > 0

    @property
    def overlaps(self) -> bool:
        """Whether several elements may be in one place, as after `expand`, or `unfold` with a small step."""
        reach = 0
        for stride, size in sorted(zip(self.stride, self.shape, strict=False)):
            if size > 1 and stride <= reach:
                return elements(self.shape) > 0
            reach += (size - 1) * stride
        return False

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one stretch of memory, each place once."""
        return is_dense(self.shape, self.stride)

    @property
    def extent(self) -> int:
        """How many elements of memory it reaches over."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def meets(self, other: Geometry) -> bool:
        """Whether two tensors in one memory have a byte in common without being the same elements in one order."""
        ours, theirs = self._in_bytes(), other._in_bytes()
        if ours == theirs or not (elements(self.shape) and elements(other.shape)):
            return False
        steps: dict[int, tuple[int, int]] = {}
        for step, count in ours[1]:
            low, high = steps.get(step, (0, 0))
            steps[step] = low, high + count - 1
        for step, count in theirs[1]:
            low, high = steps.get(step, (0, 0))
            steps[step] = low - count + 1, high
        return _is_sum(theirs[0] - ours[0], sorted(steps.items(), reverse=True))

    def fills(self, other: Geometry) -> bool:
        """Whether two tensors in one memory are the same elements in one order, of whatever dimensions."""
        return elements(self.shape) > 0 and self._in_bytes() == other._in_bytes()

    def _in_bytes(self) -> tuple[int, list[tuple[int, int]]]:
        """The first byte, and the strides with their sizes: those of bytes within an element last; hints of symbols."""
        size = self.dtype.itemsize
        sizes, strides, (offset,) = (map(_hint, numbers) for numbers in (self.shape, self.stride, (self.offset,)))
        steps = [(step * size, count) for step, count in zip(strides, sizes, strict=False) if step and count > 1]
        return offset * size, [*steps, (1, size)]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this dtype, shape and strides."""
        return tensor.dtype == self.dtype and tensor.shape == self.shape and tensor.stride() == self.stride

    def orders(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's dimensions follow one another in memory as these do."""
        strides = self.stride, tensor.stride()
        dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        one, two = (sorted(dims, key=lambda dim: -stride[dim]) for stride in strides)
        return strides[0] == strides[1] or one == two


@dataclass(eq=False)
class Storage:
    """Memory that tensors share.

    Attributes:
        value: the node that gives the root's current content.
        emit: adds a call to the graph.
        generation: number of writes so far.
        input: index of the input whose memory this is; None for memory allocated in the step.
        first: the node that gave the root its first content.
    """

    value: fx.Node
    first: fx.Node
    emit: Emit
    root: Ref | None = None
    generation: int = 0
    input: int | None = None


@dataclass(eq=False)
class Ref:
    """A tensor as a view of its storage: the last view operator, and the `Ref` that it was applied to.

    Attributes:
        parent: what it is a view of; None for the root, which is all of the storage.
        view, args, kwargs, index: the operator, its arguments after the first, and which of several results it is.
        node, generation: the node that had the content at that generation of the storage.
        born: the storage's generation when the view was made.
    """

    storage: Storage
    geometry: Geometry
    parent: Ref | None = None
    view: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    node: fx.Node | None = None
    generation: int = -1
    born: int = field(init=False)

    def __post_init__(self) -> None:
        self.born = self.storage.generation

    @property
    def whole(self) -> Ref:
        """The root of its storage."""
        assert self.storage.root is not None
        return self.storage.root

    @property
    def follows_strides(self) -> bool:
        """Whether its strides alone say how to find its elements in the root's."""
        return self.geometry.dtype == self.whole.geometry.dtype and not (self.geometry.lazy or self.whole.geometry.lazy)

    def strided(self, geometry: Geometry) -> Ref:
        """Another view of the same storage, by size, stride and offset."""
        place = list(geometry.shape), list(geometry.stride), geometry.offset - self.whole.geometry.offset
        return Ref(self.storage, geometry, self.whole, aten.as_strided.default, place)

    def read(self) -> fx.Node:
        """The node that holds this tensor's content now."""
        outdated: list[Ref] = []
        ref: Ref | None = self
        while ref is not None and (ref.node is None or ref.generation != ref.storage.generation):
            outdated.append(ref)
            ref = ref.parent
        node = ref.node if ref is not None else None
        for one in reversed(outdated):
            if node is None:
                node = one.storage.value
            else:
                outs = one.storage.emit(one.view, (node, *one.args), one.kwargs)
                node = outs if one.index is None else one.storage.emit(operator.getitem, (outs, one.index))
            one.node, one.generation = node, one.storage.generation
        assert node is not None
        return node

    def write(self, new: fx.Node) -> None:
        """Makes ``new`` the content, converted to this tensor's dtype and shape, visible to every alias."""
        ref, new = self, self._converted(new)
        while ref.parent is not None:
            if not elements(ref.geometry.shape):
                return
            whole = ref.parent
            while whole.geometry.overlaps and whole.parent is not None:  # as after `expand`
                whole = whole.parent
            invert = INVERSES.get(ref.view) if whole is ref.parent else None
            new = _strided_inverse(ref, new, whole) if invert is None else invert(ref, new)
            ref, new = whole, whole._converted(new)
        ref.storage.value = new
        ref.storage.generation += 1
        ref.node, ref.generation = new, ref.storage.generation

    def _converted(self, new: fx.Node) -> fx.Node:
        """``new`` as an in-place write stores it: with the dtype and shape, for a root also the strides, of this."""
        value = new.meta["info"].value
        same = value.dtype == self.geometry.dtype and value.shape == self.geometry.shape
        exact = same and (self.parent is not None or self.geometry.holds(value))
        return new if exact else self.storage.emit(aten.copy.default, (self.read(), new))


def new_root(fake: torch.Tensor, node: fx.Node, emit: Emit) -> Ref:
    """Makes a tensor the root of a storage of its own, with a node's value as content."""
    storage = Storage(node, node, emit)
    storage.root = Ref(storage, Geometry.of(fake), node=node, generation=0)
    fake.wholestep_ref = storage.root  # type: ignore[attr-defined]
    return storage.root


def _strided_inverse(ref: Ref, new: fx.Node, whole: Ref) -> fx.Node:
    """The content of what a view is taken from after writing through any view at all: an as_strided_scatter."""
    place = list(ref.geometry.shape), list(ref.geometry.stride), ref.geometry.offset - whole.geometry.offset
    return ref.storage.emit(aten.as_strided_scatter.default, (whole.read(), new, *place))


Inverse = Callable[[Ref, fx.Node], fx.Node]


def _same(op: Any) -> Inverse:
    """The inverse that applies an operator with the view's arguments."""
    return lambda ref, new: ref.storage.emit(op, (new, *ref.args))


def _scatter(op: Any) -> Inverse:
    """The inverse that puts what is new into the old content, with the view's arguments."""
    return lambda ref, new: ref.storage.emit(op, (ref.parent.read(), new, *ref.args), ref.kwargs)  # type: ignore[union-attr]


def _reshape(ref: Ref, new: fx.Node) -> fx.Node:
    assert ref.parent is not None
    if not new.meta["info"].value.is_contiguous():
        new = ref.storage.emit(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
    return ref.storage.emit(aten.view.default, (new, list(ref.parent.geometry.shape)))


def _permute(ref: Ref, new: fx.Node) -> fx.Node:
    order = [d % len(ref.args[0]) for d in ref.args[0]]
    return ref.storage.emit(aten.permute.default, (new, [order.index(d) for d in range(len(order))]))


def _split(ref: Ref, new: fx.Node) -> fx.Node:
    """split, split_with_sizes, chunk: writes one piece back into its slice."""
    assert ref.parent is not None
    dim = ref.args[1] if len(ref.args) > 1 else ref.kwargs.get("dim", 0)
    parent, piece = ref.parent.geometry, ref.geometry
    start = (piece.offset - parent.offset) // (parent.stride[dim] or 1)
    args = (ref.parent.read(), new, dim, start, start + piece.shape[dim])
    return ref.storage.emit(aten.slice_scatter.default, args)


def _unbind(ref: Ref, new: fx.Node) -> fx.Node:
    assert ref.parent is not None
    dim = ref.args[0] if ref.args else ref.kwargs.get("dim", 0)
    return ref.storage.emit(aten.select_scatter.default, (ref.parent.read(), new, dim, ref.index))


def _view_dtype(ref: Ref, new: fx.Node) -> fx.Node:
    assert ref.parent is not None
    return ref.storage.emit(aten.view.dtype, (new, ref.parent.geometry.dtype))


# View operator -> how a value written through it becomes a value of what it was taken from.
# Views that are not here go by strides, and so do those of an expanded tensor, in what that was expanded from.
INVERSES: dict[Any, Inverse] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.expand.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.t.default: _same(aten.t.default),
    aten.transpose.int: _same(aten.transpose.int),
    aten.permute.default: _permute,
    aten.select.int: _scatter(aten.select_scatter.default),
    aten.slice.Tensor: _scatter(aten.slice_scatter.default),
    aten.diagonal.default: _scatter(aten.diagonal_scatter.default),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.view_as_real.default: _same(aten.view_as_complex.default),
    aten.view_as_complex.default: _same(aten.view_as_real.default),
    aten._conj.default: _same(aten.conj_physical.default),
    aten._neg_view.default: _same(aten.neg.default),
    aten.view.dtype: _view_dtype,
}
