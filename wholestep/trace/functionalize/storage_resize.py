"""Storages that a step resizes: ``tensor.untyped_storage().resize_(n)`` on its inputs.

Nothing real is resized while tracing. Memory that a tensor of the step has lost holds no value to read; memory that
it gets is a new value, to be written first. What is left at the end is done when the step runs: growth before it,
shrinking after it. The sizes on entry are guards.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from wholestep.errors import UnsupportedError
from wholestep.patches import Replacement
from wholestep.torch_compat import FakeTensor, storage_id
from wholestep.trace.functionalize.aliases import Geometry, Ref, elements
from wholestep.trace.record.inputs import Inputs, TracedInput

aten = torch.ops.aten
OWNERS = ("untyped_storage", "storage")  # methods of a tensor that give its storage
DESCRIBERS = ("wholestep.", FakeTensor.__module__.rpartition(".")[0])  # packages that ask for their own use

_resize, _nbytes = torch.UntypedStorage.resize_, torch.UntypedStorage.nbytes


@dataclass
class StorageSize:
    """The storage of one input, and its size in bytes on entry and now."""

    item: TracedInput
    before: int
    now: int


class StorageSizes:
    """The sizes of inputs' storages that the step asks for, changes or finds to be 0."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._known: dict[int, StorageSize] = {}
        inputs.on_new = self._check_new

    @property
    def known(self) -> list[StorageSize]:
        """Those that were asked for or changed."""
        return list(self._known.values())

    def _check_new(self, item: TracedInput, tensor: torch.Tensor) -> None:
        """A new input without memory has no value to read."""
        if tensor.numel() and not _nbytes(tensor.untyped_storage()):
            known = self.of(tensor)
            if known.item is item:
                self._renew(item)
            else:
                item.ref = _beside(known.item, item, tensor)

    def of(self, tensor: torch.Tensor) -> StorageSize:
        """The size of the storage of an input."""
        if isinstance(tensor, FakeTensor):
            raise UnsupportedError("a tensor of symbolic size is asked for its memory")
        item, storage = self._inputs.of(tensor), tensor.untyped_storage()
        if id(tensor) in self._inputs.moved:
            raise UnsupportedError(f"the step assigns .data of {item.source}, and asks for its memory")
        if storage_id(storage) not in self._known:
            self._known[storage_id(storage)] = StorageSize(item, _nbytes(storage), _nbytes(storage))
            self._inputs.asked[id(item), "bytes of memory"] = item
        return self._known[storage_id(storage)]

    def _set(self, known: StorageSize, size: int) -> None:
        """``storage.resize_(size)`` for the storage of an input."""
        assert known.item.ref is not None
        here = known.item.ref.whole.geometry
        needed = (here.offset + here.extent) * here.dtype.itemsize if elements(here.shape) else 0
        if 0 < size < needed:
            what = f"the memory of {known.item.source} is resized to {size} bytes, of which it needs {needed}"
            raise UnsupportedError(what, "resize it to 0, or to all that the tensor needs")
        grown = known.now < needed <= size
        known.now = size
        if grown and elements(here.shape):
            self._renew(known.item)
            known.item.ref.storage.generation += 1

    def _renew(self, item: TracedInput) -> None:
        """Gives an input's memory a value of its own: whatever new memory holds."""
        assert item.ref is not None
        here = item.ref.whole.geometry
        options = {"dtype": here.dtype, "device": item.fake.device}
        place = list(here.shape), list(here.stride)
        item.ref.storage.value = self._inputs.builder.emit(aten.empty_strided.default, place, options)
        item.ref.whole.node, item.ref.whole.generation = None, -1

    def patches(self) -> list[Replacement]:
        """The methods of storages while the step is traced."""

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            known = self._known.get(storage_id(storage))
            if known is not None:
                self._set(known, int(size))
            elif storage.device.type == "meta":  # of a tensor that the step made
                _resize(storage, size)
            else:
                raise UnsupportedError("a storage is resized that belongs to no tensor in reach")
            return storage

        def nbytes(storage: torch.UntypedStorage) -> int:
            known, caller = self._known.get(storage_id(storage)), sys._getframe(1).f_globals.get("__name__")
            if known is None and storage.device.type != "meta" and not str(caller).startswith(DESCRIBERS):
                raise UnsupportedError("the size of a storage is read that belongs to no tensor in reach")
            return known.now if known is not None else _nbytes(storage)

        sized = [(torch.UntypedStorage, name, nbytes) for name in ("nbytes", "size", "__len__")]
        return [(torch.UntypedStorage, "resize_", resize), *sized]


def _beside(first: TracedInput, other: TracedInput, tensor: torch.Tensor) -> Ref:
    """An input without memory as a view of another one that will share it."""
    assert first.ref is not None
    whole, here = first.ref.whole.geometry, Geometry.of(tensor)
    offset = here.offset - whole.offset
    fits = whole.is_dense and here.dtype == whole.dtype and 0 <= offset
    if not fits or offset + here.extent > whole.extent:
        what = f"{first.source} and {other.source} overlap in memory that is not there yet"
        raise UnsupportedError(what, "take views after the memory is there")
    return first.ref.strided(here)
