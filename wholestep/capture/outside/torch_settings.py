"""Settings of torch: what a step's Python reads of them is a guard, what it would set is refused.

Each function by which Python reads a setting is patched in torch's modules that have it, whoever calls it, and so are
the properties of `torch.backends` that Python keeps. A setting counts as it is when the step begins.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.backends import ContextProp

from wholestep.capture.guards.compared_values import is_data, is_plain
from wholestep.errors import CaptureError, UnsupportedError
from wholestep.patches import Replacement, original, suspended
from wholestep.torch_compat import innermost_saved_tensor_hooks, setting_functions

GETTERS, SETTERS = setting_functions()
_SAVED = "hooks on saved tensors"
# How what steps have read is read again, by its name: settings, and variables of the environment.
READERS: dict[str, Callable[[], Any]] = {_SAVED: lambda: innermost_saved_tensor_hooks() is not None}


def distributions_validate() -> bool:
    """Whether `torch.distributions` check what they are given."""
    return bool(original(torch.distributions.Distribution, "_validate_args"))


class _Read:
    """An attribute of a class that is read by a function."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.read()


def setters() -> list[tuple[Any, str]]:
    """The functions that change a setting, each as a module that has it and its name there."""
    return [(module, name) for module, name, function in _holders(len(sys.modules)) if function.__name__ in SETTERS]


class Settings:
    """The settings that one step reads.

    Args:
        refused: takes the errors that the step was met with, whether it let them pass or not.

    Attributes:
        read: what they are, by name.
        noted: the names in the order of all reads.
    """

    def __init__(self, refused: list[CaptureError]) -> None:
        self.read: dict[str, Any] = {}
        self.noted: list[str] = []
        self.refused = refused
        self._hooked = READERS[_SAVED]()

    def replacements(self) -> list[Replacement]:
        """What stands in for functions that read and set."""
        found: list[Replacement] = [
            (ContextProp, "__get__", lambda *given: self._property(*given)),  # functions, which a class binds
            (ContextProp, "__set__", lambda *given: self._set_property(*given)),
            (torch.distributions.Distribution, "_validate_args", _Read(self._reading(distributions_validate))),
        ]
        for module, name, function in _holders(len(sys.modules)):
            setter = SETTERS.get(function.__name__)
            of_both = self._reading(function) if setter is None else self._refusing(function, setter[0])
            found.append((module, name, of_both))
        return found

    def note(self, name: str, read: Callable[[], Any]) -> None:
        """Makes a guard of what the step reads, as it is when it does so first."""
        READERS.setdefault(name, read)
        self.noted.append(name)
        if name not in self.read:
            with suspended():
                self.read[name] = read()

    def refuse_saved_tensor_hooks(self) -> None:
        """Refuses a backward inside of the step where hooks from outside change what it has saved."""
        self.read[_SAVED] = False
        if self._hooked:
            remedy = "enter them inside of the step, or run the backward outside"
            self.refused.append(UnsupportedError("saved_tensors_hooks are active around the step", remedy=remedy))
            raise self.refused[-1]

    def _reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            value = function(*args)
            if is_data(value) and all(map(is_plain, args)):
                self.note(_shown(function, args), functools.partial(function, *args))
            return value

        return read

    def _property(self, prop: ContextProp, owner: Any, kind: Any = None) -> Any:
        value = original(ContextProp, "__get__")(prop, owner, kind)
        if not _calls_c(prop.getter) and is_plain(value):
            attribute = next(name for name, member in vars(type(owner)).items() if member is prop)
            self.note(f"{owner.__name__}.{attribute}", functools.partial(getattr, owner, attribute))
        return value

    def _set_property(self, prop: ContextProp, owner: Any, value: Any) -> None:
        followed = isinstance(prop.setter, BuiltinFunctionType) and prop.setter.__name__ not in SETTERS
        if not _calls_c(prop.setter) and not followed and prop.getter() != value:
            raise self._refusal(f"sets a property of {owner.__name__} to {value!r}")
        original(ContextProp, "__set__")(prop, owner, value)

    def _refusing(self, setter: Callable[..., Any], getter: Callable[..., Any] | None) -> Callable[..., Any]:
        of_one = "fp32" in setter.__name__  # the setting of one backend and operation

        def call(*args: Any, **kwargs: Any) -> Any:
            if getter is None or (getter(*args[:-1]) != args[-1] if of_one else getter() != args[0]):
                raise self._refusal(f"calls {_shown(setter, args)}")
            return setter(*args, **kwargs)

        return call

    def _refusal(self, what: str) -> CaptureError:
        what = f"the step {what}, which a replay would not"
        self.refused.append(UnsupportedError(what, remedy="set it outside of the step"))
        return self.refused[-1]


def _calls_c(function: Callable[..., Any]) -> bool:
    """Whether a property's function calls one of torch's C++ in its module, where it is patched."""
    return isinstance(function, FunctionType) and "_C" in function.__code__.co_names


_searched: dict[str, int] = {}  # torch's modules, and how many attributes each had when it was searched
_found: dict[tuple[str, str], tuple[ModuleType, str, Callable[..., Any]]] = {}
_WANTED = {id(f): f for f in (*GETTERS, *(setter for _, setter in SETTERS.values()))}


@functools.lru_cache(maxsize=1)
def _holders(modules: int) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """The attributes of torch's modules that are such functions; each module is searched when it is new.

    Args:
        modules: how many are loaded.
    """
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        members = vars(module)
        if _searched.get(path) == len(members):
            continue
        _searched[path] = len(members)
        for name, value in list(members.items()):
            if id(value) in _WANTED:
                _found[module.__name__, name] = module, name, _WANTED[id(value)]
    return [one for one in _found.values() if original(one[0], one[1]) is one[2]]  # where nobody has put another


def _shown(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    name = function.__name__
    return f"torch.{'_C.' if name.startswith('_') else ''}{name}({', '.join(map(repr, args))})"
