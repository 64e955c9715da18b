"""What is put in the place of what a step sees while it is traced: stand-ins for numbers, twins, whole tensors."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Container, Sequence
from types import ModuleType
from typing import Any

import torch

from wholestep.capture.exchange.detached_aliases import Twins
from wholestep.capture.exchange.unsharded_views import PartsOf, Wholes
from wholestep.capture.guards.identity_checks import memory
from wholestep.capture.outside.append_only_lists import Sink
from wholestep.capture.outside.iterators import Cached, Stopped
from wholestep.capture.outside.lr_schedulers import Deferred, Noted, Pending, all_of, is_of_numbers
from wholestep.capture.snapshot import boxes
from wholestep.capture.snapshot.places import Found, Place
from wholestep.capture.snapshot.visible import Replace, Seen
from wholestep.capture.sources import Call, Item, Replacement, Root, Source, Vars, lineage
from wholestep.patches import Patches
from wholestep.tensor_parts import Part
from wholestep.torch_compat import HOOK_TABLES


class Exchanged(Seen):
    """What a call can see, with what stands in its place.

    Attributes:
        differentiable: whether tensors with a history are inputs that gradients flow to, or mere data.
        stand_ins: what stands for `numbers`, in their order.
        lifted: (id of a holder, key) -> what stands there now.
        noted: calls of schedulers.
        replaced_gradients: paths of gradients that the step replaces, and that nothing in it reads.
        parts: id of a tensor -> what it holds of the whole one that it stands for.
        spread: whether each rank may come to hold a part of any tensor.
    """

    differentiable = True

    def __init__(self, call: Call, names: frozenset[str] = frozenset(),
                 varying: frozenset[str] = frozenset(), replace: Replace | None = None) -> None:
        super().__init__(call, names, varying, replace)
        self.stand_ins: list[object] = []
        self._patches = Patches()
        self.lifted: dict[tuple[int, Any], Any] = {}
        self.noted: list[Noted] = []
        self.looked_into: frozenset[str] = frozenset()
        self.replaced_gradients: frozenset[str] = frozenset()
        self.wholes, self.spread = Wholes((), None), False
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def lift(self, stand_ins: Sequence[object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts stand-ins in place of `numbers`, in their order; tuples are rebuilt around theirs.

        Returns:
            the call's arguments, with stand-ins for those that are numbers.

        Raises:
            ValueError: not one stand-in for each number.
        """
        if len(stand_ins) != len(self.numbers):
            raise ValueError(f"{len(stand_ins)} stand-ins for {len(self.numbers)} numbers; give one for each")
        self.stand_ins = list(stand_ins)
        for array in self.walk.arrays.values():
            array.keep()
        args = [self.twins.exchange(value) for value in self.call.args]
        kwargs = {name: self.twins.exchange(value) for name, value in self.call.kwargs.items()}
        for number, stand_in in zip(self.numbers, stand_ins, strict=True):
            if number.group is not None:
                value: Any = stand_in
                if number.index is not None:
                    old = number.group[number.key]
                    value = (*old[:number.index], stand_in, *old[number.index + 1:])
                number.group[number.key] = value
                self.lifted[id(number.group), number.key] = value
            elif number.place is not None:
                place = number.place
                place.box.write(place.holder, {**place.box.read(place.holder), number.key: stand_in})
                self.lifted[id(place.holder), number.key] = stand_in
            elif isinstance(number.source, Root):
                at: Any = number.source.argument
                (args if isinstance(at, int) else kwargs)[at] = stand_in
        for scheduler, source in self.walk.schedulers:
            vars(scheduler)["step"] = Deferred(scheduler, source, self._note)
        return tuple(args), kwargs

    def put_wholes(self, parts: PartsOf | None) -> None:
        """Gives tensors that the rank holds as parts the shapes of the whole ones, until `restore`.

        Args:
            parts: what tensors that carry no mark hold all the same; None when the step is not spread over ranks.
        """
        self.spread = parts is not None
        self.wholes = Wholes(self.tensors.values(), parts)
        self.wholes.put()

    def original(self, value: Any) -> Any:
        """The tensor that a twin took the place of while the step was traced; any other value as it is."""
        return self._originals[id(value)][1] if id(value) in self._originals else value

    @property
    def parts(self) -> dict[int, Part]:
        return self.wholes.parts

    @property
    def twin_ids(self) -> Container[int]:
        """The ids of the tensors that stand in the place of others now."""
        return self.twins.found.keys()

    def put_twins(self, reshaped: Container[int] = ()) -> None:
        """Puts twins in the place of tensors with a history, until `restore`; `lift` gives those among arguments.

        Args:
            reshaped: ids of other tensors that need one: the step makes them views of what they were.
        """
        replaced = {id(old): new for old, new in self.replaced}
        self.twins = twins = Twins(self.tensors.values() if self.differentiable else (), replaced, reshaped)
        for key, found in self.tensors.items():
            if key in twins.of:
                self._originals[id(twins.of[key])] = twins.of[key], found.tensor
                if key in self.parts:
                    self.parts[id(twins.of[key])] = self.parts[key]
        twins.of.update(self.walk.sinks.put() | self.walk.stoppers.put() | self._patch())
        if twins.of:
            for place in self.places:
                if place.box not in (boxes.TENSOR, boxes.TUPLE):
                    self._exchange(place)
        self.train_alike()

    def _patch(self) -> dict[int, Any]:
        """Patches what asks the world outside, for this thread until `restore`; gives what is there now by the id of
        what modules had, which the step may hold too."""
        walk, thread = self.walk, threading.get_ident()
        replacements = [*walk.outside.replacements(walk.reach.settle()), *walk.stoppers.replacements()]
        before = [vars(owner).get(name) for owner, name, _ in replacements]
        self._patches.put(replacements, lambda: threading.get_ident() == thread)
        pairs = zip(before, replacements, strict=True)
        return {id(old): vars(owner)[name] for old, (owner, name, _) in pairs if isinstance(owner, ModuleType)}

    def standing(self) -> list[Any]:
        """What stands in the place of tensors, iterators, lists and cached functions."""
        kinds = Stopped, Cached, Sink
        return [v for v in self.twins.of.values() if type(v) in kinds or isinstance(v, torch.Tensor)]

    def sizable(self) -> list[Found]:
        """The tensors among the arguments that no other tensor shares memory with, and that have no history."""
        holders = Counter(memory(f.tensor) for f in self.tensors.values())
        free = [f for f in self.tensors.values() if _is_bare(f.tensor) and holders[memory(f.tensor)] == 1]
        return [f for f in free if f.kind in ("tensor", "batch") and self._is_argument(f.source)]

    def _is_argument(self, source: Source) -> bool:
        """Whether a source is an argument, or inside of one that is no module or optimizer."""
        *_, root = above = [*lineage(source)]
        held = any(isinstance(s.read(self.call), (torch.nn.Module, torch.optim.Optimizer)) for s in above[1:])
        return not held and isinstance(root, Root) and root.argument is not None

    def exchange(self, tensors: dict[int, torch.Tensor]) -> None:
        """Puts tensors in the place of others, given by id, until `restore`; `lift` gives those among arguments."""
        for key, tensor in tensors.items():
            found = self.tensors[key]
            vars(tensor).update(vars(found.tensor))
            self.twins.of[key] = tensor
            self.twins.found[id(tensor)] = dataclasses.replace(found, tensor=tensor)
        for place in self.places:
            if place.box not in (boxes.TENSOR, boxes.TUPLE):
                self._exchange(place)

    def _exchange(self, place: Place) -> None:
        contents = {key: self.twins.exchange(value) for key, value in place.before.items()}
        if self.replaced and any(isinstance(s, Replacement) for s in lineage(place.source)):
            # a replacement may run the module that it replaces
            contents |= {key: value for key, value in place.before.items() if isinstance(value, torch.nn.Module)}
        changed = {key: new for key, new in contents.items() if new is not place.before[key]}
        if changed:
            place.box.write(place.holder, contents)
            self.lifted.update({(id(place.holder), key): new for key, new in changed.items()})

    def train_alike(self) -> None:
        """Replacements are in training where those whose place they take are."""
        ours = {id(inner) for old, _ in self.replaced for inner in old.modules()}
        for old, new in self.replaced:
            for module in new.modules():
                if id(module) not in ours:
                    vars(module)["training"] = self.lifted[id(vars(module)), "training"] = old.training

    def _note(self, noted: Noted) -> None:
        """A scheduler's step was called: until it really is, nobody may read what it sets."""
        self.noted.append(noted)
        for number in self.numbers:
            if number.group is not None and any(number.group is g for g in noted.scheduler.optimizer.param_groups):
                source = number.source if number.index is None else number.source.base  # type: ignore[attr-defined]
                pending = Pending(source, number.group[number.key])
                self.lifted[id(number.group), number.key] = number.group[number.key] = pending
        kinds = {int, float, *map(type, self.stand_ins)}
        moved = set(map(id, all_of(noted.scheduler)))
        for scheduler, source in self.walk.schedulers:
            state = vars(scheduler) if id(scheduler) in moved else {}
            for key, value in state.items():
                if is_of_numbers(value, kinds):
                    self.lifted[id(state), key] = state[key] = Pending(Item(Vars(source), key), value)


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory of its own, no history, no gradient and no hooks."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() > 0
    if not plain or tensor.grad is not None or any(getattr(tensor, name) for name in HOOK_TABLES):
        return False
    return tensor.is_leaf and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_inference()
