"""Views of memory of which programs take a part: how they were made, so that a later segment makes them anew."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wholestep.co_run.operators import Facts
from wholestep.co_run.prefix_tree import place_of
from wholestep.nested import map_leaves, tensors_of


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
