"""Tensors without values: errors for whoever uses one, and how they get their values, whole or in parts."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholestep.deferred_init.records import (
    RECORD,
    Given,
    Record,
    Ref,
    needed,
    record_of,
    ref_of,
    replay,
    scratch,
    storage_of,
)
from wholestep.functional import base_name
from wholestep.nested import map_leaves, tensors_of
from wholestep.tensor_parts import Part, give_data
from wholestep.torch_compat import TorchDispatchMode, plain_subclasses, plain_torch_function

# Methods that read memory without an operator.
RAW = {getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__array__", "data_ptr", "__repr__", "__deepcopy__",
                                                 "__reduce_ex__", "__dlpack__")} | {torch.tensor}  # fmt: skip

active = threading.local()


def depth() -> int:
    """How many `deferred()` this thread is within."""
    return getattr(active, "depth", 0)


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _without_values(base_name(func), (args, kwargs or {}))


def _without_values(what: str, given: Any) -> RuntimeError:
    with plain_subclasses():
        shape = next(list(one.shape) for one in tensors_of(given) if isinstance(one, Guard))
    return RuntimeError(
        f"{what} was given a tensor {shape} made within deferred(), which has no values yet: shard its module "
        "(fully_shard, or a plan of ws.compile), or give it whole values (wholestep.parallel.materialize); initialise "
        "and convert it within deferred()"
    )


class Guard(torch.Tensor):
    """A tensor without values: what would read or write them raises an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if depth():
            return plain_torch_function(func, types, args, kwargs or {})
        if func in RAW or func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            raise _without_values("data" if func not in RAW else func.__name__, args)
        with _Refusing():
            return plain_torch_function(func, types, args, kwargs or {})


class DeferredParameter(Guard, nn.Parameter):
    """A parameter without values."""


GUARDS: dict[type, type] = {nn.Parameter: DeferredParameter, torch.Tensor: Guard}


def guard(storage: torch.UntypedStorage, tensors: Iterable[torch.Tensor]) -> None:
    """Takes the memory of tensors without values, which no longer can be used."""
    for tensor in tensors:
        tensor.__class__ = GUARDS.get(type(tensor), type(tensor))
    storage.resize_(0)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in memory of their own; an ordinary tensor itself."""
    record = record_of(tensor)
    if record is None:
        return tensor
    with plain_subclasses():
        if record.source is not None:
            return record.source[0](Part.whole(tensor.shape))
        memory = replay(needed([record], float("inf")), {})
        return ref_of(tensor).on(memory[record] if record in memory else scratch(record.nbytes))


def part_values(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor's values, which may be a view of the whole ones: whoever keeps it makes a copy."""
    record = record_of(tensor)
    if record is not None and record.source is not None:
        return record.source[0](part)
    return values_of(tensor).detach()[part.slices]


def become(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor other data, and so values, if it has none."""
    _plain(tensor)
    give_data(tensor, data)


def fill_storage(storage: torch.UntypedStorage) -> None:
    """Gives a storage its values by the calls that are recorded."""
    record: Record = getattr(storage, RECORD)
    storage.resize_(record.nbytes)
    replay(needed([record], float("inf")), {record: storage})
    setattr(storage, RECORD, None)


def fill(tensor: torch.Tensor) -> None:
    """Gives a tensor, and all that share its memory, their values, if they have none."""
    record = record_of(tensor)
    if record is not None:
        storage = storage_of(tensor)
        source = record.source
        if source is None:
            fill_storage(storage)
        else:
            storage.resize_(record.nbytes)
            setattr(storage, RECORD, None)
            with torch.no_grad(), plain_subclasses():
                tensor.copy_(source[0](Part.whole(tensor.shape)))
    _plain(tensor)


def _plain(tensor: torch.Tensor) -> None:
    if isinstance(tensor, Guard):
        kind: Any = nn.Parameter if isinstance(tensor, DeferredParameter) else torch.Tensor
        tensor.__class__ = kind


def read_from(tensor: torch.Tensor, source: Callable[[Part], torch.Tensor], name: str) -> None:
    """Has a tensor without values get them from elsewhere, a part where a part is asked for."""
    record = record_of(tensor)
    assert record is not None
    record.source = source, name


def materialize(module: nn.Module) -> nn.Module:
    """Gives all parameters and buffers of a module that was made within `deferred` their values, whole.

    Returns:
        The module.
    """
    for one in module.modules():
        for tensor in own_tensors(one):
            fill(tensor)
    return module


def origin(tensor: torch.Tensor) -> str:
    """Where a tensor is to get its values from, in words that tell other values; "" for one that has them."""
    record = record_of(tensor)
    if record is None:
        return ""
    if record.source is not None:
        return f" from {record.source[1]}"
    words = [_said((one.func, one.args, one.kwargs, one.state)) for one in needed([record], float("inf"))]
    return f" made by calls with checksum {zlib.crc32(repr(words).encode()):08x}"


def _said(tree: Any) -> str:
    def said(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return leaf.dtype, leaf.place
        leaf = leaf.tensor if isinstance(leaf, Given) else leaf
        if isinstance(leaf, torch.Tensor):
            return zlib.crc32(leaf.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return str(leaf)

    return repr(map_leaves(said, tree))


@contextmanager
def allocated(tensors: Iterable[torch.Tensor], fills: bool = True) -> Iterator[None]:
    """Within, tensors without values look like others, in memory that nobody touches; what has none at the end gets
    them then, or, after an error or where it is only looked at, is as before."""
    pending = [one for one in tensors if record_of(one) is not None]
    for one in pending:
        record = record_of(one)
        storage_of(one).resize_(record.nbytes if record is not None else 0)
        _plain(one)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        for one in pending:
            if succeeded and fills:
                fill(one)
            elif record_of(one) is not None:
                guard(storage_of(one), [one])


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """What a module has as parameters, buffers and attributes, without the modules in it."""
    own = (module._parameters, module._buffers, vars(module))
    return (one for held in own for one in held.values() if isinstance(one, torch.Tensor))
