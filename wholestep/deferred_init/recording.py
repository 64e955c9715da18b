"""`deferred`: the dispatch mode that records the making of large tensors in the place of running it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wholestep.deferred_init.deferred_tensors import (
    GUARDS,
    RAW,
    active,
    depth,
    fill,
    fill_storage,
    guard,
    own_tensors,
    values_of,
)
from wholestep.deferred_init.records import (
    RECORD,
    Given,
    Record,
    Write,
    draw,
    needed,
    numbers,
    record_of,
    ref_of,
    replay,
    storage_of,
)
from wholestep.functional import argument_names, base_name, bound_arguments, is_view, written_arguments
from wholestep.nested import map_leaves, tensors_of
from wholestep.torch_compat import TorchDispatchMode, storage_id, storage_uses

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
        if func in RAW:
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
        known = [one for one in given if record_of(one) is not None]
        for one in known:
            self._lend(one.untyped_storage())
        target = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
        here = target.type == "cpu" and all(one.device.type in ("cpu", "meta") for one in given)
        makes = "device" in names and base_name(func) != "_to_copy" and not written
        if here and (makes or known) and all(record_of(one) is not None for one in written):
            if is_view(func) and known:
                return func(*args, **kwargs)
            found = self._record(func, args, kwargs, written, small=not known)
            if found is not None:
                return found[0]
        for one in written:
            fill(one)
        return func(*map_leaves(_with_values, args), **map_leaves(_with_values, kwargs))

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[Any], small: bool) -> tuple[Any] | None:
        """Records a call, and gives what it gives, without values; None for one whose results' sizes need values.

        Args:
            small: small results are none to record.
        """
        originals: dict[int, torch.Tensor] = {}

        def on_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            originals[id(made)] = leaf
            return made

        meta = {"device": torch.device("meta")} if "device" in argument_names(func) else {}
        options = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        try:
            result = func(*map_leaves(on_meta, args), **map_leaves(on_meta, options) | meta)
        except (NotImplementedError, RuntimeError):
            return None
        fresh = [one for one in tensors_of(result) if id(one) not in originals]
        if not (fresh or written) or (small and sum(one.nbytes for one in fresh) < LIMIT):
            return None
        made = {id(one): self._without_values(one) for one in fresh}
        first = written[0] if written and base_name(func) in _OVERWRITE else None
        record = record_of(first) if first is not None else None
        whole = record is not None and first is not None and first.numel() * first.itemsize == record.nbytes
        random = torch.Tag.nondeterministic_seeded in func.tags
        generator = kwargs.get("generator") or torch.default_generator
        results = [ref_of(made[id(one)]) if id(one) in made else None for one in tensors_of(result)]
        kept = {key: value for key, value in kwargs.items() if key != "generator"}
        write = Write(
            next(numbers), func, map_leaves(_noted, args), map_leaves(_noted, kept), results,
            record if whole else None, generator.get_state() if random else None,
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
        setattr(made.untyped_storage(), RECORD, Record(made.untyped_storage().nbytes()))
        self.storages.append(made.untyped_storage())
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


def _noted(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if record_of(leaf) is not None:
        return ref_of(leaf)
    kept = leaf.detach().clone() if leaf.nbytes < LIMIT else leaf
    return Given(kept, kept._version)


def _with_values(leaf: Any) -> Any:
    return values_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
