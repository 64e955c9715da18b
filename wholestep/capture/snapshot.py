"""The snapshot: what a step could see before it ran, so that all of it can be put back and compared."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from wholestep.capture import boxes
from wholestep.capture import guards as guarding
from wholestep.capture.anchored import memory
from wholestep.capture.effects import CallStep, Effect, differences, homes
from wholestep.capture.guards import Guard
from wholestep.capture.schedule import Deferred, Noted, Pending
from wholestep.capture.source import Call, Child, Local, Replacement, Source, in_replacement
from wholestep.capture.twins import Twins
from wholestep.capture.values import Value
from wholestep.capture.walk import Found, Number, Place, Walk, is_plain
from wholestep.capture.wholes import PartsOf, Wholes
from wholestep.errors import UnsupportedError
from wholestep.ir import InputKind
from wholestep.parts import Part, part_of
from wholestep.torch_compat import HOOK_TABLES, set_versions

# Path of a module below the outermost one in sight, and the module -> the module to trace in its place.
Replace = Callable[[str, torch.nn.Module], torch.nn.Module]


class Snapshot:
    """Everything that one call of a step can see, before it runs.

    Attributes:
        call: the function and its arguments.
        places: every holder that the walk met, with a copy of its contents.
        tensors: id of a tensor -> where it was found and what it is for.
        numbers: floats among optimizers' settings and numbers that vary, which are inputs of the step.
        differentiable: whether tensors with a history are inputs that gradients flow to, or mere data.
        replaced: modules, each with the one that takes its place while the step is traced.
        parts: id of a tensor -> what it holds of the whole one that it stands for.
        spread: whether each rank may come to hold a part of any tensor.
    """

    differentiable = True

    def __init__(self, call: Call, names: frozenset[str] = frozenset(),
                 varying: frozenset[str] = frozenset(), replace: Replace | None = None) -> None:
        self.call, self.names, self.varying, self.replace = call, names, varying, replace
        self.walk = Walk(call, names, varying)
        self.places: list[Place] = self.walk.places
        self.tensors: dict[int, Found] = self.walk.tensors
        self.numbers: list[Number] = self.walk.numbers
        self.replaced: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        if replace is not None:
            self._replace(replace)
        self.stand_ins: list[object] = []
        self._seeds: list[tuple[torch.Generator, Source, torch.Tensor]] = []
        self._lifted: dict[tuple[int, Any], Any] = {}
        self.noted: list[Noted] = []
        self._grad_mode = torch.is_grad_enabled()
        self._guards: list[Guard] | None = None
        self._hidden: dict[int, str] | None = None
        self._versions: list[tuple[torch.Tensor, int, Any]] = []
        self.twins = Twins(())
        self.wholes, self.spread = Wholes((), None), False
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._count_versions()

    def _replace(self, replace: Replace) -> None:
        """Asks for each module in sight what takes its place, and walks that too."""
        asked: dict[int, str] = {}
        modules: dict[str, torch.nn.Module] = {}
        for place in list(self.places):
            if not isinstance(place.owner, torch.nn.Module) or id(place.owner) in asked:
                continue
            for path, module in place.owner.named_modules():
                source = self.walk.first.get(id(module))
                if id(module) in asked or source is None:
                    continue
                asked[id(module)] = path
                new = replace(path, module)
                if new is not module:
                    self.replaced.append((module, new))
                    modules[source.path] = new
                    self.walk.queue(new, Replacement(source))
        self.call = self.walk.call = dataclasses.replace(self.call, replaced=modules)
        self.walk.run()

    def _train_alike(self) -> None:
        """Replacements are in training where those whose place they take are."""
        ours = {id(inner) for old, _ in self.replaced for inner in old.modules()}
        for old, new in self.replaced:
            for module in new.modules():
                if id(module) not in ours:
                    vars(module)["training"] = self._lifted[id(vars(module)), "training"] = old.training

    def _hand_back_training(self) -> None:
        """A `train()` or `eval()` in the step has met the replacement; it was meant for the module itself."""
        for old, new in self.replaced:
            if new.training is not old.training:
                for module in old.modules():
                    vars(module)["training"] = new.training
        self._train_alike()

    def find(self, tensor: torch.Tensor) -> Found | None:
        """Where a tensor was found; None for one that the step made itself.

        A tensor in an attribute that only a library reads is looked for when it is met, and its attribute then
        counts as named by the step.
        """
        found = self.tensors.get(id(tensor)) or self.twins.found.get(id(tensor))
        if found is None and self.walk.hidden:
            name = self._out_of_sight().get(id(tensor))
            if name is not None:
                self.names |= {name}
                self.walk.reach.names.add(name)
                self.walk.run()
                self._count_versions()
                self._hidden = None
                found = self.tensors.get(id(tensor))
                if found is not None and part_of(found.tensor) is not None:
                    raise UnsupportedError(
                        f"{found.source}, of which each rank holds a part, is only found when it is used",
                        remedy="pass it to the step as an argument",
                    )
        return found if found is not None and found.tensor is tensor else None

    def versions(self) -> dict[int, int]:
        """id of each tensor that the step may be given, twins included -> its version counter."""
        known = [*self.tensors.items(), *self.twins.found.items()]
        return {key: f.tensor._version for key, f in known if not f.tensor.is_inference()}

    def _out_of_sight(self) -> dict[int, str]:
        """id of each tensor below an attribute that no code names -> that attribute."""
        if self._hidden is None:
            self._hidden = {}
            for place, key, _ in self.walk.hidden:
                for held in tensors_below(place.before[key]):
                    self._hidden.setdefault(id(held), key)
        return self._hidden

    def _count_versions(self) -> None:
        """Notes version counters and histories of tensors met since the last time."""
        known = len(self._versions)
        new = [f.tensor for f in self.tensors.values() if not f.tensor.is_inference()][known:]
        self._versions += [(tensor, tensor._version, tensor.grad_fn) for tensor in new]

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
        self._seeds = [(g, source, g.get_state()) for g, source in self.walk.generators.values()
                       if g is not torch.default_generator]
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
                self._lifted[id(number.group), number.key] = value
            elif number.place is not None:
                place = number.place
                place.box.write(place.holder, {**place.box.read(place.holder), number.key: stand_in})
                self._lifted[id(place.holder), number.key] = stand_in
            elif isinstance(number.source, Local):
                at: Any = number.source.at
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
    def generators(self) -> dict[int, tuple[torch.Generator, Source]]:
        """The random generators that the step can see."""
        return self.walk.generators

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
        twins.of.update(self.walk.sinks.put())
        if twins.of:
            for place in self.places:
                if place.box not in (boxes.TENSOR, boxes.TUPLE):
                    self._exchange(place)
        self._train_alike()

    def sizable(self) -> list[Found]:
        """The tensors among the arguments that no other tensor shares memory with, and that have no history."""
        holders = Counter(memory(f.tensor) for f in self.tensors.values())
        free = [f for f in self.tensors.values() if _is_plain(f.tensor) and holders[memory(f.tensor)] == 1]
        return [f for f in free if f.kind in ("tensor", "batch") and self._is_argument(f.source)]

    def _is_argument(self, source: Source) -> bool:
        """Whether a source is an argument, or inside of one that is no module or optimizer."""
        while isinstance(source, Child):
            source = source.base
            if isinstance(source.read(self.call), (torch.nn.Module, torch.optim.Optimizer)):
                return False
        return isinstance(source, Local)

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
        if self.replaced and in_replacement(place.source):  # a replacement may run the module that it replaces
            modules = {key: value for key, value in place.before.items() if isinstance(value, torch.nn.Module)}
            contents |= modules
        changed = {key: new for key, new in contents.items() if new is not place.before[key]}
        if changed:
            place.box.write(place.holder, contents)
            self._lifted.update({(id(place.holder), key): new for key, new in changed.items()})

    def _note(self, noted: Noted) -> None:
        """A scheduler's step was called: until it really is, nobody may read what it sets."""
        self.noted.append(noted)
        for number in self.numbers:
            if number.group is not None and any(number.group is g for g in noted.scheduler.optimizer.param_groups):
                self._lifted[id(number.group), number.key] = pending = Pending(number.source.text)
                number.group[number.key] = pending

    def guards(self) -> list[Guard]:
        """What must hold in a later call: derived from the contents at the time of the snapshot."""
        if self._guards is None:
            self._guards = guarding.guards(self.walk)
        return self._guards

    def outcome(self, is_new: Callable[[torch.Tensor], bool], result: Any = None) -> tuple[list[Effect], Value]:
        """What has changed in the Python world since the snapshot, and the step's result in the same terms.

        Args:
            is_new: tells tensors that the step made from those that were there before.
            result: what the step returned.

        Raises:
            LeakError: a new tensor is held where a replay cannot put its successor.
        """
        for array in self.walk.arrays.values():
            array.refuse_changed()
        for generator, source, state in self._seeds:
            if not torch.equal(generator.get_state(), state):
                raise UnsupportedError(f"{source}, a random generator, is seeded inside of the step",
                                       remedy="seed it outside")
        if self.replaced:
            self._hand_back_training()
        for scheduler, _ in self.walk.schedulers:
            if isinstance(vars(scheduler).get("step"), Deferred):
                del vars(scheduler)["step"]
        effects, described = differences(self, is_new, result)
        return [*effects, *(CallStep(n.source, n.args) for n in self.noted)], described

    def homes(self, effects: Sequence[Effect]) -> dict[int, tuple[str, InputKind]]:
        """Where effects leave gradients and optimizer state that the step makes: `New.index` -> source, kind."""
        return homes(effects)

    def restore(self) -> None:
        """Puts everything back: contents and their order, gradients, flags, hooks, versions, lifted numbers."""
        torch.set_grad_enabled(self._grad_mode)
        torch.clear_autocast_cache()
        self.wholes.back()
        for array in self.walk.arrays.values():
            array.restore()
        for generator, _, state in self._seeds:
            generator.set_state(state)
        failures: list[Exception] = []
        for place in self.places:
            try:
                if not same(place.box.read(place.holder), place.before):
                    place.box.write(place.holder, place.before)
            except Exception as error:  # an object that refuses: the rest must come back all the same
                failures.append(error)
        moved = [(tensor, version) for tensor, version, _ in self._versions if tensor._version != version]
        if moved:
            set_versions(tuple(t for t, _ in moved), tuple(v for _, v in moved))
        self.walk.sinks.restore()
        self._lifted.clear()
        self.noted.clear()
        self.twins = Twins(())
        if failures:
            raise failures[0]

    def source_of(self, value: Any) -> Source | None:
        """The first source of an object, container or tensor that was there before the step; None for others."""
        return None if is_plain(value) else self.walk.first.get(id(value))

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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory of its own, no history, no gradient and no hooks."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() > 0
    if not plain or tensor.grad is not None or any(getattr(tensor, name) for name in HOOK_TABLES):
        return False
    return tensor.is_leaf and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_inference()


def tensors_below(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in containers and objects below a value."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if is_plain(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            todo += value
        elif not isinstance(value, (type, ModuleType)):
            todo += getattr(value, "__dict__", {}).values()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector away from code that makes many small objects and drops none.

    A full collection in the middle of a walk of BERT-base costs 170 ms, the walk itself 20 ms.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def snapshot(fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
             names: frozenset[str] = frozenset(), varying: frozenset[str] = frozenset(),
             replace: Replace | None = None) -> Snapshot:
    """Walks what a call of ``fn`` could see and records it.

    Args:
        names: attributes that count as named by the step's code, besides those that are.
        varying: paths of numbers that are inputs rather than guards.
        replace: gives the modules to trace in the place of others.

    Raises:
        CaptureError: something is in reach that cannot be captured.
    """
    with no_collection():
        return Snapshot(Call(fn, tuple(args), dict(kwargs or {})), names, varying, replace)


__all__ = ["Snapshot", "boxes", "same", "snapshot"]
