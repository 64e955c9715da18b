"""Places: what the walk collects, as flat lists: holders, tensors and numbers, each with its source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.guards.compared_values import EXACT_PLAIN, global_state
from wholestep.capture.outside.append_only_lists import Sinks
from wholestep.capture.outside.external_calls import Outside
from wholestep.capture.outside.iterators import Stoppers
from wholestep.capture.snapshot import boxes
from wholestep.capture.snapshot.boxes import Box, Contents
from wholestep.capture.snapshot.names_read import Reach, hideable
from wholestep.capture.snapshot.numpy_arrays import Array
from wholestep.capture.sources import Attr, Call, Item, Nth, Source
from wholestep.ir import InputKind
from wholestep.torch_compat import HOOK_TABLES

_NAMED = (boxes.ATTRIBUTES, boxes.SLOTS, boxes.MODULE)

# The tables of hooks that tensors, modules and optimizers have.
HOOKS = frozenset({
    *HOOK_TABLES, "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
})


@dataclass(eq=False)
class Place:
    """One holder met by the walk.

    Attributes:
        holder: the thing itself; for an object its ``__dict__``.
        owner: the object whose ``__dict__`` it is, else the holder.
        ignored: keys that are restored and replayed but not guarded.
        lifted: keys of these that hold numbers which are inputs, so that only their type is guarded.
        ordered: whether another order of keys is another structure; loading a state dict reorders groups.
        numbered: whether keys are the numbers that hooks got when they were added: others each time they are.
        changed: whether the step adds or removes some; then these numbers matter.
    """

    holder: Any
    owner: Any
    source: Source
    box: Box
    before: Contents
    ignored: frozenset[Any] = frozenset()
    lifted: frozenset[Any] = frozenset()
    ordered: bool = True
    numbered: bool = False
    changed: bool = False
    children: list[tuple[Any, Source]] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A tensor that the walk met: the first source that leads to it and what it is for.

    Attributes:
        beginning: for the twin of a tensor with a history, the autograd node where the twin's begins.
        entangled: whether it is a view of a tensor out of reach, of which another input is a view too.
        detached: whether a step may read it as mere data although an earlier computation made it.
    """

    tensor: torch.Tensor
    source: Source
    kind: InputKind
    beginning: Any = None
    entangled: bool = False
    detached: bool = False


@dataclass(frozen=True)
class Number:
    """A number that is an input of the step, not a guard.

    Either a float among an optimizer's settings, ``group[key]`` or ``group[key][index]``; or one that was another in
    an earlier call: at ``key`` of ``place``, or an argument when there is neither group nor place.
    """

    source: Source
    value: float
    group: dict[str, Any] | None = None
    key: Any = None
    index: int | None = None
    place: Place | None = None


class Places:
    """What was met so far: holders, tensors and numbers, in the order in which sources are first met.

    Attributes:
        places: every holder, with a copy of its contents.
        first: id of an object -> the first source that led to it.
        holders: paths of objects whose tensors are no batch: modules, optimizers, the user's own.
        named: globals met: id of the module's table, name.
        hidden: attributes that no code named so far.
        counting: ids of the dicts whose ``"step"`` is another number at each call.
    """

    def __init__(self, call: Call, names: Iterable[str], varying: frozenset[str]) -> None:
        self.call, self.varying = call, varying
        self.places: list[Place] = []
        self.first: dict[int, Source] = {}
        self.tensors: dict[int, Found] = {}
        self.state = global_state()
        self.metadata: dict[int, tuple[Any, ...]] = {}
        self.arrays: dict[int, Array] = {}
        self.generators: dict[int, tuple[torch.Generator, Source]] = {}
        self.sinks, self.stoppers, self.outside = Sinks(), Stoppers(), Outside(names)
        self.numbers: list[Number] = []
        self.holders: set[str] = set()
        self.named: set[tuple[int, str]] = set()
        self.reach = Reach(names)
        self.schedulers: list[tuple[LRScheduler, Source]] = []
        self.hidden: list[tuple[Place, Any, Source]] = []
        self.counting: set[int] = set()
        self._keep: list[Any] = []  # ids stay valid while this lives
        self._todo: list[tuple[Any, Source]] = []

    def queue(self, value: Any, source: Source) -> None:
        """Has a value walked at its turn."""
        self._todo.append((value, source))

    def add(self, holder: Any, source: Source, box: Box, owner: Any = None,
            ignored: frozenset[Any] = frozenset()) -> Place:
        """Records a holder and queues what it contains."""
        contents = box.read(holder)
        owner = holder if owner is None else owner
        out_of_sight = hideable(owner, contents) if box in _NAMED else frozenset()
        numbered = box is boxes.MAPPING and _is_of_hooks(source)
        place = Place(holder, owner, source, box, contents, ignored | out_of_sight, numbered=numbered)
        self.places.append(place)
        self.first.setdefault(id(holder), source)
        self._keep.append(holder)
        place.children = [(key, self.child(place, key)) for key, value in contents.items()
                          if type(value) not in EXACT_PLAIN]
        if out_of_sight:
            self.hidden += [(place, key, self.child(place, key)) for key in contents if key in out_of_sight]
        self._todo.extend((contents[key], child) for key, child in place.children if key not in place.ignored)
        return place

    def _key(self, key: Any) -> Any:
        return key if type(key) in (str, int) else self.first.get(id(key), key)

    def child(self, place: Place, key: Any) -> Source:
        """The source of what a place holds, or may come to hold, at a key."""
        if place.numbered and key in place.before:
            return Nth(place.source, list(place.before).index(key))
        return place.box.child(place.source, self._key(key))


def _is_of_hooks(source: Source) -> bool:
    return isinstance(source, Attr) and source.key in HOOKS or isinstance(source, Item) and source.key in HOOKS
