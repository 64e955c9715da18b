"""The tensors of a segment that is recorded: a slot for each, by its place, and what became of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from wholestep.co_run.operators import Facts
from wholestep.co_run.places import PLAIN, parts, place_of, storage_at, storage_of
from wholestep.co_run.prefix_tree import Given, Layout
from wholestep.co_run.ranks import Ranks
from wholestep.co_run.segment import FALSE, FLOAT, TRUE, Exactly, Slot, slot
from wholestep.co_run.shards import At, PartViews
from wholestep.torch_compat import is_zero_tensor

_STRIDED = torch.strided
_AS_IT_IS = frozenset((int, type(None), torch.dtype, torch.device))


class Opaque(Exception):  # noqa: N818 - a signal, not an error
    """An argument that the queue does not record."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass, and lies in memory by strides."""
    return type(tensor) in PLAIN and tensor.layout is _STRIDED


class Slots:
    """Slots of the tensors that a segment has met so far.

    Args:
        ranks: those of a step with plans, which see what memory is met.
        views: how views of such memory were made.

    Attributes:
        of: place of a tensor -> its slot.
        storages: storage -> the first slot in it.
        any_float: whether floats of the call at hand may be others in another call.
        externals: slots of tensors that were there before.
        tensors: these.
        numbers: the floats that may be others.
        made: results of deferred calls: slot, storage and layout.
        pending: storages that deferred calls make, or write.
    """

    def __init__(self, ranks: Ranks | None, views: PartViews) -> None:
        self._ranks, self._views = ranks, views
        self.begin()

    def begin(self) -> None:
        """Forgets all: another segment begins."""
        self.of: dict[Any, Slot] = {}
        self.storages: dict[int, int] = {}
        self._count = 0
        self._new: list[Any] = []  # externals that no call has used before
        self.any_float = False
        self.run()

    def run(self) -> None:
        """Notes that what was deferred has run."""
        self.externals: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[float] = []
        self.made: list[tuple[int, torch.UntypedStorage, Layout]] = []
        self._own: set[int] = set()  # storages of what was made
        self.pending: set[int] = set()

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that a deferred call writes tensors."""
        self.pending.update(storage_at(tensor) for tensor in tensors)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """What stands for arguments in a call's key and in its record."""
        numbers = self.numbers if self.any_float else None
        positional = parts(tuple(args), self.of, numbers, self._part)
        return positional, tuple(zip(kwargs, parts((*kwargs.values(),), self.of, numbers, self._part), strict=True))

    def met(self) -> tuple[Any, ...]:
        """What a call's key says of externals that it is the first to use."""
        if not self._new:
            return ()
        new = tuple(self._new)
        self._new.clear()
        return new

    def count(self) -> tuple[int, int]:
        """How many numbers and externals there are, for `take_back`."""
        return len(self.numbers), len(self.tensors)

    def take_back(self, numbers: int, externals: int) -> None:
        """Forgets the numbers and externals of a call that is not deferred."""
        del self.numbers[numbers:], self.tensors[externals:], self.externals[externals:]

    def _part(self, value: Any) -> Any:
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if isinstance(value, torch.Tensor):
            return self.of_tensor(value)
        if kind is list or kind is tuple:
            return tuple([self._part(item) for item in value])
        if kind is bool:
            return TRUE if value else FALSE
        if isinstance(value, float):  # NumPy's, too
            if not self.any_float:
                return Exactly(float(value).hex())
            self.numbers.append(float(value))
            return FLOAT
        if kind is torch.Size:
            return tuple(value)
        if kind is At:
            return self.of[value.place]
        if kind is complex:
            raise Opaque  # which is equal to a float
        return value

    def of_tensor(self, tensor: torch.Tensor) -> Slot:
        """The slot of a tensor, an external where it has none."""
        if type(tensor) not in PLAIN or tensor.layout is not _STRIDED or tensor.is_neg():
            raise Opaque
        place = place_of(tensor)
        found = self.of.get(place)
        if found is not None:
            return found
        storage, dtype = place[0], tensor.dtype
        if storage in self._own or dtype.is_complex or not storage or is_zero_tensor(tensor):
            raise Opaque  # such as a view of memory to be written that no recorded call made
        if self._ranks is not None:
            self._ranks.meet(tensor, place)
        index = self._next(place)
        self._new.append((self.of[place], place[1:], tensor.device, self.storages.get(storage)))
        self.storages.setdefault(storage, index)
        self.externals.append(index)
        self.tensors.append(tensor.detach())  # which stays what it is, where `tensor.data` is set
        return self.of[place]

    def _next(self, place: Any) -> int:
        index = self._count
        self._count += 1
        self.of[place] = slot(index)
        return index

    def register(self, found: Any) -> Any:
        """Gives slots to tensors that are there, views and results of a call that was run, or to places of such."""
        if isinstance(found, (list, tuple)):
            return tuple([self.register(item) for item in found])
        if type(found) is At:
            return self._next(found.place)
        if not isinstance(found, torch.Tensor) or found.layout is not _STRIDED or found.is_nested:
            return None
        place = place_of(found)
        index = self._next(place)
        self.storages.setdefault(place[0], index)
        return index

    def register_made(self, found: Any, results: Any) -> None:
        """Gives slots to those results of a call, which has run, that it will be answered with when it comes again."""
        if type(results) is Layout:
            self.register(found)
        elif type(results) is tuple:
            for value, result in zip(found, results, strict=True):
                self.register_made(value, result)

    def answer(self, facts: Facts, args: Any, kwargs: Any, results: Any) -> tuple[Any, Any]:
        """Memory for the results of a deferred call, and their slots."""
        kind = type(results)
        if kind is Layout:
            size, stride, dtype, device = results
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
            place = place_of(tensor)
            identity = place[0]
            index = self.storages[identity] = self._next(place)
            self.made.append((index, storage_of(tensor), results))
            self._own.add(identity)
            self._views.forget(identity)
            self.pending.add(identity)
            return tensor, index
        if kind is Given:
            return facts.argument(args, kwargs, results.position), None
        if kind is tuple:
            pairs = [self.answer(facts, args, kwargs, item) for item in results]
            return tuple([found for found, _ in pairs]), tuple([index for _, index in pairs])
        return None, None
