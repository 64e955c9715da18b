"""What user code can name: the globals of a function, and the attributes that a step can read.

An attribute of a user's object that no code of the step names is not part of the step: a trainer that counts
`self.global_step` outside of it must not make it recompile.
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from wholestep.cached_property import cached_by_class
from wholestep.capture.snapshot.user_code import is_user_class
from wholestep.torch_compat import FOUND_ON_ENTRY

# Functions that are Python's only where code reads them as globals: `model.eval()` is none.
_BUILT_IN = frozenset({"eval", "exec", "vars", "dir"})
_GLOBAL_ACCESS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"})
_FORMATS = frozenset({"format", "format_map", "vformat"})
_FIELD = re.compile(r"\.([^\W\d]\w*)")  # as in "{0.name}"
# Code that names one of these can read any attribute.
READS_ANY = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "fields", "replace", "attrgetter", "eval",
                       "exec", "deepcopy", "copy", "dir", "__getattribute__", "__getstate__", "resolve_name"})
# Code that names one of these can tell that an attribute is not there.
ASKS_ANY = READS_ANY | {"hasattr", "AttributeError"}
_MODULE_KEYS = frozenset(vars(torch.nn.Module()))


@cached_by_class
def _may_hide(kind: type) -> bool:
    """True for classes whose attributes only user code reads, and nn.Modules among them."""
    user = [base for base in kind.__mro__ if is_user_class(base)]
    others = [base for base in kind.__mro__ if base not in user]
    return bool(user) and all(b is torch.nn.Module or b.__module__ in ("builtins", "typing", "abc") for b in others)


def hideable(owner: object, keys: Iterable[str]) -> frozenset[str]:
    """The attributes of an object that are out of a step's sight unless its code names them."""
    kind = type(owner)
    if isinstance(owner, (types.ModuleType, torch.optim.lr_scheduler.LRScheduler)):
        return frozenset(keys)  # of a scheduler, step() is replayed, not traced
    if not _may_hide(kind):  # type: ignore[arg-type]
        return frozenset()
    return frozenset(keys) - _MODULE_KEYS if isinstance(owner, torch.nn.Module) else frozenset(keys)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


@functools.lru_cache(maxsize=8192)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global variables that a function's code, or a function nested in it, reads or writes."""
    return tuple(dict.fromkeys(str(i.argval) for inner in codes_in(code) for i in dis.get_instructions(inner)
                               if i.opname in _GLOBAL_ACCESS))


def _formats_any(code: types.CodeType) -> bool:
    """Whether code may format by a string that does not stand in it."""
    asked = itertools.pairwise(dis.get_instructions(code))
    return any(i.argval in _FORMATS and i.opname in ("LOAD_METHOD", "LOAD_ATTR") and before.opname != "LOAD_CONST"
               for before, i in asked)  # fmt: skip


@functools.lru_cache(maxsize=8192)
def named(code: types.CodeType) -> frozenset[str]:
    """Every name that code uses, and the strings in it, also in tuples: names (in patterns), or formats with names."""
    held = [c for inner in codes_in(code) for c in inner.co_consts]
    strings = {c for c in itertools.chain(held, *(c for c in held if type(c) is tuple)) if isinstance(c, str)}
    names = frozenset(itertools.chain(strings, *map(fields, strings), *(inner.co_names for inner in codes_in(code))))
    if not names.isdisjoint(_FORMATS) and any(_formats_any(inner) for inner in codes_in(code)):
        names |= {"getattr"}
    if "builtins" in names or names.isdisjoint(_BUILT_IN):
        return names
    return names - (_BUILT_IN - {*global_names(code)})


def fields(text: str) -> list[str]:
    """The attributes that a format string names."""
    return _FIELD.findall(text) if "{" in text else []


def imports(code: types.CodeType) -> bool:
    """Whether code imports modules, or may look them up."""
    found = any(dis.opmap["IMPORT_NAME"] in inner.co_code[::2] for inner in codes_in(code))
    return found or not named(code).isdisjoint(("import_module", "__import__", "modules"))


def set_on_entry(kind: type) -> frozenset[str]:
    """The attributes of one of torch's context managers that only tell `__exit__` what `__enter__` found.

    An ``autocast`` that is kept between steps gets them when it is first entered, which makes it no other.
    """
    of_torch = kind.__module__.startswith("torch.") and hasattr(kind, "__enter__")
    return FOUND_ON_ENTRY if of_torch else frozenset()


class NamesRead:
    """The names that a step's code can use, as the walk meets its functions.

    A function met as a value may run; a method may run when its name is in use.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names: set[str] = {"forward", "__getattr__", *names}  # of modules, too
        self.by_libraries: set[str] = set()  # attributes that code of packages reads
        self.called: set[str] = set()  # and names of methods that it may call
        self._methods: list[tuple[str, types.CodeType]] = []

    def add(self, function: Any, method: str = "") -> None:
        """Takes note of a user's function: one that may run, or a method by the name that its class has for it."""
        code = getattr(function, "__code__", None)
        if code is not None and method:
            self._methods.append((method, code))
        elif code is not None:
            self.names |= named(code)

    def settle(self) -> set[str]:
        """All names in use, once methods that they reach are counted in."""
        grown = True
        while grown:
            waiting, self._methods = self._methods, []
            for name, code in waiting:
                if name in self.names or name in self.called or (name.startswith("__") and name != "__init__"):
                    self.names |= named(code)
                else:
                    self._methods.append((name, code))
            grown = len(self._methods) < len(waiting)
        if "get_last_lr" in self.names:  # of a scheduler, whose methods are torch's
            self.names.add("_last_lr")
        return self.names

    @property
    def anything(self) -> bool:
        """True when some code can read attributes that it does not name."""
        return not self.names.isdisjoint(READS_ANY)
