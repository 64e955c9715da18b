"""How each type of object is walked: a table from type to handler.

Bodies of functions are followed for user code only: torch, the standard library and installed packages change nothing
that a guard could see, save through objects that are walked anyway.
"""

from __future__ import annotations

import argparse
import configparser
import contextvars
import functools
import queue
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy
import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import BackwardHook

from wholestep.capture.guards.compared_values import EXACT_PLAIN, PLAIN, is_one_of_a_kind, metadata
from wholestep.capture.outside import external_calls
from wholestep.capture.outside.iterators import MOVING, RANDOM
from wholestep.capture.snapshot import boxes
from wholestep.capture.snapshot.boxes import Box, Names
from wholestep.capture.snapshot.library_code import is_library
from wholestep.capture.snapshot.names_read import global_names, is_installed, is_user_class, is_user_module
from wholestep.capture.snapshot.numpy_arrays import BUFFERS, Array, stamp
from wholestep.capture.snapshot.optimizer_handler import optimizer
from wholestep.capture.snapshot.places import Found, Places
from wholestep.capture.sources import (
    Attr,
    Cell,
    Globals,
    Item,
    Member,
    Method,
    Referent,
    Root,
    Source,
    Vars,
    base_of,
    referent,
)
from wholestep.errors import LazyError, UnsupportedError
from wholestep.ir import InputKind
from wholestep.torch_compat import HOOK_TABLES, generator_id

_BARE = frozenset({dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict})

Handler = Callable[[Places, Any, Source], None]


def _tensor(walk: Places, tensor: torch.Tensor, source: Source) -> None:
    if is_lazy(tensor):
        raise LazyError(f"{source} has no shape yet", remedy="call the module once, which gives it one")
    walk.tensors[id(tensor)] = Found(tensor, source, _tensor_kind(walk, tensor, source))
    try:
        walk.metadata[id(tensor)] = metadata(tensor)
    except RuntimeError as error:  # of a view whose base was written since, as FullyShardedDataParallel writes it
        what = f"{source} is a view of memory that was written since, of which autograd will not speak"
        raise UnsupportedError(what, remedy="copy it; of FSDP, compile the plain module with ws.FullyShard") from error
    # hooks of a tensor that an earlier computation made belong to that computation, not to the step
    walk.add(tensor, source, boxes.TENSOR, ignored=frozenset() if tensor.is_leaf else frozenset(HOOK_TABLES))
    attributes = vars(tensor)
    if attributes:
        walk.add(attributes, Vars(source), boxes.ATTRIBUTES, tensor)


def _array(walk: Places, array: numpy.ndarray[Any, Any], source: Source) -> None:
    walk.arrays[id(array)] = Array(array, source, stamp(array))


def _generator(walk: Places, generator: torch.Generator, source: Source) -> None:
    walk.generators[generator_id(generator)] = generator, source


def _random(walk: Places, generator: Any, source: Source) -> None:
    walk.stoppers.randoms.setdefault(id(generator), (generator, source))
    _plain_attributes(walk, generator, source)


def _iterator(walk: Places, iterator: Any, source: Source) -> None:
    walk.stoppers.iterators[id(iterator)] = iterator, source


def _builtin(walk: Places, function: Any, source: Source) -> None:
    if id(function) in external_calls.NAMES:
        walk.reach.names.add(external_calls.NAMES[id(function)])
    _held(walk, function, source)


def _held(walk: Places, method: Any, source: Source) -> None:
    """A bound method of a random generator, whose class is asked for it at each call while the step is traced."""
    if isinstance(getattr(method, "__self__", None), (*RANDOM, torch.Generator)):
        walk.stoppers.held[id(method)] = method
        walk.queue(method.__self__, Attr(source, "__self__"))


def _cached(walk: Places, function: Any, source: Source) -> None:
    walk.stoppers.caches[id(function)] = function, source
    walk.queue(function.__wrapped__, Attr(source, "__wrapped__"))


def _context_variable(walk: Places, variable: contextvars.ContextVar[Any], source: Source) -> None:
    walk.add(variable, source, boxes.CONTEXT)


def _proxy(walk: Places, proxy: types.MappingProxyType[Any, Any], source: Source) -> None:
    inner = referent(proxy)
    if isinstance(inner, dict):
        walk.queue(inner, Referent(source))


def _weak(walk: Places, reference: Any, source: Source) -> None:
    """Where only a weak reference leads; what libraries keep by such is their own."""
    inner = referent(reference)
    if isinstance(inner, (torch.Tensor, torch.nn.Module)) or is_user_class(type(inner)):
        walk.queue(inner, Referent(source))


def _tensor_kind(walk: Places, tensor: torch.Tensor, source: Source) -> InputKind:
    if isinstance(source, Attr) and source.key == "grad":
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


def _is_batch(walk: Places, source: Source) -> bool:
    """True for what an argument is or holds: data in containers, not what an object keeps between calls."""
    while isinstance(source, (Item, Vars, Attr)) and source.path not in walk.holders:
        if isinstance(source, Attr) and source.key.startswith("__"):  # of a function
            return False
        source = source.base
    return isinstance(source, Root) and source.argument is not None and source.path not in walk.holders


def _mapping(walk: Places, holder: dict[Any, Any], source: Source) -> None:
    for index, key in enumerate(base_of(holder).__iter__(holder)):
        if type(key) not in EXACT_PLAIN:
            walk.queue(key, Member(source, index))
    walk.add(holder, source, boxes.MAPPING)
    _plain_attributes(walk, holder, source)


def _sequence(box: Box) -> Handler:
    def handle(walk: Places, holder: Any, source: Source) -> None:
        if source.path in walk.varying and type(holder) in (list, deque):
            walk.sinks.found[id(holder)] = holder, source
            return
        walk.add(holder, source, box)
        _plain_attributes(walk, holder, source)
    return handle


def _plain_attributes(walk: Places, value: Any, source: Source) -> None:
    if type(value) in _BARE:
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        walk.add(attributes, Vars(source), boxes.ATTRIBUTES, value)


def _object(walk: Places, value: Any, source: Source) -> None:
    kind = type(value)
    if not (issubclass(kind, DATA) or is_dataclass(kind)):
        walk.holders.add(source.path)
    _plain_attributes(walk, value, source)
    if boxes.slot_names(kind):
        walk.add(value, source, boxes.SLOTS)
    for base in kind.__mro__:
        if is_user_class(base):
            walk.queue(base, Attr(source, "__class__") if base is kind else Attr(source, base.__name__))


def _class(walk: Places, kind: type, source: Source) -> None:
    if not is_user_class(kind):
        return
    if boxes.class_values(kind):
        walk.add(kind, source, boxes.CLASS)
    for name, member in vars(kind).items():
        plain = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(plain, types.FunctionType):
            walk.queue(plain, Method(source, name))


def _scheduler(walk: Places, scheduler: LRScheduler, source: Source) -> None:
    walk.schedulers.append((scheduler, source))
    _object(walk, scheduler, source)


def _function(walk: Places, function: types.FunctionType, source: Source) -> None:
    for index, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
        if id(cell) not in walk.first:
            walk.add(cell, Cell(source, (index, name)), boxes.CELL)
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            walk.queue(getattr(function, name), Attr(source, name))
    if vars(function):
        walk.add(vars(function), Vars(source), boxes.ATTRIBUTES, function)
    if not is_library(function.__code__.co_filename):
        walk.reach.add(function, isinstance(source, Method))
        names = global_names(function.__code__)
        table = id(function.__globals__)
        fresh = tuple(name for name in names if (table, name) not in walk.named)
        walk.named.update((table, name) for name in fresh)
        if fresh:
            walk.add(Names(function, fresh), Globals(source, function.__module__ or ""), boxes.NAMES)
    else:
        _builtin(walk, function, source)


def _module(walk: Places, module: types.ModuleType, source: Source) -> None:
    if is_user_module(module):
        walk.add(vars(module), Vars(source), boxes.MODULE, module)


def _context(walk: Places, context: Any, source: Source) -> None:
    """What an `autograd.Function` keeps for its backward, which is code that may run."""
    _plain_attributes(walk, context, source)
    forward = Attr(Attr(source, "__class__"), "_forward_cls")
    walk.queue(context._forward_cls, forward)
    for name in ("backward", "vjp"):
        walk.queue(getattr(context._forward_cls, name), Attr(forward, name))


def _method(walk: Places, method: types.MethodType, source: Source) -> None:
    _held(walk, method, source)
    walk.queue(method.__self__, Attr(source, "__self__"))
    walk.queue(method.__func__, Attr(source, "__func__"))


def _partial(walk: Places, value: functools.partial[Any], source: Source) -> None:
    for name in ("func", "args", "keywords"):
        walk.queue(getattr(value, name), Attr(source, name))


HANDLERS: dict[type, Handler] = {
    torch.Tensor: _tensor,
    numpy.ndarray: _array,
    **dict.fromkeys(BUFFERS, _array),
    torch.Generator: _generator,
    **dict.fromkeys(RANDOM, _random),
    torch.optim.Optimizer: optimizer,
    LRScheduler: _scheduler,
    dict: _mapping,
    list: _sequence(boxes.LIST),
    tuple: _sequence(boxes.TUPLE),
    set: _sequence(boxes.SET),
    frozenset: _sequence(boxes.FROZENSET),
    deque: _sequence(boxes.DEQUE),
    types.FunctionType: _function,
    types.BuiltinFunctionType: _builtin,
    types.MethodType: _method,
    types.ModuleType: _module,
    functools.partial: _partial,
    BackwardCFunction: _context,
    BackwardHook: _object,
    types.SimpleNamespace: _object,
    argparse.Namespace: _object,
    UserDict: _object,
    UserList: _object,
    **dict.fromkeys((ChainMap, configparser.RawConfigParser, queue.Queue, threading.Event, threading.local), _object),
    **dict.fromkeys((weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet), _object),
    SynchronizedBase: _object,
    weakref.ref: _weak,
    weakref.ProxyType: _weak,
    weakref.CallableProxyType: _weak,
    types.MappingProxyType: _proxy,
    contextvars.ContextVar: _context_variable,
    type(functools.cache(len)): _cached,
    **dict.fromkeys(MOVING, _iterator),
    type: _class,
}
DATA = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)  # objects that hold data, as containers do
# Classes wait until all else is walked, optimizers and schedulers until classes are, so that a parameter is named after
# its module: the queue in which each waits.
WAITING: dict[Handler, int] = {_class: 0, optimizer: 1, _scheduler: 1}
# Registered operators and their namespaces keep books of their own, which change when one is first run.
OPERATORS: tuple[type, ...] = (*map(type, (torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor)),)
OPAQUE: tuple[type, ...] = (torch.library.CustomOpDef, *OPERATORS)


@functools.lru_cache(maxsize=4096)
def handler(kind: type) -> Handler | None:
    """How objects of a type are walked; None for those that nothing follows from."""
    if issubclass(kind, PLAIN) or issubclass(kind, OPAQUE) or is_one_of_a_kind(kind):
        return None
    for base in kind.__mro__:
        if base in HANDLERS:
            return HANDLERS[base]
    if is_user_class(kind) or is_installed(kind):
        return _object
    return _iterator if issubclass(kind, Iterator) else None
