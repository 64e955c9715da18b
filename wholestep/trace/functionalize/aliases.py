"""Functionalisation: which value each tensor has at each moment, when tensors share memory.

Every tensor of the traced step has a `Ref`: a storage and the chain of view operators that leads from the
storage's root to it. A storage has one current value, a graph node of the root's geometry, and a
generation that grows with each write. Reading a tensor replays its chain on the current value; writing
to it runs the chain backwards (`select` becomes `select_scatter`) and gives the storage a new value.
So no node of the graph ever writes, and a later reader of any alias sees every earlier write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.errors import UnsupportedError
from wholestep.trace.record.provenance import user_line

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


def elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of a shape has, symbols among its sizes or not."""
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its memory; offset and strides in elements."""

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
        """Whether several elements lie in one place, as after `expand`."""
        pairs = zip(self.shape, self.stride, strict=True)
        return elements(self.shape) > 0 and any(stride == 0 and size > 1 for size, stride in pairs)

    @property
    def extent(self) -> int:
        """How many elements of memory it reaches over."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def overlaps(self) -> bool:
        """Whether there are more elements than places, as after `unfold` with a small step."""
        count = elements(self.shape)
        return count > 0 and count > self.extent

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one stretch of memory, each place once."""
        expected = 1
        for stride, size in sorted((st, sz) for st, sz in zip(self.stride, self.shape, strict=True) if sz > 1):
            if stride != expected:
                return False
            expected *= size
        return True

    def overlaps_partly(self, other: Geometry) -> bool:
        """Whether two dense tensors in one memory share some places but not all, as ATen's kernels refuse."""
        if not (self.is_dense and other.is_dense and elements(self.shape) and elements(other.shape)):
            return False
        if (self.offset, elements(self.shape)) == (other.offset, elements(other.shape)):
            return self.stride != other.stride
        end, other_end = self.offset + elements(self.shape), other.offset + elements(other.shape)
        return self.offset < other_end and other.offset < end

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
        generation: number of writes so far.
        input: index of the lifted input whose memory this is, None for memory made in the step.
        first: the node that gave the root its first content.
        moved: whether it became the memory of a tensor from outside, by ``p.data = t``.
        given: memories of tensors from outside that parts of it were copied to, as ``p.data = t[:n]`` would have let
            both be one, with their generations then.
    """

    value: fx.Node
    root: Ref | None = None
    generation: int = 0
    input: int | None = None
    first: fx.Node = field(init=False)
    moved: bool = False
    given: list[tuple[Storage, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = self.value


@dataclass(eq=False)
class Ref:
    """One tensor's way into a storage.

    Attributes:
        born: how often the storage was written before it was made.
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

    def read(self, emit: Emit) -> fx.Node:
        """The node that holds this tensor's content now."""
        if any(other.generation != then for other, then in self.storage.given):
            what = "a read of memory that an assignment to .data gave to another tensor, which was written since"
            raise UnsupportedError(what, user_line(), "read the tensor that was given it")
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
                outs = emit(one.view, (node, *one.args), one.kwargs)
                node = outs if one.index is None else emit(operator.getitem, (outs, one.index))
            one.node, one.generation = node, one.storage.generation
        assert node is not None
        return node

    def write(self, new: fx.Node, emit: Emit) -> None:
        """Makes ``new`` (of this tensor's shape and dtype) the content, visible to every alias."""
        ref = self
        while ref.parent is not None:
            if not elements(ref.geometry.shape):
                return
            whole = ref.parent
            if whole.geometry.repeats and not (ref.geometry.repeats and ref.view in INVERSES):
                # one of several elements in one place: all of them
                while whole.geometry.repeats and whole.parent is not None:
                    whole = whole.parent
                new = scatter_strided(ref, new, emit, whole)
            else:
                new = ref._scatter(new, emit)
            ref, new = whole, _fit(new, whole, emit)
        if ref.storage.moved:
            what = "a write through a view of memory that was given away by an assignment to .data"
            raise UnsupportedError(what, user_line(), "write to the tensor that was given it")
        ref.storage.value = new
        ref.storage.generation += 1
        ref.node, ref.generation = new, ref.storage.generation

    def _scatter(self, new: fx.Node, emit: Emit) -> fx.Node:
        assert self.parent is not None
        invert = INVERSES.get(self.view)
        if invert is not None:
            return invert(self, new, emit)
        return scatter_strided(self, new, emit, self.parent)


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["info"].value


def _fit(new: fx.Node, ref: Ref, emit: Emit) -> fx.Node:
    """``new`` with the exact dtype, shape and strides that ``ref`` has."""
    if ref.parent is None and not ref.geometry.holds(_value(new)):
        return emit(aten.copy.default, (ref.read(emit), new))
    return new


def fit(new: fx.Node, ref: Ref, emit: Emit) -> fx.Node:
    """``new`` converted to what an in-place write into ``ref`` stores: its dtype and shape.

    A root also needs its own strides, since views are replayed on it.
    """
    value = _value(new)
    same = value.dtype == ref.geometry.dtype and value.shape == ref.geometry.shape
    exact = same and (ref.parent is not None or ref.geometry.holds(value))
    return new if exact else emit(aten.copy.default, (ref.read(emit), new))


def scatter_strided(ref: Ref, new: fx.Node, emit: Emit, whole: Ref) -> fx.Node:
    """The content of what a view is taken from after writing through any view at all: an as_strided_scatter."""
    shape, stride = list(ref.geometry.shape), list(ref.geometry.stride)
    for dim, size in enumerate(shape):
        if size > 1 and stride[dim] == 0:  # a constant, in one place: once
            new, shape[dim] = emit(aten.slice.Tensor, (new, dim, 0, 1)), 1
    offset = ref.geometry.offset - whole.geometry.offset
    return emit(aten.as_strided_scatter.default, (whole.read(emit), new, shape, stride, offset))


def _reshape_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    assert ref.parent is not None
    shape = list(ref.parent.geometry.shape)
    if not _value(new).is_contiguous():
        new = emit(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
    return emit(aten.view.default, (new, shape))


def _transpose_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    return emit(aten.transpose.int, (new, *ref.args))


def _permute_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    order = [d % len(ref.args[0]) for d in ref.args[0]]
    return emit(aten.permute.default, (new, [order.index(d) for d in range(len(order))]))


def _select_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    assert ref.parent is not None
    return emit(aten.select_scatter.default, (ref.parent.read(emit), new, *ref.args))


def _slice_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    assert ref.parent is not None
    return emit(aten.slice_scatter.default, (ref.parent.read(emit), new, *ref.args), ref.kwargs)


def _diagonal_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    assert ref.parent is not None
    return emit(aten.diagonal_scatter.default, (ref.parent.read(emit), new, *ref.args), ref.kwargs)


def _pieces_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    """split, split_with_sizes, chunk: write one piece back into its slice."""
    assert ref.parent is not None and ref.index is not None
    dim = ref.args[1] if len(ref.args) > 1 else ref.kwargs.get("dim", 0)
    parent, piece = ref.parent.geometry, ref.geometry
    start = (piece.offset - parent.offset) // (parent.stride[dim] or 1)
    args = (ref.parent.read(emit), new, dim, start, start + piece.shape[dim])
    return emit(aten.slice_scatter.default, args)


def _unbind_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    assert ref.parent is not None and ref.index is not None
    dim = ref.args[0] if ref.args else ref.kwargs.get("dim", 0)
    return emit(aten.select_scatter.default, (ref.parent.read(emit), new, dim, ref.index))


def _same(op: Any) -> Callable[[Ref, fx.Node, Emit], fx.Node]:
    return lambda ref, new, emit: emit(op, (new,))


def _view_dtype_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    assert ref.parent is not None
    return emit(aten.view.dtype, (new, ref.parent.geometry.dtype))


def _expand_back(ref: Ref, new: fx.Node, emit: Emit) -> fx.Node:
    """Only a constant is ever written through an expanded tensor: any one of the repeated elements will do."""
    assert ref.parent is not None
    before = (1,) * (len(ref.geometry.shape) - len(ref.parent.geometry.shape)) + tuple(ref.parent.geometry.shape)
    for dim, size in enumerate(ref.geometry.shape):
        if size > before[dim]:
            new = emit(aten.slice.Tensor, (new, dim, 0, 1))
    new = emit(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
    return emit(aten.view.default, (new, list(ref.parent.geometry.shape)))


# View operator -> how a value written through it becomes a value of what it was taken from.
# Views that are not here, and those that repeat or leave out elements in unusual ways, go by strides.
INVERSES: dict[Any, Callable[[Ref, fx.Node, Emit], fx.Node]] = {
    aten.view.default: _reshape_back,
    aten._unsafe_view.default: _reshape_back,
    aten._reshape_alias.default: _reshape_back,
    aten.expand.default: _expand_back,
    aten.unsqueeze.default: _reshape_back,
    aten.squeeze.default: _reshape_back,
    aten.squeeze.dim: _reshape_back,
    aten.squeeze.dims: _reshape_back,
    aten.t.default: _same(aten.t.default),
    aten.transpose.int: _transpose_back,
    aten.permute.default: _permute_back,
    aten.select.int: _select_back,
    aten.slice.Tensor: _slice_back,
    aten.diagonal.default: _diagonal_back,
    aten.split.Tensor: _pieces_back,
    aten.split_with_sizes.default: _pieces_back,
    aten.unbind.int: _unbind_back,
    aten.view_as_real.default: _same(aten.view_as_complex.default),
    aten.view_as_complex.default: _same(aten.view_as_real.default),
    aten._conj.default: _same(aten.conj_physical.default),
    aten._neg_view.default: _same(aten.neg.default),
    aten.view.dtype: _view_dtype_back,
}
