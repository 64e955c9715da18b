"""The binder: checks a call against the guards and fetches the inputs of a captured program.

The fast path is generated Python that holds direct references to what was there at the last call: module
attributes, optimizer state and parameters are compared with it by identity, whole lists at a time; batches, which
are new objects at each call, are followed by path. When anything is not the very same, the slow path walks the
call anew and compares guard by guard: either it names the first that fails, or all hold (an equal tensor or
container took the container of another) and the fast path is made again around the new objects.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture.effects.effects import Apply, Effect, Replay, replaced_containers
from wholestep.capture.effects.recipes import NOTHING, Value
from wholestep.capture.guards.compared_values import memory
from wholestep.capture.guards.fast_path import Fast, FastPath
from wholestep.capture.guards.guards import GuardFailure, compare
from wholestep.capture.guards.per_call_objects import CONTAINERS, PERSISTENT
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.garbage_collection import no_collection
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import Args, Kwargs, Source
from wholestep.errors import CaptureError, UnsupportedError

# Fast paths of one program: one for each set of modules and optimizers that take turns as its arguments.
MAX_PATHS = 16


@dataclass(frozen=True, slots=True)
class GeneratedPath:
    """The functions generated around the objects of one call, for later calls with the very same objects.

    Attributes:
        bind: ``(args, kwargs) -> inputs``, or None when any object is another: then `let_go` must follow.
        let_go: drops the tensors that `bind` holds for the call; `apply` does so itself.
        apply: ``(args, kwargs, made) -> result``: replays the effects in a call that was just let pass, with its new
            values in the order of `New.index`.
        release: lets go of the gradients that the step, just let pass, is to replace without reading them. As in eager,
            where `zero_grad()` stands at the beginning of a step, they do not outlive the computation of new ones, nor
            an error in it.
    """

    bind: Fast
    let_go: Callable[[], None]
    apply: Apply
    release: Callable[[], None]


class Binder:
    """``binder(args, kwargs)`` gives the input values in order, or a `GuardFailure`.

    Args:
        inputs: the sources of the program's placeholders, in order; tensors and lifted numbers of the snapshot.
        mutated: the inputs that the program writes to.
        effects, result: what the step changes and returns.
        sizeless: paths of tensors whose sizes and strides are not compared.

    Attributes:
        guards: what must hold, the nearest to the arguments first.
        path: the generated path of the last call that the fast path let pass, or that was walked.
        slow_calls: how many calls took the slow path.
        arguments: the tensors among the arguments, with dtype and shape, for people.

    Raises:
        ValueError: an input is not a tensor or number of the snapshot.
    """

    def __init__(self, snap: Snapshot, inputs: Sequence[Source], mutated: Sequence[Source] = (),
                 effects: Sequence[Effect] = (), result: Value = NOTHING,
                 sizeless: frozenset[str] = frozenset()) -> None:
        self._fn, self.inputs, self.guards = snap.call.fn, list(inputs), snap.guards(sizeless)
        self._sizeless = sizeless
        self._seen = snap.names, snap.varying, snap.replace, snap.differentiable, snap.called
        self._mutated = frozenset(source.path for source in mutated)
        self._replaced_gradients = snap.replaced_gradients
        self._outcome = effects, result
        self._replaced = {*replaced_containers(effects)}
        self._held: dict[tuple[str, str], tuple[int, int]] = {}
        self.slow_calls = 0
        batch = [(f.source, f.tensor) for f in snap.tensors.values() if f.kind == "batch"]
        self.arguments = [f"{x}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for x, t in batch]
        self._sharing = sharing(snap, self._mutated)
        self._paths: dict[tuple[int, ...], GeneratedPath] = {}  # by the modules and optimizers that a call is given
        with no_collection():
            self.path = self._generate(snap)

    def _generate(self, snap: Snapshot) -> GeneratedPath:
        """A path around the objects of a call, kept for those to come."""
        before, self._held = self._held, _held(snap)
        for place, (owner, held) in self._held.items():  # another program puts it there, or code between calls
            if place in before and before[place][0] == owner and before[place][1] != held:
                self._replaced.add(place)
        path = FastPath(snap, self.inputs, self._mutated, self._replaced, self._sizeless)
        replay = Replay(*self._outcome, path)
        given = _given(snap.call.args, snap.call.kwargs)
        self._paths.pop(given, None)
        if len(self._paths) >= MAX_PATHS:
            del self._paths[next(iter(self._paths))]
        made = self._paths[given] = GeneratedPath(path.function, path.last.let_go, replay.function, replay.release)
        return made

    def __call__(self, args: Args, kwargs: Kwargs) -> list[Any] | GuardFailure:
        """Binds a call by the fast path, or by the slow one."""
        values = self.fast(args, kwargs)
        return self.walk(args, kwargs) if values is None else values

    def fast(self, args: Args, kwargs: Kwargs) -> list[Any] | None:
        """The inputs where all objects are those of an earlier call, in microseconds; None where any is another."""
        values = self.path.bind(args, kwargs)
        if values is not None:
            return values
        self.path.let_go()
        other = self._paths.get(_given(args, kwargs))
        if other is None or other is self.path:
            return None
        self.path = other
        values = other.bind(args, kwargs)
        if values is None:
            other.let_go()
        return values

    def walk(self, args: Args, kwargs: Kwargs) -> list[Any] | GuardFailure:
        """The inputs or the first guard that fails, in milliseconds: walks what the step can see and compares it."""
        self.slow_calls += 1
        with no_collection():
            try:
                later = Snapshot(self._fn, args, kwargs, *self._seen)
            except CaptureError as error:  # as a capture of this call says again
                return GuardFailure(error.what)
            failure = compare(self.guards, later.guards(self._sizeless))
            failure = failure or self._lacks(later) or self._shares_otherwise(later)
            if failure is not None:
                return failure
            later.replaced_gradients = self._replaced_gradients
            self.path = self._generate(later)
            values = self.path.bind(args, kwargs)
            return [source.read(later.call) for source in self.inputs] if values is None else values

    def _lacks(self, later: Snapshot) -> GuardFailure | None:
        there = {f.source.path for f in later.tensors.values()} | {n.source.path for n in later.numbers}
        there |= {source.path for _, source in later.reachable.generators.values()}
        missing = [source for source in self.inputs if source.path not in there]
        return GuardFailure(f"{missing[0]}: expected to be there, found missing") if missing else None

    def _shares_otherwise(self, later: Snapshot) -> GuardFailure | None:
        now = sharing(later, self._mutated)
        for pair in (*(self._sharing - now), *(now - self._sharing)):
            expected = pair in self._sharing
            return GuardFailure(f"{pair[0]} shares memory with {pair[1]}: expected {expected}, found {not expected}")
        return None


def _held(snap: Snapshot) -> dict[tuple[str, str], tuple[int, int]]:
    """The containers that objects of a snapshot hold by name: path and name -> the ids of object and container."""
    return {
        (container.source.path, name): (id(container.owner), id(value))
        for container in snap.containers
        if container.kind is not kinds.TENSOR
        for name, value in container.before.items()
        if type(name) is str and isinstance(value, CONTAINERS)
    }


def _given(args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    return tuple([id(value) for value in (*args, *kwargs.values()) if isinstance(value, PERSISTENT)])


def sharing(snap: Snapshot, mutated: Container[str]) -> frozenset[tuple[str, str]]:
    """Pairs of tensors in one storage of which the step writes at least one, by source."""
    sharing_memory: dict[int, list[Source]] = {}
    for found in snap.tensors.values():
        address = memory(found.tensor)
        if address:
            sharing_memory.setdefault(address, []).append(found.source)
    pairs: set[tuple[str, str]] = set()
    for group in sharing_memory.values():
        for i, a in enumerate(group):
            pairs.update((a.text, b.text) for b in group[i + 1:] if a.path in mutated or b.path in mutated)
    return frozenset(pairs)


def refuse_shared_parts(snap: Snapshot, mutated: Sequence[Source]) -> None:
    """Parts are traced as whole tensors in memory of their own, so that a write to one would not be seen in others.

    Raises:
        UnsupportedError: the step writes to memory that a part shares with another tensor.
    """
    parts = {f.source.text for f in snap.tensors.values() if id(f.tensor) in snap.substitutes.parts}
    at = {f.source.text: _reach(f.tensor) for f in snap.tensors.values()} if parts else {}
    for pair in sorted(sharing(snap, frozenset(source.path for source in mutated))) if parts else ():
        apart = at[pair[0]][1] <= at[pair[1]][0] or at[pair[1]][1] <= at[pair[0]][0]
        if not apart and not parts.isdisjoint(pair):
            raise UnsupportedError(
                f"the step writes to memory that {pair[0]} and {pair[1]} share, and each rank holds a part",
                remedy="pass a copy: tensor.clone()",
            )


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements are."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
