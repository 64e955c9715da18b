"""Code that runs in a step besides what its function and arguments lead to: what it reads is guarded, too.

Libraries keep functions of the user's in tables of their own and call them: formulas of custom operators, attention
functions. And code of installed packages reads attributes of the user's objects, and its own variables. Such code is
known once it has run, so a step has it from its first capture on. Torch and the standard library are not looked at.
"""

from __future__ import annotations

import copy
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from wholestep.capture import sources
from wholestep.capture.guards.compared_values import is_data
from wholestep.capture.snapshot.names_read import ASKS_ANY, codes_in, named
from wholestep.capture.snapshot.user_code import origin
from wholestep.patches import original

Table = dict[str, Any]
Found = tuple[Any, sources.Source]
_METHOD_FLAG = sys.version_info >= (3, 12)  # of LOAD_ATTR, where a method is called


@dataclass(eq=False)
class CalledCode:
    """What captures of one step have seen to run.

    Attributes:
        functions: the user's, which nothing else in reach of the step leads to.
        places: where libraries keep these: names, and what reads each.
        codes: code of installed packages, with its module's variables and the object that it is called for, if known.
        user: code of the user's that ran.
        changing: variables that a step itself sets: by id of what holds them and name, with that.
    """

    functions: list[Callable[..., Any]] = field(default_factory=list)
    places: dict[str, Callable[[], Any]] = field(default_factory=dict)
    codes: dict[tuple[int, int], tuple[CodeType, Table, Found | None]] = field(default_factory=dict)
    user: dict[int, CodeType] = field(default_factory=dict)
    changing: dict[tuple[int, str], Any] = field(default_factory=dict)
    _seen: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.functions) + len(self.codes) + len(self.user)

    def note(self, code: CodeType, table: Table) -> None:
        """Takes note of code of a package when it first runs, of what it may read then, and of functions that it names.

        Those may run without an operator of their own, as one that gives a number out of a configuration.
        """
        todo: list[tuple[CodeType, Table, Found | None]] = [(code, table, None)]
        while todo:
            code, table, given = called = todo.pop()
            key = id(code), id(given[0] if given else None)
            if key in self.codes:
                continue
            self.codes[key] = called
            for holder, names, _, of in _holders(*called):
                values = [(name, original(holder, name)) for name in names]
                self._seen += [(holder, name, _copied(value)) for name, value in values]
                todo += [(f.__code__, f.__globals__, of) for _, value in values for f in _functions(value)]

    def settle(self) -> None:
        """At the end of a capture: leaves out what has changed since, which a package counts or keeps for itself."""
        for holder, name, before in self._seen:
            now = original(holder, name) if name in vars(holder) else None
            if type(now) is not type(before) or not bool(now is before or now == before):
                self.changing[id(holder), name] = holder
        self._seen.clear()

    def of_libraries(self) -> Iterator[tuple[Any, tuple[str, ...], sources.Source]]:
        """What holds variables that code of packages reads, their names there, and its source."""
        met = set(self.changing)
        for called in self.codes.values():
            for holder, names, source, _ in _holders(*called):
                fresh = tuple(name for name in names if (id(holder), name) not in met)
                met.update((id(holder), name) for name in fresh)
                if fresh:
                    yield holder, fresh, source


def _holders(code: CodeType, table: Table, given: Found | None = None
             ) -> Iterator[tuple[Any, tuple[str, ...], sources.Source, Found | None]]:
    """Modules, classes and objects of packages that code names, and what it names there: plain values, functions.

    Of its own class, and of those of objects that it names, the bases too, and methods that need no name.

    Yields:
        What holds, names there, its source, and the object whose class it is, or that it is.
    """
    module = sys.modules.get(str(table.get("__name__")))
    if module is None or vars(module) is not table:
        return
    parts = code.co_qualname.split(".")
    names, met, of_objects = named(code) | {parts[-1]}, set[int](), set[int]()
    todo: list[tuple[Any, sources.Source, Found | None]] = [(module, sources.module(module.__name__), None)]
    todo += [(*given, given)] if given else []
    owner = vars(module).get(parts[0])
    if isinstance(owner, type):  # whose other methods it may call
        of_objects |= {id(base) for base in owner.__mro__}
        above = sources.Item(sources.Vars(todo[0][1]), owner.__name__)
        todo += [(base, above if base is owner else sources.Attr(above, base.__name__), None) for base in owner.__mro__]
    while todo:
        holder, source, of = todo.pop()
        if id(holder) in met or not _is_installed(holder):
            continue
        met.add(id(holder))
        of_class = isinstance(holder, type)
        here = names | _UNNAMED if id(holder) in of_objects else names
        found = {name: original(holder, name) for name in sorted(here & vars(holder).keys())}
        yield holder, tuple(name for name, value in found.items() if _is_compared(value)), source, of
        below, step = (source, sources.Method) if of_class else (sources.Vars(source), sources.Item)
        held = [(value, step(below, name)) for name, value in found.items()]
        todo += [(*one, None if isinstance(one[0], (type, ModuleType)) else one) for one in held]
        if not isinstance(holder, (type, ModuleType)):
            of_objects |= {id(base) for base in type(holder).__mro__}
            todo += [(base, sources.Attr(source, base.__name__), of) for base in type(holder).__mro__]


# Methods that code calls without their names.
_UNNAMED = frozenset({"__getitem__", "__call__", "__contains__", "__getattr__", "__missing__", "__iter__", "__len__"})


def _functions(value: Any) -> list[FunctionType]:
    """The functions of packages that run where one, or a property, is used: decorators' and what they wrap."""
    todo = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    found: list[FunctionType] = []
    for one in todo:  # what is wrapped may be of C, or a class
        if isinstance(one, FunctionType) and one not in found:
            found.append(one)
            todo.append(getattr(one, "__wrapped__", None))
    return [f for f in found if origin(f.__code__.co_filename) == "installed"]


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in (dict, list, set) else value


def _is_compared(value: Any) -> bool:
    """Whether a guard can compare a variable: plain values, functions and tables of these."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_compared, value.values() if type(value) is dict else value))
    return is_data(value) or type(value) in (FunctionType, property, staticmethod, classmethod)


def _is_installed(holder: Any) -> bool:
    """Whether an object has a table of attributes, and is of an installed package."""
    if not isinstance(holder, (type, ModuleType)) and type(getattr(holder, "__dict__", None)) is not dict:
        return False
    owner = holder if isinstance(holder, (type, ModuleType)) else type(holder)
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and origin(str(file)) == "installed"


@functools.lru_cache(maxsize=8192)
def attributes_read(code: CodeType) -> frozenset[str]:
    """The attributes that code reads by name, strings given to `getattr` among them; not methods that it calls."""
    found: set[str] = set()
    for inner in codes_in(code):
        for step in dis.get_instructions(inner):
            if step.opname == "LOAD_ATTR" and not (_METHOD_FLAG and (step.arg or 0) & 1):
                found.add(step.argval)
        if "getattr" in inner.co_names:
            found.update(value for value in inner.co_consts if isinstance(value, str))
    return frozenset(found) - ASKS_ANY
