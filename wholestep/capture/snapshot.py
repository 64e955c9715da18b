"""The snapshot: what a step could see before it ran, so that all of it can be put back and compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wholestep.capture import boxes
from wholestep.capture import guards as guarding
from wholestep.capture.effects import Effect, differences
from wholestep.capture.guards import Guard
from wholestep.capture.source import Call
from wholestep.capture.walk import Found, Number, Place, Walk
from wholestep.torch_compat import set_versions


class Snapshot:
    """Everything that one call of a step can see, before it runs.

    Attributes:
        call: the function and its arguments.
        places: every holder that the walk met, with a copy of its contents.
        tensors: id of a tensor -> where it was found and what it is for.
        numbers: floats among optimizers' settings, which are inputs of the step.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.walk = Walk(call)
        self.places: list[Place] = self.walk.places
        self.tensors: dict[int, Found] = self.walk.tensors
        self.numbers: list[Number] = self.walk.numbers
        self.stand_ins: list[object] = []
        self._lifted: dict[tuple[int, str], Any] = {}
        self._grad_mode = torch.is_grad_enabled()
        self._guards: list[Guard] | None = None
        self._versions = [(f.tensor, f.tensor._version, f.tensor.grad_fn) for f in self.tensors.values()
                          if not f.tensor.is_inference()]

    def find(self, tensor: torch.Tensor) -> Found | None:
        """Where a tensor was found; None for one that the step made itself or that only a library can reach."""
        found = self.tensors.get(id(tensor))
        return found if found is not None and found.tensor is tensor else None

    def lift(self, stand_ins: Sequence[object]) -> None:
        """Puts stand-ins in place of `numbers`, in their order; tuples are rebuilt around theirs.

        Raises:
            ValueError: not one stand-in for each number.
        """
        if len(stand_ins) != len(self.numbers):
            raise ValueError(f"{len(stand_ins)} stand-ins for {len(self.numbers)} numbers; give one for each")
        self.stand_ins = list(stand_ins)
        for number, stand_in in zip(self.numbers, stand_ins, strict=True):
            value: Any = stand_in
            if number.index is not None:
                old = number.group[number.key]
                value = (*old[:number.index], stand_in, *old[number.index + 1:])
            number.group[number.key] = value
            self._lifted[id(number.group), number.key] = value

    def guards(self) -> list[Guard]:
        """What must hold in a later call: derived from the contents at the time of the snapshot."""
        if self._guards is None:
            self._guards = guarding.guards(self.walk)
        return self._guards

    def effects(self, is_new: Callable[[torch.Tensor], bool]) -> list[Effect]:
        """What has changed in the Python world since the snapshot.

        Args:
            is_new: tells tensors that the step made from those that were there before.

        Raises:
            LeakError: a new tensor is held where a replay cannot put its successor.
        """
        return differences(self, is_new)

    def restore(self) -> None:
        """Puts everything back: contents and their order, gradients, flags, hooks, versions, lifted numbers."""
        torch.set_grad_enabled(self._grad_mode)
        torch.clear_autocast_cache()
        for place in self.places:
            now = place.box.read(place.holder)
            if not same(now, place.before):
                place.box.write(place.holder, place.before)
        moved = [(tensor, version) for tensor, version, _ in self._versions if tensor._version != version]
        if moved:
            set_versions(tuple(t for t, _ in moved), tuple(v for _, v in moved))
        self._lifted.clear()

    def module_names(self) -> dict[int, str]:
        """id of each module that the step can see -> its path, as in ``model.layers.0``."""
        names: dict[int, str] = {}
        for place in self.places:
            if isinstance(place.owner, torch.nn.Module):
                path = re.sub(r"^\w+\['(\w+)'\]", r"\1", str(place.source))
                names.setdefault(id(place.owner), path.removesuffix(".__dict__"))
        return names


def same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """True when two views of a holder have the same keys in the same order with the very same values."""
    return len(now) == len(before) and all(
        k is j or (type(k) is type(j) and type(k) in (str, int) and k == j) for k, j in zip(now, before, strict=True)
    ) and all(v is w for v, w in zip(now.values(), before.values(), strict=True))


def snapshot(fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Snapshot:
    """Walks what a call of ``fn`` could see and records it.

    Raises:
        CaptureError: something is in reach that cannot be captured.
    """
    return Snapshot(Call(fn, tuple(args), dict(kwargs or {})))


__all__ = ["Snapshot", "boxes", "same", "snapshot"]
