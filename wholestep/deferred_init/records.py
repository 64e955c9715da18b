"""What is recorded of tensors without values: the calls that make them, and how these give values, also in parts."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.functional import base_name
from wholestep.nested import leaves, map_leaves, tensors_of
from wholestep.tensor_parts import Part
from wholestep.torch_compat import dispatch_modes_off, function_modes_disabled, plain_subclasses

RECORD = "wholestep_record"  # the attribute of a storage

numbers = itertools.count()
_process_lock = threading.RLock()  # around changes of the process: its generator's state, its default type
_known: weakref.WeakSet[Record] = weakref.WeakSet()


class Record:
    """What one storage is to hold.

    Attributes:
        writes: the calls that write it, in order.
        source: in their place, what reads a part of the tensor from somewhere; with a name for it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.writes = nbytes, list[Write]()
        _known.add(self)
        self.source: tuple[Callable[[Part], torch.Tensor], str] | None = None


@dataclass(frozen=True)
class Ref:
    """A tensor on a storage that is recorded."""

    record: Record
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, size, strides

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on real memory."""
        return torch.empty(0, dtype=self.dtype).set_(memory, *self.place)


@dataclass(frozen=True)
class Given:
    """A tensor that had its values when an operator read it: a copy, or, if it is large, the tensor itself.

    Attributes:
        checksum: of its values, which may also be those of an array or of a file; None if they are not read.
    """

    tensor: torch.Tensor
    checksum: int | None


@dataclass(frozen=True, eq=False)
class Write:
    """A call of an operator.

    Attributes:
        number: in the order of all calls.
        args, kwargs: with `Ref`s and `Given`s in the place of tensors.
        made: for each tensor that it gives, where that is to be; None for an argument.
        overwrites: the record of which it leaves nothing.
        state: of the generator, for a random operator.
        default_dtype: when it was called, of what names no type; libraries change it while they make a model.
    """

    number: int
    func: Any
    args: Any
    kwargs: Any
    made: list[Ref | None]
    overwrites: Record | None
    state: torch.Tensor | None
    default_dtype: torch.dtype

    @property
    def reads(self) -> Iterator[Record]:
        """The records whose contents before it decide what it writes."""
        refs = (leaf.record for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))
        return (record for record in refs if record is not self.overwrites)


def record_of(tensor: torch.Tensor) -> Record | None:
    """What a tensor without values is to hold; None for an ordinary one."""
    with function_modes_disabled():
        on_cpu = tensor.layout is torch.strided and tensor.device.type == "cpu"
        return getattr(tensor.untyped_storage(), RECORD, None) if on_cpu else None


def any_deferred() -> bool:
    """Whether there may be tensors without values."""
    return len(_known) > 0


def ref_of(tensor: torch.Tensor) -> Ref:
    """A tensor without values as the records know it."""
    record = record_of(tensor)
    assert record is not None
    return Ref(record, tensor.dtype, _place(tensor))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's storage, whatever its class."""
    with function_modes_disabled():
        return tensor.untyped_storage()


def needed(records: Iterable[Record], before: float) -> list[Write]:
    """The calls that decide what some records hold before a call of a number, in order."""
    found: dict[int, Write] = {}
    todo = [(record, before) for record in records]
    while todo:
        record, before = todo.pop()
        earlier = [write for write in record.writes if write.number < before]
        begin = max((i for i, write in enumerate(earlier) if write.overwrites is record), default=0)
        new = [write for write in earlier[begin:] if write.number not in found]
        found |= {write.number: write for write in new}
        todo += [(other, write.number) for write in new for other in write.reads]
    return [found[number] for number in sorted(found)]


_Memory = dict[Record, torch.UntypedStorage]


def scratch(nbytes: int) -> torch.UntypedStorage:
    """Memory that goes back to the system as soon as nobody has it: what `malloc` keeps would be given to tensors
    without values, which are to have untouched memory."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8).untyped_storage()


def _run(write: Write, memory: _Memory) -> None:
    """Runs a call on real memory, which is made where there is none."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            if leaf.record not in memory:
                memory[leaf.record] = scratch(leaf.record.nbytes)
            return leaf.on(memory[leaf.record])
        if isinstance(leaf, Given):
            if leaf.checksum is not None and leaf.checksum != checksum(leaf.tensor):
                raise RuntimeError(
                    f"deferred(): a tensor {list(leaf.tensor.shape)} that {base_name(write.func)} read was changed "
                    "since: leave it as it is until the module has its values"
                )
            return leaf.tensor
        return leaf

    with torch.no_grad(), dispatch_modes_off(), _default_dtype(write.default_dtype):
        result = write.func(*map_leaves(real, write.args), **map_leaves(real, write.kwargs))
        for ref, tensor in zip(write.made, tensors_of(result), strict=True):
            if ref is None:
                continue
            own = storage_of(tensor)
            if ref.record not in memory and own.nbytes() == ref.record.nbytes and _place(tensor) == ref.place:
                memory[ref.record] = own
            else:
                ref.on(memory.setdefault(ref.record, scratch(ref.record.nbytes))).copy_(tensor)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    if dtype == now:
        yield
        return
    with _process_lock:
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(now)


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride()


def replay(writes: Iterable[Write], memory: _Memory) -> _Memory:
    """Runs calls in order, random ones with what the generator gave them; gives the memory that they wrote."""
    for write in writes:
        if write.state is None:
            _run(write, memory)
        else:
            draw(write, memory, write.state)
    return memory


def draw(write: Write, memory: _Memory, state: torch.Tensor) -> torch.Tensor:
    """Runs a random call from a generator's state on; gives the state after it."""
    with _process_lock:
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            _run(write, memory)
            return torch.default_generator.get_state()
        finally:
            torch.default_generator.set_state(now)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in memory of their own; an ordinary tensor itself."""
    return tensor if record_of(tensor) is None else part_values(tensor, Part.whole(tensor.shape))


def part_values(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor's values, which may be a view of the whole ones: whoever keeps it makes a copy."""
    record = record_of(tensor)
    if record is None:
        return tensor.detach()[part.slices]
    if record.source is not None:
        return record.source[0](part)
    with plain_subclasses():
        memory = replay(needed([record], float("inf")), {})
        return ref_of(tensor).on(memory[record] if record in memory else scratch(record.nbytes))[part.slices]


def fill_storage(storage: torch.UntypedStorage) -> None:
    """Gives a storage its values by the calls that are recorded."""
    record: Record = getattr(storage, RECORD)
    storage.resize_(record.nbytes)
    replay(needed([record], float("inf")), {record: storage})
    setattr(storage, RECORD, None)


def read_from(tensor: torch.Tensor, source: Callable[[Part], torch.Tensor], name: str) -> None:
    """Has a tensor without values get them from elsewhere, a part where a part is asked for."""
    record = record_of(tensor)
    assert record is not None
    record.source = source, name


def origin(tensor: torch.Tensor) -> str:
    """Where a tensor is to get its values from, in words that tell other values; "" for one that has them."""
    record = record_of(tensor)
    if record is None:
        return ""
    if record.source is not None:
        return f" from {record.source[1]}"
    calls = needed([record], float("inf"))
    words = [_said((one.func, one.args, one.kwargs, one.state, one.default_dtype)) for one in calls]
    return f" made by calls with checksum {zlib.crc32(repr(words).encode()):08x}"


def checksum(tensor: torch.Tensor) -> int:
    """Of a tensor's bytes, in their order."""
    with torch.no_grad(), dispatch_modes_off(), function_modes_disabled():
        dense = (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu().resolve_conj().resolve_neg()
        dense = dense.contiguous()
        return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))


def _said(tree: Any) -> str:
    def said(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return leaf.dtype, leaf.place
        return leaf.checksum if isinstance(leaf, Given) else str(leaf)

    return repr(map_leaves(said, tree))
