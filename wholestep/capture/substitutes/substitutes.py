"""What is put in the place of what a step sees while it is traced: stand-ins for numbers, detached aliases, patches."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.outside import stand_ins as standing_in
from wholestep.capture.outside.stand_ins import AppendOnlyList, Noted, Pending, StandIn, taken
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Container, Reachable
from wholestep.capture.sources import Item, Replacement, Root, Vars, lineage
from wholestep.capture.substitutes.detached_aliases import DetachedAliases
from wholestep.capture.substitutes.unsharded_views import PartsOf, UnshardedViews
from wholestep.errors import UnsupportedError
from wholestep.patches import Patches, is_put_into, original
from wholestep.tensor_parts import Part


class Substitutes:
    """What stands in the place of what a call can see, until `restore`.

    Args:
        replaced: modules, each with the one that takes its place while the step is traced.

    Attributes:
        aliases: what takes the place of tensors.
        stand_ins: what stands for the numbers that are inputs, in their order.
        lifted: (id of a container, key) -> what is there now.
        lists: what stands for those that the step is known to append to.
        unsharded: what stands for whole tensors.
        noted: calls of schedulers, in their order.
        spread: whether each rank may come to hold a part of any tensor.
    """

    def __init__(self, reachable: Reachable, replaced: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self._reachable, self._replaced = reachable, replaced
        self.aliases = DetachedAliases(())
        self.stand_ins: list[object] = []
        self.lifted: dict[tuple[int, Any], Any] = {}
        self.lists: list[AppendOnlyList] = []
        self.noted: list[Noted] = []
        self.spread = False
        self._patches = Patches()
        self.unsharded = UnshardedViews((), None)
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def parts(self) -> dict[int, Part]:
        """id of a tensor -> what it holds of the whole one that it stands for."""
        return self.unsharded.parts

    def original(self, value: Any) -> Any:
        """The tensor that an alias took the place of while the step was traced; any other value as it is."""
        return self._originals[id(value)][1] if id(value) in self._originals else value

    def standing(self) -> list[Any]:
        """What stands in the place of tensors, iterators, lists and cached functions."""
        return [v for v in self.aliases.of.values() if isinstance(v, (StandIn, torch.Tensor))]

    def put(self, parts: PartsOf | None, differentiable: bool = True) -> None:
        """Puts whole shapes, detached aliases and stand-ins in place; `lift` gives those among the arguments.

        Args:
            parts: what tensors that carry no mark hold all the same; None when the step is not spread over ranks.
            differentiable: whether tensors with a history are inputs that gradients flow to, or mere data.
        """
        found = self._reachable
        found.outside.raise_refused()
        self.unsharded = UnshardedViews(found.tensors.values(), parts)
        self.spread = parts is not None or bool(self.parts)
        self.unsharded.put()
        replaced = {id(old): new for old, new in self._replaced}
        self.aliases = aliases = DetachedAliases(found.tensors.values() if differentiable else (), replaced)
        for key, tensor in found.tensors.items():
            if key in aliases.of:
                self._originals[id(aliases.of[key])] = aliases.of[key], tensor.tensor
                if key in self.parts:
                    self.parts[id(aliases.of[key])] = self.parts[key]
        stand_ins = {key: make() for key, make in found.stand_ins.items()}
        self.lists = [stand_in for stand_in in stand_ins.values() if type(stand_in) is AppendOnlyList]
        aliases.of.update(stand_ins | self._patch())
        if aliases.of:
            self._exchange()
        self.match_training()

    def _patch(self) -> dict[int, Any]:
        """Patches what asks the world outside, for this thread; gives what is there now by the id of what modules had,
        which the step may hold too."""
        found, thread = self._reachable, threading.get_ident()
        replacements = [*found.outside.replacements(found.names_read.settle())]
        for kind in {type(scheduler) for scheduler, _ in found.schedulers}:
            replacements += [(kind, "step", lambda *given, kind=kind, **named: self._step(kind, *given, **named)),
                             (kind, "state_dict", lambda scheduler: self._state_dict(scheduler))]
        before = [vars(owner).get(name) for owner, name, _ in replacements]
        self._patches.put(replacements, lambda: threading.get_ident() == thread)
        pairs = zip(before, replacements, strict=True)
        return {id(old): vars(owner)[name] for old, (owner, name, _) in pairs if isinstance(owner, ModuleType)}

    def lift(self, stand_ins: Sequence[object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts stand-ins in place of the numbers that are inputs, in their order; tuples are rebuilt around theirs.

        Returns:
            the call's arguments, with stand-ins for those that are numbers.

        Raises:
            ValueError: not one stand-in for each number.
        """
        found = self._reachable
        if len(stand_ins) != len(found.numbers):
            raise ValueError(f"{len(stand_ins)} stand-ins for {len(found.numbers)} numbers; give one for each")
        self.stand_ins = list(stand_ins)
        args = [self.aliases.exchange(value) for value in found.call.args]
        kwargs = {name: self.aliases.exchange(value) for name, value in found.call.kwargs.items()}
        for number, stand_in in zip(found.numbers, stand_ins, strict=True):
            container, value = number.container, stand_in
            if container is not None:
                now = container.kind.read(container.value)
                if number.index is not None:
                    value = (*now[number.key][: number.index], stand_in, *now[number.key][number.index + 1 :])
                container.kind.write(container.value, {**now, number.key: value})
                self.lifted[id(container.value), number.key] = value
            elif isinstance(number.source, Root):
                at: Any = number.source.argument
                (args if isinstance(at, int) else kwargs)[at] = stand_in
        return tuple(args), kwargs

    def exchange(self, tensors: dict[int, torch.Tensor]) -> None:
        """Puts tensors in the place of others, given by id; `lift` gives those among arguments."""
        for key, tensor in tensors.items():
            found = self._reachable.tensors[key]
            vars(tensor).update(vars(found.tensor))
            self.aliases.of[key] = tensor
            self.aliases.found[id(tensor)] = dataclasses.replace(found, tensor=tensor)
        self._exchange()

    def _exchange(self) -> None:
        for container in self._reachable.containers:
            if container.kind not in (kinds.TENSOR, kinds.TUPLE):
                self._exchange_in(container)

    def _exchange_in(self, container: Container) -> None:
        before = container.before
        library = container.value.library if container.kind is kinds.GLOBALS else None
        contents = {key: value if is_put_into(library, key) else self.aliases.exchange(value)
                    for key, value in before.items()}  # a module's own function is not what stands for another's
        if self._replaced and any(isinstance(s, Replacement) for s in lineage(container.source)):
            # a replacement may run the module that it replaces
            contents |= {key: value for key, value in before.items() if isinstance(value, nn.Module)}
        changed = {key: new for key, new in contents.items() if new is not before[key]}
        if changed:
            container.kind.write(container.value, contents)
            self.lifted.update({(id(container.value), key): new for key, new in changed.items()})

    def match_training(self) -> None:
        """Replacements are in training where those whose place they take are."""
        ours = {id(inner) for old, _ in self._replaced for inner in old.modules()}
        for old, new in self._replaced:
            for module in new.modules():
                if id(module) not in ours:
                    vars(module)["training"] = self.lifted[id(vars(module)), "training"] = old.training

    def hand_back(self) -> None:
        """What the step did to a stand-in was meant for what it stands for: a replacement's `train()` or `eval()`."""
        for old, new in self._replaced:
            if new.training is not old.training:
                for module in old.modules():
                    vars(module)["training"] = new.training
        self.match_training()

    def _step(self, kind: type[LRScheduler], scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        """A class' own step of a scheduler is called, and noted: until it really is, nobody may read what it sets."""
        found, refused = self._reachable, self._reachable.outside.refused
        place = next((source for one, source in found.schedulers if one is scheduler), None)
        if place is None:  # the step has made it
            return original(kind, "step")(scheduler, *args, **kwargs)  # type: ignore[no-any-return]
        if kwargs or any(type(a) not in (int, float) for a in args):
            what = f"{place}.step was given a value that is only known when the step runs"
            raise UnsupportedError(what, "return the value, and call scheduler.step(value) after the compiled step")
        before, call = self._contents(), len(self.noted)
        rates = {float, torch.Tensor, *map(type, self.stand_ins)}
        moved = set(map(id, standing_in.all_of(scheduler)))
        tables = [(group, found.first.get(id(group)), rates) for group in scheduler.optimizer.param_groups]
        plain: set[type] = rates | {int, bool, str, type(None)}
        tables += [(vars(one), Vars(source), plain) for one, source in found.schedulers if id(one) in moved]
        for table, source, kinds_of in tables:
            for key, value in table.items():
                if source is not None and key != "params" and standing_in.is_of_types(value, kinds_of):
                    table[key] = Pending(Item(source, key), value, call, refused)
        return self.noted.append(Noted(place, args, before, self._contents()))

    def _state_dict(self, scheduler: LRScheduler) -> dict[str, Any]:
        """All that a scheduler has set, which the step may not ask for when it has moved."""
        if self.noted:
            what = f"the state of {type(scheduler).__name__} was read after scheduler.step() in the same step"
            raise UnsupportedError(what, "call scheduler.step() last, or after the compiled step")
        return original(type(scheduler), "state_dict")(scheduler)  # type: ignore[no-any-return]

    def _contents(self) -> dict[int, kinds.Contents]:
        """What containers other than tensors hold now, and what is appended to lists, by id."""
        held = {id(c): c.kind.read(c.value) for c in self._reachable.containers if c.kind is not kinds.TENSOR}
        return held | {id(stand_in): dict(enumerate(taken(stand_in))) for stand_in in self.lists}

    def restore(self) -> None:
        """Takes everything out of its place but what containers hold, which the snapshot puts back."""
        while self.lists:
            standing_in.restore(self.lists.pop())
        self._patches.restore()
        self._reachable.outside.end()
        self.lifted.clear()
        self.stand_ins.clear()
        self.noted.clear()
        self.aliases = DetachedAliases(())


