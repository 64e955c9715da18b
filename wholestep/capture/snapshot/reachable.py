"""Everything that a step can reach: containers, tensors and numbers, each with its source, as flat lists.

What tensors are to a step is told by where they are found: parameters, buffers, state, batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture import sources
from wholestep.capture.guards.compared_values import EXACT_PLAIN, global_state, metadata, quick_state
from wholestep.capture.outside.external_calls import Outside
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.container_kinds import ContainerKind, Contents
from wholestep.capture.snapshot.names_read import NamesRead, hideable
from wholestep.capture.sources import FUNCTION, Attr, Call, Item, Nth, Source, Vars
from wholestep.errors import LazyError, UnsupportedError
from wholestep.ir import InputKind
from wholestep.tensor_parts import STATE_HOOKS
from wholestep.torch_compat import HOOK_TABLES

_NAMED = (kinds.ATTRIBUTES, kinds.SLOTS, kinds.MODULE)

# The tables of hooks that tensors, modules and optimizers have.
HOOKS = frozenset({
    *HOOK_TABLES, "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
})


@dataclass(eq=False)
class Container:
    """One container, with a copy of its contents.

    Attributes:
        value: the thing itself; for an object its ``__dict__``.
        owner: the object whose ``__dict__`` it is, else the container.
        ignored: keys that are restored and replayed but not guarded.
        lifted: keys of these that hold numbers which are inputs, so that only their type is guarded.
        ordered: whether another order of keys is another structure; loading a state dict reorders groups.
        numbered: whether keys are the numbers that hooks got when they were added: others each time they are.
        changed: whether the step adds or removes some; then these numbers matter.
    """

    value: Any
    owner: Any
    source: Source
    kind: ContainerKind
    before: Contents
    ignored: frozenset[Any] = frozenset()
    lifted: frozenset[Any] = frozenset()
    ordered: bool = True
    numbered: bool = False
    changed: bool = False
    children: list[tuple[Any, Source]] = field(default_factory=list)

    @property
    def compared(self) -> list[Any]:
        """The keys that are guarded."""
        return [key for key in self.before if key not in self.ignored]


@dataclass(frozen=True)
class TensorInput:
    """A tensor: the first source that leads to it and what it is for.

    Attributes:
        beginning: for the detached alias of a tensor with a history, the autograd node where the alias' begins.
        entangled: whether it is a view of a tensor out of reach, of which another input is a view too.
        detached: whether a step may read it as mere data although an earlier computation made it.
        unlike: whether it stands for a view with a history, and is another to autograd.
    """

    tensor: torch.Tensor
    source: Source
    kind: InputKind
    beginning: Any = None
    entangled: bool = False
    detached: bool = False
    unlike: bool = False


@dataclass(frozen=True)
class NumberInput:
    """A number that is an input, not a guard: an optimizer's setting, or what was another in an earlier call.

    Attributes:
        container, key: where it is; no container for an argument.
        index: position in a tuple that is there.
        setting: whether it is an optimizer's.
    """

    source: Source
    value: float
    container: Container | None = None
    key: Any = None
    index: int | None = None
    setting: bool = False


class Reachable:
    """What was met so far, in the order in which sources are first met.

    Attributes:
        roots: the arguments and the function, with their sources.
        containers: every container, with a copy of its contents.
        first: id of an object -> the first source that led to it.
        owners: paths of objects whose tensors are no batch: modules, optimizers, the user's own.
        used_globals: globals met: id of the module's table, name.
        places: id of a nested tuple -> in how many places it was met after the first.
        repeated: paths of those places in which it was not walked again.
        apart: id of a table of global variables that is no module's -> the path of the function that led there.
        stand_ins: id of an object -> makes what stands in its place while the step is traced.
        library_classes: classes of libraries that objects have, with where they are found.
        asking: globals of functions that ask for types, and the function by which they ask.
        hidden: attributes that no code named so far.
        trained: ids of the tensors that optimizers train.
        bare: what had no attributes when it was met: tensors and functions.
        unguarded: what holds values that no guard compares.
        waiting: what is walked when all else is: classes, then optimizers and schedulers.
    """

    def __init__(self, call: Call, names: Iterable[str], varying: frozenset[str]) -> None:
        self.call, self.varying = call, varying
        self.roots: list[tuple[Source, Any]] = [(FUNCTION, call.fn)]
        self.containers: list[Container] = []
        self.first: dict[int, Source] = {}
        self.tensors: dict[int, TensorInput] = {}
        self.state, self.quick_state = global_state(), quick_state()
        self.metadata: dict[int, tuple[Any, ...]] = {}
        self.generators: dict[int, tuple[torch.Generator, Source]] = {}
        self.outside = Outside(names)
        self.stand_ins: dict[int, Callable[[], Any]] = {}
        self.numbers: list[NumberInput] = []
        self.owners: set[str] = set()
        self.used_globals: set[tuple[int, str]] = set()
        self.places: Counter[int] = Counter()
        self.repeated: set[str] = set()
        self.apart: dict[int, str] = {}
        self.library_classes: dict[type, Source] = {}
        self.asking: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.names_read = NamesRead()
        self.schedulers: list[tuple[LRScheduler, Source]] = []
        self.hidden: list[tuple[Container, Any, Source]] = []
        self.trained: set[int] = set()
        self.bare: list[tuple[Any, Source]] = []
        self.unguarded: list[Any] = []
        self.kept: list[Any] = []  # ids stay valid while this lives
        self.queued: list[tuple[Any, Source]] = []
        self.waiting: tuple[deque[tuple[Any, Source]], ...] = (deque(), deque())

    def queue(self, value: Any, source: Source) -> None:
        """Has a value walked at its turn."""
        self.queued.append((value, source))

    def add(self, value: Any, source: Source, kind: ContainerKind, owner: Any = None,
            ignored: frozenset[Any] = frozenset(), before: Contents | None = None) -> Container:
        """Records a container and queues what it contains; ``before`` is that, where it has other contents now."""
        contents = kind.read(value) if before is None else before
        owner = value if owner is None else owner
        out_of_sight = hideable(owner, contents) if kind in _NAMED else frozenset()
        key = source.key if kind is kinds.MAPPING and isinstance(source, (Attr, Item)) else None
        numbered = key in HOOKS
        ignored |= frozenset(contents) if key == STATE_HOOKS else frozenset()
        container = Container(value, owner, source, kind, contents, ignored | out_of_sight, numbered=numbered)
        self.containers.append(container)
        self.first.setdefault(id(value), source)
        self.kept.append(value)
        container.children = [(key, self.child(container, key)) for key, inner in contents.items()
                              if type(inner) not in EXACT_PLAIN]
        if out_of_sight:
            self.hidden += [(container, key, self.child(container, key)) for key in contents if key in out_of_sight]
        is_library = kind in kinds.USED and value.library is not None  # whose functions are compared by identity
        self.queued.extend((contents[key], child) for key, child in container.children
                           if key not in container.ignored and not (is_library and callable(contents[key])))
        return container

    def add_attributes(self, value: Any, source: Source, before: Contents | None = None) -> None:
        """Records the attributes of an object: those that it has, or those that it had."""
        if before is not None or vars(value):
            self.add(vars(value), Vars(source), kinds.ATTRIBUTES, value, before=before)
        else:
            self.bare.append((value, source))

    def add_given(self) -> None:
        """Records of what has attributes now that it had none when it was met."""
        bare, self.bare = self.bare, []
        for value, source in bare:
            self.add_attributes(value, source, {} if vars(value) else None)

    def child(self, container: Container, key: Any) -> Source:
        """The source of what a container holds, or may come to hold, at a key."""
        if container.numbered and key in container.before:
            return Nth(container.source, list(container.before).index(key))
        return container.kind.child(container.source, key if type(key) in (str, int) else self.first.get(id(key), key))


def walk_tensor(found: Reachable, tensor: torch.Tensor, source: sources.Source) -> None:
    """Takes note of a tensor, of what it is to a step, and of its hooks and attributes."""
    if is_lazy(tensor):
        raise LazyError(f"{source} has no shape yet", remedy="call the module once, which gives it one")
    found.tensors[id(tensor)] = TensorInput(tensor, source, _tensor_kind(found, tensor, source))
    try:
        found.metadata[id(tensor)] = metadata(tensor)
    except RuntimeError as error:  # of a view whose base was written since, as FullyShardedDataParallel writes it
        if tensor.is_nested:
            raise UnsupportedError(f"{source} is a nested tensor", remedy="use padded tensors and masks") from error
        what = f"{source} is a view of memory that was written since, of which autograd will not speak"
        raise UnsupportedError(what, remedy="copy it; of FSDP, compile the plain module with ws.FullyShard") from error
    # hooks of a tensor that an earlier computation made belong to that computation, not to the step
    found.add(tensor, source, kinds.TENSOR, ignored=frozenset() if tensor.is_leaf else frozenset(HOOK_TABLES))
    found.add_attributes(tensor, source)


def _tensor_kind(found: Reachable, tensor: torch.Tensor, source: sources.Source) -> InputKind:
    if isinstance(source, sources.Attr) and source.key == "grad":
        return "grad"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    steps: list[Any] = []
    step: sources.Source | None = source
    while isinstance(step, sources.Item):
        steps.append(step.key)
        step = step.base
    if len(steps) == 2 and steps[1] == "_buffers":
        return "buffer"
    if steps[-1:] == ["param_groups"] and steps[1:2] == ["params"]:
        return "parameter"
    if len(steps) >= 3 and steps[-1] == "state" and isinstance(steps[-2], sources.Source):
        return "state"
    return "batch" if _is_batch(found, source) else "tensor"


def _is_batch(found: Reachable, source: sources.Source) -> bool:
    """True for what an argument is or holds: data in containers, not what an object keeps between calls."""
    while isinstance(source, (sources.Item, sources.Vars, sources.Attr)) and source.path not in found.owners:
        if isinstance(source, sources.Attr) and source.key.startswith("__"):  # of a function
            return False
        source = source.base
    return isinstance(source, sources.Root) and source.argument is not None and source.path not in found.owners
