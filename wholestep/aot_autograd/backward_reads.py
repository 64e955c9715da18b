"""What Python that runs in a backward reads: a hook, or an `autograd.Function`, that asks an object of Python's.

Where the backward runs outside of a compiled function, such an object may be another by then than when the function
was captured, as a flag that is set between the two.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from enum import EnumMeta
from functools import cache
from inspect import getattr_static
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from wholestep.capture.guards.compared_values import is_data, is_plain
from wholestep.capture.snapshot.container_kinds import TENSOR
from wholestep.capture.snapshot.reachable import Reachable
from wholestep.capture.snapshot.user_code import is_library, is_system, is_user_module
from wholestep.errors import UnsupportedError
from wholestep.torch_compat import is_packed

# Where Python of a backward's is called: by the engine, by a module's hooks, by a function's node.
_CALLERS = {"torch.autograd.graph", "torch.autograd.function", "torch.utils.hooks",
            "wholestep.trace.patches.engine_hook"}
_OUTSIDE = "LOAD_GLOBAL", "LOAD_DEREF"
_LOADS = *_OUTSIDE, "LOAD_FAST", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST"
_CONTAINERS = list, dict, set, tuple
_MISSING = object()

# A variable, whether it is one of outside, and the attributes and items that are read of it.
Chain = tuple[str, bool, list[tuple[str, Any]]]


@contextmanager
def refusing_reads(world: Reachable, nodes: Iterable[Any], has_hooks: bool) -> Iterator[None]:
    """The engine runs a backward that is traced.

    Args:
        world: what the step can see, which others may change.
        nodes: those of its graph.
        has_hooks: whether the forward has registered some.

    Raises:
        UnsupportedError: Python that ran in it reads an object that may change before a later backward.
    """
    seen: dict[int, CodeType] = {}  # by their ids: to hash one takes longer than what it does
    found: list[tuple[str, CodeType]] = []
    callers: list[CodeType] = []
    noted = world.outside.settings.noted

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in seen:
            seen[id(code)] = code
            if not is_system(code.co_filename) and _is_own(frame):
                found.extend((path, code) for path in _reads(frame, known))
                callers.append(code)

    if not has_hooks and not any(isinstance(node, BackwardCFunction) or is_packed(node) for node in nodes):
        yield
        return
    before, known = len(noted), {*world.first, *_held(world)}
    with _profiled(look):
        yield
    found += [(name, callers[-1]) for name in noted[before:] if name.startswith("os.environ") and callers]
    for path, code in found:
        raise UnsupportedError(
            f"{code.co_name} runs in the backward of a compiled function and reads {path}, which may change until then",
            "compile the whole step, its backward() included, or keep the value in the context or in a tensor",
            where=f"{code.co_filename}:{code.co_firstlineno}",
        )


def _held(world: Reachable) -> Iterator[int]:
    """ids of what containers hold that the step can see: also of what it has put there."""
    for container in world.containers:
        if container.kind is not TENSOR:
            yield from map(id, container.kind.read(container.value).values())


@contextmanager
def _profiled(look: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """A function sees all calls of this thread: beside a profiler in Python, instead of one in C for a while."""
    before: Any = sys.getprofile()
    is_c = before is not None and not callable(before)  # as cProfile's, which ends where another one begins
    if is_c and not hasattr(before, "enable"):
        yield  # a profiler that could not go on
        return

    def both(frame: FrameType, event: str, given: Any) -> Any:
        look(frame, event, given)
        return before(frame, event, given)

    sys.setprofile(both if callable(before) else look)
    try:
        yield
    finally:
        sys.setprofile(None if is_c else before)
        if is_c:
            before.enable()


def _is_own(frame: FrameType) -> bool:
    """Whether a frame is of what the engine called or its package, and no checkpoint's forward that runs again."""
    called, above = frame, frame.f_back
    while above is not None and (name := _module(above)) not in _CALLERS:
        if name == "torch.utils.checkpoint" or name.startswith("wholestep."):
            return False
        called = above
        above = above.f_back
    return not is_library(frame.f_code.co_filename) or _package(frame) == _package(called)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _reads(frame: FrameType, known: Container[int]) -> Iterator[str]:
    """What of that can change a function is about to read, of variables of outside and of its arguments.

    Args:
        known: ids of what the step could see when it began, and of what it has left there.
    """
    for name, is_outside, steps in _chains(frame.f_code):
        holder, value = None, frame.f_locals.get(name, frame.f_globals.get(name, _MISSING))
        is_kept = False  # in a context, or by what the step itself has put there
        for kind, key in steps:
            is_kept = is_kept or isinstance(value, BackwardCFunction)
            holder, value = value, _part(value, kind, key)
            is_kept = is_kept and (id(value) not in known or type(value) is tuple or is_plain(value))
        if is_kept or isinstance(value, type):
            continue
        changes = isinstance(value, _CONTAINERS) or (is_data(value) and not isinstance(holder, EnumMeta))
        if changes if steps else is_outside and _may_change(frame, name, value):
            yield name + "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in steps)


@cache
def _chains(code: CodeType) -> list[Chain]:
    found: list[Chain] = []
    named: dict[str, Chain] = {}  # by a variable of its own
    steps: list[tuple[str, Any]] | None = None
    for here, after in pairwise([*dis.get_instructions(code), None]):
        assert here is not None
        if steps is not None and here.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(("attribute", here.argval))
        elif steps is not None and here.opname == "LOAD_CONST" and after and after.opname == "BINARY_SUBSCR":
            steps.append(("item", here.argval))
        elif here.opname in (*_LOADS, "STORE_FAST"):
            names = here.argval if isinstance(here.argval, tuple) else (here.argval,)
            if steps is not None and here.opname.startswith("STORE"):
                named[names[0]] = found[-1]
            name, is_outside, before = named.get(names[-1], (names[-1], here.opname in _OUTSIDE, []))
            steps = None if here.opname == "STORE_FAST" else [*before]
            if steps is not None:
                found.append((name, is_outside, steps))
        elif here.opname != "BINARY_SUBSCR":
            steps = None
    return found


def _part(holder: Any, kind: str, key: Any) -> Any:
    """An attribute or an item, where reading it runs no code of anybody's; of a tensor, nothing."""
    if kind == "item" and type(holder) in (list, tuple):
        return holder[key] if type(key) is int and -len(holder) <= key < len(holder) else _MISSING
    if kind == "item":
        return holder[key] if type(holder) is dict and key in holder else _MISSING
    if holder is _MISSING or isinstance(holder, torch.Tensor):
        return _MISSING
    if isinstance(holder, ModuleType) and not is_user_module(holder):
        found = getattr_static(holder, key, _MISSING)
        return found if isinstance(found, ModuleType) else _MISSING
    if isinstance(holder, torch.nn.Module) and key in holder._modules:
        return holder._modules[key]
    return getattr_static(holder, key, _MISSING)


def _may_change(frame: FrameType, name: str, value: Any) -> bool:
    """Whether a variable holds what changes, or is set by a function of its module, or later by code that runs now."""
    if type(value) in (dict, list, set):
        return True
    functions = [held.__code__ for held in [*frame.f_globals.values()] if isinstance(held, FunctionType)]
    if is_data(value) and any(_sets(code, "STORE_GLOBAL", name) for code in functions):
        return True
    above: FrameType | None = frame.f_back
    if name not in frame.f_code.co_freevars:
        while above is not None and (above.f_globals is not frame.f_globals or above.f_code.co_name != "<module>"):
            above = above.f_back
        return above is not None and _sets(above.f_code, "STORE_NAME", name, above.f_lasti)
    outer, _, rest = frame.f_code.co_qualname.partition(".<locals>.")
    owners = [code for code in functions if code.co_qualname == outer] if rest else []
    if any(name in code.co_freevars and _sets(code, "STORE_DEREF", name) for code in _nested(owners)):
        return True
    while above is not None:
        if name in (*above.f_code.co_cellvars, *above.f_code.co_freevars) and above.f_locals.get(name) is value:
            if _sets(above.f_code, "STORE_DEREF", name, above.f_lasti):
                return True
        above = above.f_back
    return False


def _nested(codes: list[CodeType]) -> Iterator[CodeType]:
    for code in codes:
        yield code
        yield from _nested([held for held in code.co_consts if isinstance(held, CodeType)])


def _sets(code: CodeType, how: str, name: str, after: int = 0) -> bool:
    """Whether code sets a variable, where it can come from some place."""
    found = list(dis.get_instructions(code))
    for here in reversed(found):
        if "JUMP" in here.opname and here.offset >= after:
            after = min(after, here.argval)
    return any(here.opname == how and here.argval == name and here.offset > after for here in found)
