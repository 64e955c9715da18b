"""How each type of object is walked: a table from type to handler."""

from __future__ import annotations

import argparse
import array
import contextvars
import ctypes
import decimal
import functools
import hashlib
import mmap
import operator
import queue
import threading
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any
from xml.etree.ElementTree import Element

import numpy
import torch
from torch.autograd.function import BackwardCFunction
from torch.optim.lr_scheduler import LRScheduler

from wholestep.cached_property import cached_by_class
from wholestep.capture import sources
from wholestep.capture.container_access import base_of, referent
from wholestep.capture.guards.compared_values import EXACT_PLAIN, PLAIN, is_one_of_a_kind
from wholestep.capture.outside.shared_generators import RANDOM
from wholestep.capture.outside.stand_ins import AppendOnlyList, Cached, Stopped
from wholestep.capture.snapshot import code_handlers as code
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.container_kinds import ContainerKind
from wholestep.capture.snapshot.names_read import fields, set_on_entry
from wholestep.capture.snapshot.reachable import NumberInput, Reachable, walk_tensor
from wholestep.capture.snapshot.user_code import is_holder, is_user_class
from wholestep.errors import UnsupportedError
from wholestep.tensor_parts import mark_states
from wholestep.torch_compat import generator_id

# What schedulers put into parameter groups, for themselves alone: a step that is given one later is no other step.
SCHEDULED = frozenset({"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"})
BOOKKEEPING = frozenset({
    "_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name",
    "_need_device_dtype_check_for_fused",
})
_BARE = frozenset({dict, list, tuple, set, frozenset, OrderedDict})

Handler = Callable[[Reachable, Any, sources.Source], Any]


def _unguarded(found: Reachable, value: Any, source: sources.Source) -> None:
    """What a step reads of it would be the same in each replay."""
    kind = "NumPy array" if isinstance(value, numpy.ndarray) else type(value).__name__
    what = f"the step can read {source}, a {kind}, whose contents may be others at each call"
    found.unguarded.append(value)
    remedy = "pass a tensor: torch.from_numpy(batch)"
    if kind != "NumPy array":
        remedy = "read outside of the step what it needs of that, and pass it as an argument"
    found.outside.refused.append(UnsupportedError(what, remedy=remedy))


def _generator(found: Reachable, generator: torch.Generator, source: sources.Source) -> None:
    found.generators[generator_id(generator)] = generator, source


def _random(found: Reachable, generator: Any, source: sources.Source) -> None:
    found.outside.draws.names.setdefault(id(generator), (generator, source))
    if isinstance(generator, numpy.random.Generator):
        found.queue(generator.bit_generator, sources.Attr(source, "bit_generator"))
    _plain_attributes(found, generator, source)


def _stand_in(kind: Callable[..., Any]) -> Handler:
    """Has something else stand in an object's place while the step is traced."""
    def handle(found: Reachable, value: Any, source: sources.Source) -> None:
        found.stand_ins[id(value)] = functools.partial(kind, value, source, found.outside.refused)
    return handle


def _builtin(found: Reachable, function: Any, source: sources.Source) -> None:
    found.names_read.names.add(function.__name__)  # by which a table knows it; code may have it under another
    if isinstance(function.__self__, str):
        found.names_read.names.update(fields(function.__self__))
    _held(found, function, source)


def _held(found: Reachable, method: Any, source: sources.Source) -> None:
    """A bound method of a random generator or a schedule; torch's class is asked for it at each call while traced."""
    owner = getattr(method, "__self__", None)
    if isinstance(owner, (torch.Generator, LRScheduler)):
        found.stand_ins[id(method)] = lambda: lambda *args, **kwargs: getattr(owner, method.__name__)(*args, **kwargs)
    if isinstance(owner, (*RANDOM, torch.Generator)):
        found.queue(method.__self__, sources.Attr(source, "__self__"))


def _proxy(found: Reachable, proxy: types.MappingProxyType[Any, Any], source: sources.Source) -> None:
    inner = referent(proxy)
    if isinstance(inner, dict):
        found.queue(inner, sources.Referent(source))


def _view(found: Reachable, view: Any, source: sources.Source) -> None:
    found.queue(view.mapping, sources.Attr(source, "mapping"))


def _weak(found: Reachable, reference: Any, source: sources.Source) -> None:
    """Where only a weak reference leads; what libraries keep by such is their own."""
    inner = referent(reference)
    owner = inner.__self__ if isinstance(inner, types.MethodType) else inner
    if isinstance(owner, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)) or is_user_class(type(owner)):
        found.queue(inner, sources.Referent(source))


def _mapping(found: Reachable, value: dict[Any, Any], source: sources.Source) -> None:
    for index, key in enumerate(base_of(value).__iter__(value)):
        if type(key) not in EXACT_PLAIN:
            found.queue(key, sources.Member(source, index))
    found.add(value, source, kinds.MAPPING)
    _fields(found, value, source)


def _has_fields(found: Reachable, value: Any, source: sources.Source) -> None:
    found.add(value, source, kinds.FIELDS)


_APPEND_ONLY, _STOPPED = _stand_in(AppendOnlyList), _stand_in(Stopped)


def _sequence(kind: ContainerKind) -> Handler:
    def handle(found: Reachable, value: Any, source: sources.Source) -> None:
        if source.path in found.varying and type(value) in (list, deque):
            return _APPEND_ONLY(found, value, source)
        found.add(value, source, kind)
        _fields(found, value, source)
    return handle


def _plain_attributes(found: Reachable, value: Any, source: sources.Source) -> None:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for_exit = set_on_entry(type(value))  # type: ignore[arg-type]
        found.add(attributes, sources.Vars(source), kinds.ATTRIBUTES, value, for_exit)


def _object(found: Reachable, value: Any, source: sources.Source) -> None:
    kind = type(value)
    if not (issubclass(kind, DATA) or is_dataclass(kind)):
        found.owners.add(source.path)
    _fields(found, value, source)


def _fields(found: Reachable, value: Any, source: sources.Source) -> None:
    if type(value) in _BARE:
        return
    _plain_attributes(found, value, source)
    if kinds.slot_names(type(value)):
        found.add(value, source, kinds.SLOTS)
    code.walk_classes(found, value, source)


def _optimizer(found: Reachable, optimizer: torch.optim.Optimizer, source: sources.Source) -> None:
    """The numbers among an optimizer's settings are inputs of the step; a wrapper's are those of what it wraps."""
    found.owners.add(source.path)
    mark_states(optimizer)
    for index, group in enumerate(vars(optimizer).get("param_groups", ())):
        where = sources.Item(sources.Item(sources.Vars(source), "param_groups"), index)
        found.trained |= set(map(id, group["params"]))
        for met in [found.tensors[id(p)] for p in group["params"] if id(p) in found.tensors]:  # plain tensors, too
            found.tensors[id(met.tensor)] = replace(met, kind="parameter")
        numbers: list[tuple[str, int | None, float]] = []
        for key, value in group.items():
            if isinstance(value, float) or (key == "lr" and type(value) is int):
                numbers.append((key, None, float(value)))
            elif type(value) is tuple and value and all(isinstance(v, float) for v in value):
                numbers += [(key, i, v) for i, v in enumerate(value)]
        lifted = {key for key, _, _ in numbers}
        later = frozenset(key for key in group if key in SCHEDULED and key not in optimizer.defaults)
        found.first[id(group)] = where
        container = found.add(group, where, kinds.MAPPING, None, later | lifted)
        container.lifted, container.ordered = frozenset(lifted - later), False
        for key, i, number in numbers:
            place = sources.Item(where, key) if i is None else sources.Item(sources.Item(where, key), i)
            found.numbers.append(NumberInput(place, number, container, key, i, setting=True))
    found.add(vars(optimizer), sources.Vars(source), kinds.ATTRIBUTES, optimizer, BOOKKEEPING)
    code.walk_classes(found, optimizer, source)


def _scheduler(found: Reachable, scheduler: LRScheduler, source: sources.Source) -> None:
    found.schedulers.append((scheduler, source))
    _object(found, scheduler, source)


def _function(found: Reachable, function: types.FunctionType, source: sources.Source) -> None:
    code.walk_function(found, function, source, lambda kind: handler(kind) is not None)


def _context(found: Reachable, context: Any, source: sources.Source) -> None:
    """What an `autograd.Function` keeps for its backward, which is code that a captured `backward()` runs."""
    _plain_attributes(found, context, source)
    forward = sources.Attr(sources.Attr(source, "__class__"), "_forward_cls")
    found.queue(context._forward_cls, forward)
    for name in ("backward", "vjp"):
        found.queue(getattr(context._forward_cls, name), sources.Attr(forward, name))


def _method(found: Reachable, method: types.MethodType, source: sources.Source) -> None:
    _held(found, method, source)
    _has_fields(found, method, source)


# What no guard compares: all that lets its memory be read as a buffer and is no tensor, and what holds values unseen.
UNGUARDED: tuple[type, ...] = (
    numpy.ndarray, bytearray, array.array, memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes.Union,
    ctypes.c_int.__mro__[1],  # the base of all single numbers
    contextvars.ContextVar, queue.SimpleQueue, BaseException, Element, decimal.Context, weakref.finalize,
    type(hashlib.sha256()),
)  # fmt: skip
DATA = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)  # objects that hold data, as containers do
GETTERS = operator.attrgetter, operator.methodcaller
HANDLERS: dict[type, Handler] = {
    torch.Tensor: walk_tensor,
    **dict.fromkeys(UNGUARDED, _unguarded),
    torch.Generator: _generator,
    **dict.fromkeys(RANDOM, _random),
    torch.optim.Optimizer: _optimizer,
    LRScheduler: _scheduler,
    dict: _mapping,
    list: _sequence(kinds.LIST),
    tuple: _sequence(kinds.TUPLE),
    set: _sequence(kinds.SET),
    frozenset: _sequence(kinds.FROZENSET),
    deque: _sequence(kinds.DEQUE),
    types.FunctionType: _function,
    types.MappingProxyType: _proxy,
    types.BuiltinFunctionType: _builtin,
    types.MethodType: _method,
    types.ModuleType: code.walk_module,
    **dict.fromkeys((functools.partial, *code.DESCRIPTORS), _has_fields),
    BackwardCFunction: _context,
    **dict.fromkeys(GETTERS, code.walk_getter),
    **dict.fromkeys(map(type, ({}.keys(), {}.values(), {}.items())), _view),
    types.CellType: lambda found, value, source: found.add(value, source, kinds.CELL),
    **dict.fromkeys((threading.Event, threading.local), _object),
    **dict.fromkeys((weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet), _object),
    SynchronizedBase: _object,
    **dict.fromkeys((weakref.ref, weakref.ProxyType, weakref.CallableProxyType), _weak),
    type(functools.cache(len)): _stand_in(Cached),
    type: code.walk_class,
}
# Classes wait until all else is walked, optimizers and schedulers until classes are, so that a parameter is named after
# its module: the queue in which each waits.
WAITING: dict[Handler, int] = {code.walk_class: 0, _optimizer: 1, _scheduler: 1}
# Registered operators and their namespaces keep books of their own, which change when one is first run.
OPERATORS: tuple[type, ...] = (*map(type, (torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor)),)
OPAQUE: tuple[type, ...] = (torch.library.CustomOpDef, *OPERATORS)


@cached_by_class
def handler(kind: type) -> Handler | None:
    """How objects of a type are walked; None for those that nothing follows from."""
    if issubclass(kind, PLAIN) or issubclass(kind, OPAQUE) or is_one_of_a_kind(kind):
        return _object if issubclass(kind, PLAIN) and is_user_class(kind) else None
    for base in kind.__mro__:
        if base in HANDLERS:
            return HANDLERS[base]
    held = is_holder(kind) and (kind.__dictoffset__ or kinds.slot_names(kind))
    if is_user_class(kind) or held or issubclass(kind, torch.nn.Module):  # this package's modules, too
        return _object
    return _STOPPED if issubclass(kind, Iterator) else None
