"""The walk: everything that a training step can see, as a flat list of places.

A place is one holder (a dict, a module's attributes, a tensor, a closure cell, …) met on the way from the
function and its arguments, with its source and a copy of its contents. What a holder contains is found by a
table from type to handler. Bodies of functions are followed for user code only: torch, the standard library and
installed packages change nothing that a guard could see, save through objects that are walked anyway.
"""

from __future__ import annotations

import argparse
import enum
import functools
import inspect
import types
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy
import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import BackwardHook

from wholestep.capture import boxes
from wholestep.capture.arrays import Array, stamp
from wholestep.capture.boxes import Box, Contents, Names
from wholestep.capture.code import (
    Reach,
    global_names,
    hideable,
    is_installed,
    is_library,
    is_user_class,
    is_user_module,
)
from wholestep.capture.sinks import Sinks
from wholestep.capture.source import Attr, Call, Cell, Function, Global, Item, Local, Member, Method, Source, Vars
from wholestep.errors import LazyError
from wholestep.ir import InputKind
from wholestep.torch_compat import HOOK_TABLES, default_device, generator_id

PLAIN: tuple[type, ...] = (
    int, float, bool, str, bytes, complex, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum,
    numpy.generic,
)
_EXACT_PLAIN = frozenset(PLAIN)
_BARE = frozenset({dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict})
# What schedulers put into parameter groups, for themselves alone: a step that is given one later is no other step.
SCHEDULED = frozenset({"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"})
BOOKKEEPING = frozenset({"_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"})


@dataclass(eq=False)
class Place:
    """One holder met by the walk.

    Attributes:
        holder: the thing itself; for an object its ``__dict__``.
        owner: the object whose ``__dict__`` it is, else the holder.
        ignored: keys that are restored and replayed but not guarded.
        lifted: keys of these that hold numbers which are inputs, so that only their type is guarded.
        ordered: whether another order of keys is another structure; loading a state dict reorders groups.
    """

    holder: Any
    owner: Any
    source: Source
    box: Box
    before: Contents
    ignored: frozenset[Any] = frozenset()
    lifted: frozenset[Any] = frozenset()
    ordered: bool = True
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


META = ("type", "dtype", "device", "layout", "requires_grad", "is_leaf", "shape", "stride")


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a captured program relies on in a tensor, in the order of `META`."""
    strided = tensor.layout == torch.strided
    return (type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf,
            tensor.shape, tensor.stride() if strided else None)


def global_state() -> tuple[Any, ...]:
    """The settings of torch that change what a step computes, in the order of `guards.STATE_NAMES`."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), default_device(), torch.are_deterministic_algorithms_enabled(),
    )


def is_plain(value: Any) -> bool:
    """True for immutable values that a guard compares by value."""
    return type(value) in _EXACT_PLAIN or issubclass(type(value), PLAIN)  # a host number says it is a float


def is_one_of_a_kind(kind: type) -> bool:
    """True for classes (the package's own) whose instances are not looked into but told apart by identity."""
    return bool(getattr(kind, "guard_identity", False))


def arguments(call: Call) -> Iterator[tuple[Source, Any]]:
    """The arguments of a call with their sources, named as the function's signature names them."""
    names: list[str] = []
    variadic = None
    try:
        fn = call.fn.forward if isinstance(call.fn, torch.nn.Module) else call.fn
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                variadic = parameter.name
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
    except (TypeError, ValueError):  # a builtin without a signature
        variadic = "args"
    for position, value in enumerate(call.args):
        if position < len(names):
            yield Local(names[position], position), value
        else:
            yield Local(variadic or "args", position, position - len(names)), value
    for key, value in call.kwargs.items():
        yield Local(key, key), value


class Walk:
    """Collects places, tensors and numbers, in the order in which sources are first met.

    Classes wait until all else is walked, optimizers and schedulers until classes are, so that a parameter is named
    after its module.
    """

    def __init__(self, call: Call, names: Iterable[str] = (), varying: frozenset[str] = frozenset()) -> None:
        self.call, self.varying = call, varying
        self.places: list[Place] = []
        self.first: dict[int, Source] = {}
        self.tensors: dict[int, Found] = {}
        self.state = global_state()
        self.metadata: dict[int, tuple[Any, ...]] = {}
        self.arrays: dict[int, Array] = {}
        self.generators: dict[int, tuple[torch.Generator, Source]] = {}
        self.sinks = Sinks()
        self.numbers: list[Number] = []
        self.holders: set[str] = set()  # paths of objects whose tensors are no batch: modules, optimizers, the user's
        self.named: set[tuple[int, str]] = set()  # globals met: id of the module's table, name
        self._keep: list[Any] = []  # ids stay valid while the walk lives
        self._todo: list[tuple[Any, Source]] = []
        self._later: deque[tuple[Any, Source]] = deque()
        self._last: deque[tuple[Any, Source]] = deque()
        self.reach = Reach(names)
        self.schedulers: list[tuple[LRScheduler, Source]] = []
        self.hidden: list[tuple[Place, Any, Source]] = []  # attributes that no code named so far
        self.roots = [*arguments(call), (Function(), call.fn)]
        for name in ("__call__", "forward"):
            entry = getattr(type(call.fn), name, None)
            if isinstance(entry, types.FunctionType) and not is_library(entry.__code__.co_filename):
                self.reach.add(entry, False)
        self._todo.extend((value, source) for source, value in reversed(self.roots))
        self.run()
        if varying:
            self._vary()

    def _vary(self) -> None:
        """Makes inputs of the plain numbers whose sources are known to vary."""
        for source, value in self.roots:
            if type(value) in (int, float) and source.path in self.varying:
                self.numbers.append(Number(source, value))
        for place in self.places:
            for key, value in place.before.items():
                if type(value) in (int, float) and place.box in _VARYING and key not in place.ignored:
                    source = self.child(place, key)
                    if source.path in self.varying:
                        self.numbers.append(Number(source, value, key=key, place=place))
                        place.lifted |= {key}
                        place.ignored |= {key}

    def queue(self, value: Any, source: Source) -> None:
        """Has a value walked at the next `run`."""
        self._todo.append((value, source))

    def run(self) -> None:
        """Walks until nothing is left that the step's code can name."""
        while self._todo or self._reveal() or self._later or self._last:
            value, source = (self._todo.pop() if self._todo else (self._later or self._last).popleft())
            if type(value) in _EXACT_PLAIN or id(value) in self.first:
                continue
            handler = _handler(type(value))  # type: ignore[arg-type]
            if handler is None:
                continue
            if handler in _LATER and not isinstance(source, _Later):
                (self._later if handler is _class else self._last).append((value, _Later(source)))
                continue
            source = source.source if isinstance(source, _Later) else source
            self.first[id(value)] = source
            self._keep.append(value)
            mark = len(self._todo)
            handler(self, value, source)
            self._todo[mark:] = reversed(self._todo[mark:])  # a stack: what was queued first is walked first

    def _reveal(self) -> bool:
        """Queues attributes whose names have come into use; True when there are any."""
        if not self.hidden:
            return False
        names, anything = self.reach.settle(), self.reach.anything
        seen = [entry for entry in self.hidden if anything or entry[1] in names]
        self.hidden = [entry for entry in self.hidden if not (anything or entry[1] in names)]
        for place, key, source in reversed(seen):
            place.ignored -= {key}
            self._todo.append((place.before[key], source))
        return bool(seen)

    def add(self, holder: Any, source: Source, box: Box, owner: Any = None,
            ignored: frozenset[Any] = frozenset()) -> Place:
        """Records a holder and queues what it contains."""
        contents = box.read(holder)
        owner = holder if owner is None else owner
        out_of_sight = hideable(owner, contents) if box in _NAMED else frozenset()
        place = Place(holder, owner, source, box, contents, ignored | out_of_sight)
        self.places.append(place)
        self.first.setdefault(id(holder), source)
        self._keep.append(holder)
        place.children = [(key, box.child(source, self._key(key))) for key, value in contents.items()
                          if type(value) not in _EXACT_PLAIN]
        if out_of_sight:
            self.hidden += [(place, key, self.child(place, key)) for key in contents if key in out_of_sight]
        self._todo.extend((contents[key], child) for key, child in place.children if key not in place.ignored)
        return place

    def _key(self, key: Any) -> Any:
        return key if type(key) in (str, int) else self.first.get(id(key), key)

    def child(self, place: Place, key: Any) -> Source:
        """The source of what a place holds, or may come to hold, at a key."""
        return place.box.child(place.source, self._key(key))


@dataclass(frozen=True, eq=False)
class _Later(Source):
    """Marks a source that has waited until all else was walked."""

    source: Source


Handler = Callable[[Walk, Any, Source], None]


def _tensor(walk: Walk, tensor: torch.Tensor, source: Source) -> None:
    if is_lazy(tensor):
        raise LazyError(f"{source} has no shape yet", remedy="call the module once, which gives it one")
    walk.tensors[id(tensor)] = Found(tensor, source, _tensor_kind(walk, tensor, source))
    walk.metadata[id(tensor)] = metadata(tensor)
    # hooks of a tensor that an earlier computation made belong to that computation, not to the step
    walk.add(tensor, source, boxes.TENSOR, ignored=frozenset() if tensor.is_leaf else frozenset(HOOK_TABLES))
    attributes = vars(tensor)
    if attributes:
        walk.add(attributes, Vars(source), boxes.ATTRIBUTES, tensor)


def _array(walk: Walk, array: numpy.ndarray[Any, Any], source: Source) -> None:
    walk.arrays[id(array)] = Array(array, source, stamp(array))


def _generator(walk: Walk, generator: torch.Generator, source: Source) -> None:
    walk.generators[generator_id(generator)] = generator, source


def _tensor_kind(walk: Walk, tensor: torch.Tensor, source: Source) -> InputKind:
    if isinstance(source, Attr) and source.name == "grad":
        return "grad"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    steps: list[Any] = []
    step: Source | None = source
    while isinstance(step, Item):
        steps.append(step.key)
        step = step.base
    if len(steps) == 2 and steps[1] == "_buffers":
        return "buffer"
    if len(steps) >= 3 and steps[-1] == "state" and isinstance(steps[-2], Source):
        return "state"
    return "batch" if _is_batch(walk, source) else "tensor"


def _is_batch(walk: Walk, source: Source) -> bool:
    """True for what an argument is or holds: data in containers, not what an object keeps between calls."""
    while isinstance(source, (Item, Vars, Attr)) and source.path not in walk.holders:
        if isinstance(source, Attr) and source.name.startswith("__"):  # of a function
            return False
        source = source.base
    return isinstance(source, Local) and source.path not in walk.holders


def _mapping(walk: Walk, holder: dict[Any, Any], source: Source) -> None:
    walk._todo.extend((key, Member(source, index)) for index, key in enumerate(holder)
                      if type(key) not in _EXACT_PLAIN)
    walk.add(holder, source, boxes.MAPPING)
    _plain_attributes(walk, holder, source)


def _sequence(box: Box) -> Handler:
    def handle(walk: Walk, holder: Any, source: Source) -> None:
        if source.path in walk.varying and type(holder) in (list, deque):
            walk.sinks.found[id(holder)] = holder, source
            return
        walk.add(holder, source, box)
        _plain_attributes(walk, holder, source)
    return handle


def _plain_attributes(walk: Walk, value: Any, source: Source) -> None:
    if type(value) in _BARE:
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        walk.add(attributes, Vars(source), boxes.ATTRIBUTES, value)


def _object(walk: Walk, value: Any, source: Source) -> None:
    kind = type(value)
    if not (issubclass(kind, DATA) or is_dataclass(kind)):
        walk.holders.add(source.path)
    _plain_attributes(walk, value, source)
    if boxes.slot_names(kind):
        walk.add(value, source, boxes.SLOTS)
    for base in kind.__mro__:
        if is_user_class(base):
            walk._todo.append((base, Attr(source, "__class__") if base is kind else Attr(source, base.__name__)))


def _class(walk: Walk, kind: type, source: Source) -> None:
    if not is_user_class(kind):
        return
    if boxes.class_values(kind):
        walk.add(kind, source, boxes.CLASS)
    for name, member in vars(kind).items():
        plain = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(plain, types.FunctionType):
            walk._todo.append((plain, Method(source, name)))


def _optimizer(walk: Walk, optimizer: torch.optim.Optimizer, source: Source) -> None:
    walk.holders.add(source.path)
    for index, group in enumerate(optimizer.param_groups):
        where = Item(Item(Item(Vars(source), "param_groups"), index), "")
        later = frozenset(key for key in group if key in SCHEDULED and key not in optimizer.defaults)
        lifted = set()
        for key, value in group.items():
            if isinstance(value, float) or (key == "lr" and type(value) is int):
                walk.numbers.append(Number(Item(where.base, key), float(value), group, key))
                lifted.add(key)
            elif type(value) is tuple and value and all(isinstance(v, float) for v in value):
                lifted.add(key)
                walk.numbers += [Number(Item(Item(where.base, key), i), v, group, key, i) for i, v in enumerate(value)]
        walk.first[id(group)] = where.base
        place = walk.add(group, where.base, boxes.MAPPING, None, later | lifted)
        place.lifted, place.ordered = frozenset(lifted - later), False
    walk.add(vars(optimizer), Vars(source), boxes.ATTRIBUTES, optimizer, BOOKKEEPING)
    for base in type(optimizer).__mro__:
        if is_user_class(base):
            walk._todo.append((base, Attr(source, "__class__")))


def _scheduler(walk: Walk, scheduler: LRScheduler, source: Source) -> None:
    walk.schedulers.append((scheduler, source))
    _object(walk, scheduler, source)


def _function(walk: Walk, function: types.FunctionType, source: Source) -> None:
    for index, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
        if id(cell) not in walk.first:
            walk.add(cell, Cell(source, index, name), boxes.CELL)
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            walk._todo.append((getattr(function, name), Attr(source, name)))
    if vars(function):
        walk.add(vars(function), Vars(source), boxes.ATTRIBUTES, function)
    if not is_library(function.__code__.co_filename):
        walk.reach.add(function, isinstance(source, Method))
        names = global_names(function.__code__)
        table = id(function.__globals__)
        fresh = tuple(name for name in names if (table, name) not in walk.named)
        walk.named.update((table, name) for name in fresh)
        if fresh:
            walk.add(Names(function, fresh), Global(source, "", function.__module__ or ""), boxes.NAMES)


def _module(walk: Walk, module: types.ModuleType, source: Source) -> None:
    if is_user_module(module):
        walk.add(vars(module), Vars(source), boxes.MODULE, module)


def _context(walk: Walk, context: Any, source: Source) -> None:
    """What an `autograd.Function` keeps for its backward, which is code that may run."""
    _plain_attributes(walk, context, source)
    forward = Attr(Attr(source, "__class__"), "_forward_cls")
    walk._todo.append((context._forward_cls, forward))
    for name in ("backward", "vjp"):
        walk._todo.append((getattr(context._forward_cls, name), Attr(forward, name)))


def _method(walk: Walk, method: types.MethodType, source: Source) -> None:
    walk._todo += [(method.__self__, Attr(source, "__self__")), (method.__func__, Attr(source, "__func__"))]


def _partial(walk: Walk, value: functools.partial[Any], source: Source) -> None:
    walk._todo += [(value.func, Attr(source, "func")), (value.args, Attr(source, "args")),
                   (value.keywords, Attr(source, "keywords"))]


HANDLERS: dict[type, Handler] = {
    torch.Tensor: _tensor,
    numpy.ndarray: _array,
    torch.Generator: _generator,
    torch.optim.Optimizer: _optimizer,
    LRScheduler: _scheduler,
    dict: _mapping,
    list: _sequence(boxes.LIST),
    tuple: _sequence(boxes.TUPLE),
    set: _sequence(boxes.SET),
    frozenset: _sequence(boxes.FROZENSET),
    deque: _sequence(boxes.DEQUE),
    types.FunctionType: _function,
    types.MethodType: _method,
    types.ModuleType: _module,
    functools.partial: _partial,
    BackwardCFunction: _context,
    BackwardHook: _object,
    types.SimpleNamespace: _object,
    argparse.Namespace: _object,
    UserDict: _object,
    UserList: _object,
    type: _class,
}
DATA = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)  # objects that hold data, as containers do
_VARYING = (boxes.MAPPING, boxes.ATTRIBUTES, boxes.SLOTS, boxes.LIST, boxes.CELL, boxes.NAMES, boxes.MODULE)
_NAMED = (boxes.ATTRIBUTES, boxes.SLOTS, boxes.MODULE)
_LATER = (_optimizer, _scheduler, _class)
# Registered operators and their namespaces keep books of their own, which change when one is first run.
OPERATORS: tuple[type, ...] = (*map(type, (torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor)),)
OPAQUE: tuple[type, ...] = (
    types.BuiltinFunctionType, weakref.ref, torch.library.CustomOpDef, *OPERATORS
)


@functools.lru_cache(maxsize=4096)
def _handler(kind: type) -> Handler | None:
    if issubclass(kind, PLAIN) or issubclass(kind, OPAQUE) or is_one_of_a_kind(kind):
        return None
    for base in kind.__mro__:
        if base in HANDLERS:
            return HANDLERS[base]
    return _object if is_user_class(kind) or is_installed(kind) else None
