"""The walk: from a step's function and arguments to all that it can reach.

What a container holds is found by a table from type to handler (`handlers.py`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from wholestep.capture.container_access import contents
from wholestep.capture.guards.compared_values import BY_CONTENTS, EXACT_PLAIN, NUMBERS
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.called_code import CalledCode, attributes_read
from wholestep.capture.snapshot.code_handlers import add_class_values
from wholestep.capture.snapshot.handlers import WAITING, handler
from wholestep.capture.snapshot.names_read import ASKS_ANY, named
from wholestep.capture.snapshot.reachable import Container, NumberInput, Reachable
from wholestep.capture.snapshot.user_code import is_library, own
from wholestep.capture.sources import Call, Source, Vars, argument, constant
from wholestep.torch_compat import global_hooks

_PLACES = 8  # in which a nested tuple is looked into; in others it is the same one
_VARYING = (kinds.MAPPING, kinds.ATTRIBUTES, kinds.SLOTS, kinds.LIST, kinds.CELL, kinds.GLOBALS, kinds.MODULE)


def _arguments(call: Call) -> Iterator[tuple[Source, Any]]:
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
            yield argument(names[position], position), value
        else:
            yield argument(variadic or "args", position, position - len(names)), value
    for key, value in call.kwargs.items():
        yield argument(key, key), value


def reachable(call: Call, names: Iterable[str] = (), varying: frozenset[str] = frozenset(),
              called: CalledCode | None = None) -> Reachable:
    """All that a call can see, from its function and arguments on, and what other code can see that is known to run."""
    found = begin(call, names, varying)
    besides: list[Callable[..., Any]] = [*(called.functions if called else ()), *global_hooks().values()]
    found.queued += [(function, constant(function)) for function in besides]
    if called is not None:
        _add_called(found, called)
    _finish(found)
    if varying:
        _vary(found)
    return found


def extend(found: Reachable, called: CalledCode) -> bool:
    """Adds what code can see that was seen to run, to a walk of the same call.

    Returns:
        False where something would have had to be walked before the step ran.
    """
    _add_called(found, called)
    if any(handler(type(container.before[key])) is not None  # type: ignore[arg-type]
           for container, key, _ in _seen(found)[0]):
        return False
    _finish(found)
    return True


def _add_called(found: Reachable, called: CalledCode) -> None:
    read = found.names_read
    for code in called.user.values():
        read.names |= named(code)
    for code, *_ in called.codes.values():
        read.by_libraries |= attributes_read(code)
        read.called |= named(code)
    for holder, names, source in called.of_libraries():
        fresh = tuple(name for name in names if (id(holder), name) not in found.used_globals)
        found.used_globals.update((id(holder), name) for name in fresh)
        of_class = isinstance(holder, type)
        if fresh:
            used = kinds.UsedGlobals(vars(holder), fresh, holder)
            found.add(used, source if of_class else Vars(source), kinds.CLASS_VALUES if of_class else kinds.GLOBALS)


def _finish(found: Reachable) -> None:
    walk(found)
    if not found.names_read.settle().isdisjoint(ASKS_ANY):
        _add_empty(found)
    add_class_values(found)


def begin(call: Call, names: Iterable[str] = (), varying: frozenset[str] = frozenset()) -> Reachable:
    """A walk before its first step."""
    found = Reachable(call, names, varying)
    found.roots[:0] = _arguments(call)
    fn = call.fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType) and not isinstance(fn.__self__, torch.nn.Module):
        fn = fn.__func__
    if isinstance(fn, types.FunctionType):
        own(getattr(inspect.unwrap(fn), "__code__", fn.__code__).co_filename)
    for name in ("__call__", "forward"):
        entry = getattr(type(call.fn), name, None)
        if isinstance(entry, types.FunctionType) and not is_library(entry.__code__.co_filename):
            found.names_read.add(entry)
    found.queued.extend((value, source) for source, value in reversed(found.roots))
    return found


def _add_empty(found: Reachable) -> None:
    """Adds what has no attributes yet, of which code may ask whether there is one."""
    bare, found.bare = found.bare, []
    for value, source in bare:
        if isinstance(value, types.FunctionType) and is_library(value.__code__.co_filename):
            found.bare.append((value, source))
        else:
            found.add_attributes(value, source, before={})


def _vary(found: Reachable) -> None:
    """Makes inputs of the plain numbers whose sources are known to vary."""
    for source, value in found.roots:
        if type(value) in NUMBERS and source.path in found.varying:
            found.numbers.append(NumberInput(source, value))
    for container in found.containers:
        for key, value in container.before.items() if container.kind in _VARYING else ():
            if type(value) in NUMBERS and key not in container.ignored:
                source = found.child(container, key)
                if source.path in found.varying:
                    found.numbers.append(NumberInput(source, value, container, key))
                    container.lifted |= {key}
                    container.ignored |= {key}


def walk(found: Reachable) -> None:
    """Walks until nothing is left that the step's code can name."""
    early, late = found.waiting
    while found.queued or _reveal(found) or early or late:
        waited = not found.queued
        value, source = (early or late).popleft() if waited else found.queued.pop()
        if type(value) in EXACT_PLAIN or (id(value) in found.first and not _is_walked_again(found, value, source)):
            continue
        handle = handler(type(value))  # type: ignore[arg-type]
        if handle is None:
            continue
        if handle in WAITING and not waited:
            found.waiting[WAITING[handle]].append((value, source))
            continue
        found.first.setdefault(id(value), source)
        found.kept.append(value)
        mark = len(found.queued)
        handle(found, value, source)
        found.queued[mark:] = reversed(found.queued[mark:])  # a stack: what was queued first is walked first


def _is_walked_again(found: Reachable, value: Any, source: Source) -> bool:
    """True for what is guarded by contents, unless it is nested: then in some places, or there are 2ⁿ of them."""
    if not isinstance(value, BY_CONTENTS):
        return False
    if isinstance(value, (tuple, frozenset)) and any(isinstance(inner, BY_CONTENTS) for inner in contents(value)):
        found.places[id(value)] += 1
        if found.places[id(value)] > _PLACES:
            found.repeated.add(source.path)
            return False
    return True


def _reveal(found: Reachable) -> bool:
    """Queues attributes whose names have come into use; True when there are any."""
    if not found.hidden:
        return False
    seen, found.hidden = _seen(found)
    for container, key, source in reversed(seen):
        container.ignored -= {key}
        found.queued.append((container.before[key], source))
    return bool(seen)


_Hidden = list[tuple[Container, Any, Source]]


def _seen(found: Reachable) -> tuple[_Hidden, _Hidden]:
    """The hidden attributes whose names have come into use, and the others."""
    names, anything = found.names_read.settle() | found.names_read.by_libraries, found.names_read.anything
    parts: tuple[_Hidden, _Hidden] = [], []
    for entry in found.hidden:
        parts[not (anything or entry[1] in names)].append(entry)
    return parts
