"""`deferred`: models are made without memory; errors for whoever uses their tensors, and how these get values later.

The dispatch mode records the making of large tensors in the place of running it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wholestep.deferred_init.records import (
    RECORD,
    Given,
    Record,
    Write,
    checksum,
    draw,
    fill_storage,
    needed,
    numbers,
    record_of,
    ref_of,
    replay,
    storage_of,
    values_of,
)
from wholestep.functional import HIDDEN_WRITES, argument_names, base_name, bound_arguments, is_view, written_arguments
from wholestep.nested import map_leaves, tensors_of
from wholestep.tensor_parts import Part, give_data
from wholestep.torch_compat import TorchDispatchMode, plain_subclasses, plain_torch_function, storage_id, storage_uses

# Methods that read memory without an operator.
_METHODS = "numpy tolist __array__ data_ptr __repr__ __deepcopy__ __reduce_ex__ __dlpack__ apply_ map_"
RAW = {getattr(torch.Tensor, name) for name in _METHODS.split()} | {torch.tensor}
# Within `deferred()` also what gives the memory itself away: to pickle, to share, to read.
RAW_WITHIN = RAW | {torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.share_memory_}

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
        given = tensors_of((args, kwargs or {}))
        if depth() or all(record_of(one) is None for one in given):  # another one in its memory got the values
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


def become(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor other data, and so values, if it has none."""
    _plain(tensor)
    give_data(tensor, data)


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


def materialize(module: nn.Module) -> nn.Module:
    """Gives all parameters and buffers of a module that was made within `deferred` their values, whole.

    Returns:
        The module.
    """
    for one in module.modules():
        for tensor in own_tensors(one):
            fill(tensor)
    return module


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


LIMIT = 2**16  # bytes from which on a tensor is deferred; smaller ones are made at once

# Operators that write all of their first argument, whatever is in it.
_OVERWRITE = set("copy_ fill_ zero_ uniform_ normal_ random_ exponential_ log_normal_ cauchy_ geometric_".split())


@contextmanager
def deferred() -> Iterator[None]:
    """Within, modules are made and initialised without memory: only what makes their values is recorded.

    This holds for tensors of the CPU of 64 KiB and more; smaller ones are made at once. What is drawn from random
    generators is what would be drawn otherwise, and so are the values that ranks make of their parts later: in
    `fully_shard`, in the first call of a step under a plan of `ws.compile`, or whole, by `materialize`. Until then
    parameters and buffers have no values, and what needs them raises an error. Initialise and convert models within.
    """
    mode = _Recording()
    with _RawReads(), mode:
        active.depth = depth() + 1
        try:
            yield
        finally:
            active.depth -= 1
    mode.end()


class _RawReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RAW_WITHIN:
            for tensor in tensors_of((args, kwargs or {})):
                fill(tensor)
        return func(*args, **kwargs or {})


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, names = kwargs or {}, argument_names(func)
        given = list(tensors_of((args, kwargs)))
        bound = bound_arguments(func, args, kwargs)
        written = list(tensors_of([bound.get(names[i]) for i in written_arguments(func)]))
        if any(one.is_inference() for one in given):  # whose composite operators come as they are
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        known = [one for one in given if record_of(one) is not None]
        for one in known:
            self._lend(storage_of(one))
        changes_view = torch.Tag.inplace_view in func.tags
        if changes_view and not base_name(func).startswith("resize_"):
            return func(*args, **kwargs)  # of its object alone: `t_`, or `set_`, by which parametrizations write
        declares = func.namespace == "aten" and func not in HIDDEN_WRITES and not changes_view
        target = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
        here = target.type == "cpu" and all(one.device.type in ("cpu", "meta") for one in given)
        makes = "device" in names and base_name(func) != "_to_copy" and not written
        read = [one for one in given if record_of(one) is None and _nbytes(one) >= LIMIT]
        declares &= makes or not read or base_name(func) == "copy_"  # whose results depend on what may be written soon
        if here and declares and (makes or known) and all(record_of(one) is not None for one in written):
            if is_view(func) and known:
                return func(*args, **kwargs)
            found = self._record(func, args, kwargs, written, makes, small=not known)
            if found is not None:
                return found[0]
        for one in written if declares else known:
            fill(one)
        return func(*map_leaves(_with_values, args), **map_leaves(_with_values, kwargs))

    def _record(
        self, func: Any, args: Any, kwargs: Any, written: list[Any], makes: bool, small: bool
    ) -> tuple[Any] | None:
        """Records a call, and gives what it gives, without values; None for one whose results' sizes need values.

        Args:
            makes: its tensors are read for their sizes and types alone; small: small results are none to record.
        """
        originals: dict[int, torch.Tensor] = {}
        copies: list[torch.Tensor] = []

        def on_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            originals[id(made)] = leaf
            copies.append(made)
            return made

        meta = {"device": torch.device("meta")} if "device" in argument_names(func) else {}
        options = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        try:
            result = func(*map_leaves(on_meta, args), **map_leaves(on_meta, options) | meta)
        except (NotImplementedError, RuntimeError):
            return None
        fresh = [one for one in tensors_of(result) if id(one) not in originals]
        if any(one.size() != originals[id(one)].size() for one in copies):
            return None  # what `out=` is has been resized
        if not (fresh or written) or (small and sum(map(_nbytes, fresh)) < LIMIT):
            return None
        made = {id(one): self._without_values(one) for one in fresh}
        first = written[0] if written and base_name(func) in _OVERWRITE else None
        record = record_of(first) if first is not None else None
        whole = record is not None and first is not None and _nbytes(first) == record.nbytes
        whole &= all(record_of(one) is not record for one in tensors_of((args[1:], kwargs)))
        random = torch.Tag.nondeterministic_seeded in func.tags
        generator = kwargs.get("generator") or torch.default_generator
        results = [ref_of(made[id(one)]) if id(one) in made else None for one in tensors_of(result)]
        kept = {key: value for key, value in kwargs.items() if key != "generator"}
        noted_args, noted_kwargs = map_leaves(partial(_noted, makes), (args, kept))
        write = Write(
            next(numbers), func, noted_args, noted_kwargs, results,
            record if whole else None, generator.get_state() if random else None, torch.get_default_dtype(),
        )  # fmt: skip
        if write.state is not None:  # whoever draws next is to find the generator where it would be
            generator.set_state(draw(write, replay(needed(write.reads, write.number), {}), write.state))
        if not base_name(func).removeprefix("new_").startswith("empty"):
            for one in [*written, *made.values()]:
                found = record_of(one)
                assert found is not None
                found.writes.append(write)
        return (map_leaves(lambda leaf: originals.get(id(leaf), made.get(id(leaf), leaf)), result),)

    def _without_values(self, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        storage = storage_of(made)
        setattr(storage, RECORD, Record(storage.nbytes()))
        self.storages.append(storage)
        return made

    def _lend(self, storage: torch.UntypedStorage) -> None:
        """Memory that nobody touches, for a tensor of an earlier context: views are checked against it."""
        if not storage.nbytes():
            storage.resize_(getattr(storage, RECORD).nbytes)
            self.storages.append(storage)

    def end(self) -> None:
        """Takes the memory of what modules alone have; what else there is gets its values."""
        holders: dict[int, dict[int, torch.Tensor]] = {}
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_buffers" in vars(one)]
        for tensor in (t for m in modules for t in own_tensors(m) if type(t) in (*GUARDS, *GUARDS.values())):
            if record_of(tensor) is not None:
                holders.setdefault(storage_id(storage_of(tensor)), {})[id(tensor)] = tensor
        while self.storages:
            storage = self.storages.pop()
            found = [*holders.get(storage_id(storage), {}).values()]
            if getattr(storage, RECORD) is not None and storage_uses(storage) > 1:  # the one is this object of Python
                if storage_uses(storage) == 1 + len(found):
                    guard(storage, found)
                else:
                    fill_storage(storage)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize  # of the whole, if it is sparse


def _noted(makes: bool, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if record_of(leaf) is not None:
        return ref_of(leaf)
    kept = leaf.detach().clone() if _nbytes(leaf) < LIMIT else leaf
    return Given(kept, None if makes else checksum(kept))


def _with_values(leaf: Any) -> Any:
    return values_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
