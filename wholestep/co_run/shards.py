"""What one rank has of tensors that the step's Python sees whole, and how their views were made, to be made anew."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wholestep import comm
from wholestep.capture import Called, PartsOf, Snapshot, TensorInput, UnshardedViews
from wholestep.co_run.operators import Facts
from wholestep.co_run.places import place_of, storage_at, storage_of
from wholestep.comm.api.object_collectives import gathered_objects
from wholestep.nested import map_leaves, tensors_of
from wholestep.spmd import gather_parts
from wholestep.tensor_parts import Part, give_data, mark_part, narrow_to, say_parts, say_whole
from wholestep.torch_compat import storage_id, storage_uses

# Owners of a held storage that are none of the step's: the tensor of the record, and the object that asks.
_OWN_USES = 2


@dataclass
class Held:
    """What this rank holds of one storage between programs.

    Attributes:
        tensor: all of it, as Python sees it; nobody has written it.
        local: what this rank has.
        part: which part of the whole that is.
        placements: along the axes of the mesh, of what a program has left; None for what was there before the step.
    """

    tensor: torch.Tensor
    local: torch.Tensor
    part: Part
    placements: tuple[Any, ...] | None = None


class Shards:
    """The storages of which this rank holds parts, of one step.

    Attributes:
        held: by storage.
        groups: of ranks, along the axes of the mesh.
    """

    def __init__(self, groups: Sequence[comm.ProcessGroup]) -> None:
        self.held: dict[int, Held] = {}
        self._groups = groups

    def put(self, tensors: Iterable[TensorInput], parts_of: PartsOf | None) -> None:
        """Begins a call: tensors of which this rank holds parts get their whole shapes."""
        self._views = UnshardedViews(tensors, parts_of)
        self._views.put()
        for tensor, mine in self._views.exchanged:
            self.add(tensor, mine, self._views.parts[id(tensor)])

    def add(
        self, tensor: torch.Tensor, local: torch.Tensor, part: Part, placements: tuple[Any, ...] | None = None
    ) -> None:
        """Notes a part that a program has left, or begins with."""
        memory = storage_of(tensor)
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # whose writes count for nobody's backward
        alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
        self.held[storage_id(memory)] = Held(alias, local, part, placements)

    def local(self, tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
        """The part of a tensor that a program takes.

        Args:
            part: that it is made for; None: all of it.
        """
        held = self.of(tensor)
        if held is not None and held.part != part:
            self.fill(storage_at(tensor), writes=True)
        elif held is not None:
            return held.local
        if part is None:
            return tensor
        local = tensor.detach()[part.slices].clone(memory_format=torch.contiguous_format)
        self.add(tensor, local, part)
        return local

    def fill(self, key: int, writes: bool) -> None:
        """Gathers a whole storage from the ranks, unless it is whole here. A collective.

        Args:
            writes: whether it stays whole from now on.
        """
        held = self.held.get(key)
        if held is None:
            return
        local, part = held.local, held.part
        for group in reversed(self._groups):
            local, part = _gathered(local, part, group)
        held.tensor.copy_(local)
        if writes:
            del self.held[key]

    def forget_dead(self) -> None:
        """Lets go of what nobody sees any more."""
        for key, held in list(self.held.items()):
            if storage_uses(storage_of(held.tensor)) <= _OWN_USES:
                del self.held[key]

    def take_back(self, call: Called, complete: bool) -> None:
        """The call has ended: what a plan keeps in parts is a part again, and the rest is whole.

        Args:
            complete: False after an error, when other ranks may not meet this one.
        """
        lasting = [(tensor, self._views.parts[id(tensor)]) for tensor, _ in self._views.exchanged]
        mine = {id(tensor): held for tensor, part in lasting if (held := self.of(tensor)) and held.part == part}
        for tensor, part in lasting if complete else ():
            if id(tensor) not in mine:  # as an operator has left it, which ran on all of it
                self.local(tensor, part)
        for tensor, before in self._views.exchanged:
            held = self.of(tensor)
            give_data(tensor, before if held is None else held.local)
        self._views.give_classes()
        known = {id(tensor) for tensor, _ in lasting}
        self.forget_dead()
        if self.held and complete:
            seen = Snapshot(*call)
            for found in seen.tensors.values():
                held = self.of(found.tensor)
                if found.kind in ("parameter", "buffer", "state") and held and id(found.tensor) not in known:
                    self._keep(found.tensor, held.part)
                    lasting.append((found.tensor, held.part))
            owners = [container.owner for container in seen.containers]
            say_parts(owners)
            say_whole(owners)
        for tensor, part in lasting if complete else ():
            if tensor.is_leaf and tensor.grad is not None and id(tensor.grad) not in known:
                self._keep(tensor.grad, part)
        if complete:
            self.forget_dead()
            for key in list(self.held):
                self.fill(key, writes=True)
        self.held.clear()
        del self._views

    def _keep(self, tensor: torch.Tensor, part: Part) -> None:
        """Makes a tensor that the step has left the part that this rank keeps."""
        held = self.of(tensor)
        if held is not None and held.part == part and place_of(held.tensor) == place_of(tensor):
            give_data(tensor, held.local)
            mark_part(tensor, part)
            return
        self.fill(storage_at(tensor), writes=True)
        if tensor.shape == part.shape:
            narrow_to(tensor, part)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank has of a tensor's memory: all of it, or its part."""
        held = self.of(tensor)
        return tensor if held is None else held.local

    def of(self, tensor: torch.Tensor) -> Held | None:
        """What this rank has of a tensor's memory, instead of all of it."""
        return self.held.get(storage_at(tensor)) if tensor.layout is torch.strided else None


def _gathered(local: torch.Tensor, part: Part, group: comm.ProcessGroup) -> tuple[torch.Tensor, Part]:
    """What the ranks of a group hold together of a whole tensor, each having one block of it."""
    parts = gathered_objects(part, group)
    return (local, part) if all(other == part for other in parts) else gather_parts(local, parts, group)


@dataclass(frozen=True, slots=True)
class At:
    """Stands for a tensor, by its place, in the call that made a view."""

    place: Any


class ViewCall(NamedTuple):
    """A call that made views, with places for tensors."""

    facts: Facts
    args: Any
    kwargs: Any
    found: Any


class PartViews:
    """The calls that first made the views of one call of a step, by storage and place."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[Any, ViewCall]] = {}

    def remember(self, facts: Facts, args: Any, kwargs: Any, found: Any) -> None:
        """A call has made views; those that are laid out as what they are of are none."""
        call = ViewCall(facts, *[map_leaves(_placed, tree) for tree in (args, kwargs, found)])
        operands = [place_of(tensor) for tensor in tensors_of((args, kwargs))]
        for place in map(place_of, tensors_of(found)):
            if place not in operands:
                self._calls.setdefault(place[0], {}).setdefault(place, call)

    def call_of(self, place: Any) -> ViewCall | None:
        """The call that made a view."""
        return self._calls.get(place[0], {}).get(place)

    def forget(self, storage: int) -> None:
        """A new storage has the address of one that is gone."""
        self._calls.pop(storage, None)

    def keep(self, storages: Container[int]) -> None:
        """Lets go of all views but those of some storages."""
        self._calls = {storage: views for storage, views in self._calls.items() if storage in storages}


def _placed(value: Any) -> Any:
    return At(place_of(value)) if isinstance(value, torch.Tensor) else value
