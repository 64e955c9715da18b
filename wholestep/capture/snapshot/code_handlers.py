"""How code is walked: functions, classes and modules, by the names that they can read.

Bodies of functions are followed for user code only: torch, the standard library and installed packages change nothing
that a guard could see, save through objects that are walked anyway.
"""

from __future__ import annotations

import builtins
import copyreg
import functools
import sys
import types
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from wholestep.capture import sources
from wholestep.capture.guards.compared_values import is_data
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.container_kinds import UsedGlobals
from wholestep.capture.snapshot.names_read import global_names, imports, named
from wholestep.capture.snapshot.reachable import Reachable
from wholestep.capture.snapshot.user_code import is_installed, is_library, is_system, is_user_class, is_user_module
from wholestep.patches import original
from wholestep.torch_compat import PYTREE_NODES


def walk_classes(found: Reachable, value: Any, source: sources.Source) -> None:
    """Walks the classes of an object: the user's whole, of installed packages what they ask for types."""
    for base in type(value).__mro__:
        if is_user_class(base):
            found.queue(base, sources.Attr(source, "__class__" if base is type(value) else base.__name__))
        elif is_installed(base) and base not in found.library_classes:
            found.library_classes[base] = sources.Attr(source, "__class__" if base is type(value) else base.__name__)
            for method in vars(base).values():
                if isinstance(method, types.FunctionType):
                    _asks_types(found, method)


def add_class_values(found: Reachable) -> None:
    """Records the plain values of libraries' classes that the step's code names."""
    for kind, source in found.library_classes.items():
        members, of_torch = vars(kind), is_system(getattr(sys.modules[kind.__module__], "__file__", ""))
        names = found.names_read.names | (set() if of_torch else found.names_read.by_libraries)
        fresh = tuple(name for name in sorted(names & members.keys())
                      if is_data(members[name]) and (id(kind), name) not in found.used_globals)
        if fresh:
            found.used_globals.update((id(kind), name) for name in fresh)
            found.add(UsedGlobals(members, fresh, kind), source, kinds.CLASS_VALUES)


# Those of the standard library that lead to functions; users' own may have state.
DESCRIPTORS = (functools.partialmethod, functools.cached_property, functools.singledispatchmethod)


def walk_class(found: Reachable, kind: type, source: sources.Source) -> None:
    """Walks a class of the user's: its attributes, its methods and what they can name."""
    if not is_user_class(kind):
        return
    found.add(kind, source, kinds.CLASS)
    found.add(kind, source, kinds.FIELDS)
    found.queue(type(kind), sources.Attr(source, "__class__"))
    for table in (copyreg.dispatch_table, PYTREE_NODES):
        if (kept := table.get(kind)) is not None:
            what = f"how {kind.__qualname__} is copied or flattened ({id(kind)}, {id(table)})"
            found.outside.settings.note(what, functools.partial(table.get, kind))
            for function in (kept, getattr(kept, "flatten_fn", None), getattr(kept, "unflatten_fn", None)):
                if isinstance(function, types.FunctionType):
                    found.queue(function, sources.constant(function))
    found.names_read.names.update(vars(kind).get("__match_args__", ()))
    for name, member in vars(kind).items():
        here = sources.Method(source, name)
        functions = [(getattr(member, "__func__", member), here)]
        if isinstance(member, property):
            functions = [(getattr(member, part), sources.Method(here, part)) for part in ("fget", "fset", "fdel")]
        if isinstance(member, functools.singledispatchmethod):
            above = sources.Attr(sources.Item(sources.Vars(source), name), "dispatcher")
            found.queue(member.dispatcher.registry, sources.Attr(above, "registry"))  # type: ignore[attr-defined]
        functions = [(plain, place) for plain, place in functions if isinstance(plain, types.FunctionType)]
        found.queued += functions
        for plain, _ in functions:
            if not is_library(plain.__code__.co_filename):
                found.names_read.add(plain, name)
        if not functions and (
            isinstance(member, DESCRIPTORS) or is_user_class(type(member)) and hasattr(member, "__get__")
        ):
            found.names_read.add(getattr(member, "func", None), name)


def walk_function(
    found: Reachable, function: types.FunctionType, source: sources.Source, is_walked: Callable[[type], bool]
) -> None:
    """Walks what a function holds, and what its code can name.

    Args:
        is_walked: tells the types of objects that are walked.
    """
    for index, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
        if id(cell) not in found.first:
            found.add(cell, sources.Cell(source, (index, name)), kinds.CELL)
    if function.__defaults__ or function.__kwdefaults__:
        found.add(function, source, kinds.FIELDS)
    found.add_attributes(function, source)
    _asks_types(found, function)
    if not is_library(function.__code__.co_filename):
        if not isinstance(source, sources.Method):
            found.names_read.add(function)
        names = global_names(function.__code__)
        if not named(function.__code__).isdisjoint(("globals", "f_globals", "eval", "exec")):
            names = (*names, *(name for name in function.__globals__ if not name.startswith("__")))
        own, place = function.__globals__, _globals_of(found, function, source)
        given = [name for name in names if name not in own and _is_given(name)]
        for table, named_there, where in (
            (own, names, place),
            (vars(builtins), given, sources.Vars(sources.module("builtins"))),
        ):
            fresh = tuple(name for name in named_there if (id(table), name) not in found.used_globals)
            found.used_globals.update((id(table), name) for name in fresh)
            if fresh:
                found.add(UsedGlobals(table, fresh), where, kinds.GLOBALS)
        _modules(found, function, source, is_walked)
    else:
        found.names_read.names.add(function.__name__)


def _globals_of(found: Reachable, function: types.FunctionType, source: sources.Source) -> sources.Source:
    """A function's global variables: by the name of their module, or, of none that is loaded, by the first function."""
    table, name = function.__globals__, function.__module__ or ""
    if getattr(sys.modules.get(name), "__dict__", None) is not table:  # of `exec`
        name = found.apart.setdefault(id(table), source.path)
    return sources.Globals(source, name)


def _is_given(name: str) -> bool:
    """Whether somebody has put a value by this name among Python's own."""
    value = original(builtins, name) if hasattr(builtins, name) else len
    return type(value) is not types.BuiltinFunctionType and getattr(value, "__module__", None) != "builtins"


def _modules(
    found: Reachable, function: types.FunctionType, source: sources.Source, is_walked: Callable[[type], bool]
) -> None:
    """The modules of the user's that a function imports, and what it names in those of libraries and their objects."""
    table, names = function.__globals__, named(function.__code__)
    place, of_names = _globals_of(found, function, source), global_names(function.__code__)
    holders = [(table[name], sources.of_module(place, name)) for name in of_names if name in table]
    holders += [(held, source) for cell in function.__closure__ or () for held in kinds.CELL.read(cell).values()]
    holders = [(holder, where) for holder, where in holders
               if isinstance(holder, types.ModuleType) or not is_walked(type(holder))]
    if imports(function.__code__):
        packages = accumulate(str(table.get("__package__") or "").split("."), "{}.{}".format)
        above = ["", *(f"{package}." for package in packages)]
        imported = [sys.modules[package + name] for package in above for name in names if package + name in sys.modules]
        holders += [(module, source) for module in imported]
        found.queued += [(module, sources.module(module.__name__)) for module in imported if is_user_module(module)]
    asks_system = "sys" in names or any(holder is sys for holder, _ in holders)
    if "__import__" in names or asks_system and names & {"modules", "getattr", "vars", "__dict__"}:  # by any name
        loaded = [(name, held) for name, held in [*sys.modules.items()] if isinstance(held, types.ModuleType)]
        found.queued += [(held, sources.module(name)) for name, held in loaded if is_user_module(held)]
    if "modules" in names:
        for name in sorted(names):
            found.outside.settings.note(f"{name!r} in sys.modules", functools.partial(sys.modules.__contains__, name))
    met: dict[int, Any] = {}
    while holders:
        holder, where = holders.pop()
        if id(holder) in met or not isinstance(getattr(holder, "__dict__", None), dict) or is_user_module(holder):
            continue
        if isinstance(holder, types.ModuleType):
            where = sources.module(holder.__name__)
            if holder.__name__.partition(".")[0] == __package__.partition(".")[0]:
                continue  # the package's own, which a capture changes
        met[id(holder)] = all_of = vars(holder)
        held = {name: original(holder, name) for name in sorted(names & all_of.keys())}  # another thread may patch it
        holders += [(value, sources.Item(sources.Vars(where), name)) for name, value in held.items()]
        fresh = tuple(name for name, value in held.items() if (id(all_of), name) not in found.used_globals
                      and (is_data(value) or type(value) in _CODE))
        if fresh:
            found.used_globals.update((id(all_of), name) for name in fresh)
            found.add(UsedGlobals(all_of, fresh, holder), sources.Vars(where), kinds.GLOBALS)


_CODE = types.FunctionType, types.BuiltinFunctionType, type

# Functions that tell symbolic numbers from Python's, or objects from others, and names beside which alone they do.
_ASKING: dict[str, tuple[str, ...]] = {
    "type": ("type",), "isinstance": ("SymFloat", "SymInt", "SymBool"), "hasattr": ("node",), "getattr": ("node",),
    "id": ("id",), "hash": ("hash",),
}  # fmt: skip


def walk_getter(found: Reachable, getter: Any, source: sources.Source) -> None:
    """`operator.attrgetter` and the like, which have names that no code has, and are compared as a whole."""
    found.names_read.names.update(*(str(name).split(".") for name in getter.__reduce__()[1]))


def _asks_types(found: Reachable, function: types.FunctionType) -> None:
    table, names = function.__globals__, named(function.__code__)
    for asks, beside in _ASKING.items() if not is_system(function.__code__.co_filename) else ():
        if asks in names and asks not in table and not names.isdisjoint(beside):
            found.asking[id(table), asks] = table, asks


def walk_module(found: Reachable, module: types.ModuleType, source: sources.Source) -> None:
    """Walks a module of the user's."""
    if is_user_module(module):
        found.outside.modules.add(module)
        found.add(vars(module), sources.Vars(source), kinds.MODULE, module)
