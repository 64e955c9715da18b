"""Memory that a step gives back and takes anew: ``tensor.untyped_storage().resize_(n)`` on its inputs.

Nothing real is resized while tracing. Memory that a tensor of the step has lost holds no value to read; memory that
it gets is a new value, to be written first. What is left at the end is done when the step runs: growth before it,
shrinking after it. The sizes that were met on entry are guards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wholestep.errors import UnsupportedError
from wholestep.patches import Replacement
from wholestep.torch_compat import FakeTensor, storage_id
from wholestep.trace.functionalize.aliases import Geometry, Ref, elements
from wholestep.trace.numbers.data_dependent import Numbers
from wholestep.trace.record.inputs import Lifted
from wholestep.trace.record.provenance import user_line

aten = torch.ops.aten
OWNERS = ("untyped_storage", "storage")  # methods of a tensor that give its storage

_resize, _nbytes = torch.UntypedStorage.resize_, torch.UntypedStorage.nbytes


@dataclass
class Memory:
    """One input's memory, and its size in bytes on entry and now."""

    item: Lifted
    storage: torch.UntypedStorage
    before: int
    now: int


class Storages(Numbers):
    """The part of the recorder that knows how large the memory of inputs is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memories: dict[int, Memory] = {}

    def lift(self, tensor: torch.Tensor) -> Lifted:
        """As `Inputs.lift`; a tensor without memory has no value to read."""
        lifted = super().lift(tensor)
        if tensor.numel() and tensor.layout == torch.strided and not _nbytes(tensor.untyped_storage()):
            known = self.memory(tensor, lifted)
            if known.item is lifted:
                self._renew(lifted)
            else:
                lifted.ref = _beside(known.item, lifted, tensor)
        return lifted

    def memory(self, tensor: torch.Tensor, lifted: Lifted | None = None) -> Memory:
        """What is known of the memory of an input."""
        if isinstance(tensor, FakeTensor):
            raise UnsupportedError("a tensor of symbolic size is asked for its memory", user_line())
        storage = tensor.untyped_storage()
        known = self.memories.get(storage_id(storage))
        if known is None:
            item = lifted or self.lift_once(tensor)
            known = self.memories.get(storage_id(storage))  # lifting it may have found out
        if known is None:
            if item.members:
                raise UnsupportedError(f"{item.source} asks for its memory, which other inputs share", user_line())
            size = _nbytes(storage)
            known = self.memories[storage_id(storage)] = Memory(item, storage, size, size)
        return known

    def resize(self, memory: Memory, size: int) -> None:
        """``storage.resize_(size)`` for the memory of an input."""
        ref = memory.item.ref
        assert ref is not None and ref.storage.root is not None
        here = ref.storage.root.geometry
        needed = (here.offset + here.extent) * here.dtype.itemsize if elements(here.shape) else 0
        if 0 < size < needed:
            what = f"the memory of {memory.item.source} is resized to {size} bytes, of which it needs {needed}"
            raise UnsupportedError(what, user_line(), "resize it to 0, or to all that the tensor needs")
        grown = memory.now < needed <= size
        memory.now = size
        if grown and elements(here.shape):
            self._renew(memory.item)
            ref.storage.generation += 1

    def _renew(self, item: Lifted) -> None:
        """Gives an input's memory a value of its own: whatever new memory holds."""
        assert item.ref is not None and item.ref.storage.root is not None
        here = item.ref.storage.root.geometry
        options = {"dtype": here.dtype, "device": item.fake.device}
        new = self.emit(aten.empty_strided.default, (list(here.shape), list(here.stride)), options)
        item.ref.storage.value = new
        item.ref.storage.root.node, item.ref.storage.root.generation = None, -1

    def resizing(self) -> list[Replacement]:
        """What stands in for the methods of storages while the step is traced."""

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            memory = self.memories.get(storage_id(storage))
            if memory is not None:
                self.resize(memory, int(size))
            elif storage.device.type == "meta":  # of a tensor that the step made
                _resize(storage, size)
            else:
                raise UnsupportedError("a storage is resized that belongs to no tensor in reach", user_line())
            return storage

        def nbytes(storage: torch.UntypedStorage) -> int:
            memory = self.memories.get(storage_id(storage))
            return memory.now if memory is not None else _nbytes(storage)

        return [(torch.UntypedStorage, "resize_", resize), (torch.UntypedStorage, "nbytes", nbytes),
                (torch.UntypedStorage, "size", nbytes), (torch.UntypedStorage, "__len__", nbytes)]


def _beside(first: Lifted, other: Lifted, tensor: torch.Tensor) -> Ref:
    """The way into memory of an input that has none now, as another that will share it: a view of that one."""
    assert first.ref is not None and first.ref.storage.root is not None
    root, here = first.ref.storage.root, Geometry.of(tensor)
    offset = here.offset - root.geometry.offset
    fits = root.geometry.is_dense and here.dtype == root.geometry.dtype and 0 <= offset
    if not fits or offset + here.extent > root.geometry.extent:
        what = f"{first.source} and {other.source} overlap in memory that is not there yet"
        raise UnsupportedError(what, user_line(), "take views after the memory is there")
    return Ref(root.storage, here, root, aten.as_strided.default, (list(here.shape), list(here.stride), offset))
