"""`type()` and the like of stand-ins for tensors and numbers, while a step is traced: the types they stand for.

Users and installed packages find ``float`` for a host number, ``int`` for a symbolic size and `torch.Tensor` for a fake
tensor, by `type(x)` and by ``x.__class__`` (`isinstance`, `match`); torch, this package and the standard library find
the classes themselves, by which they work.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.guards.per_call_objects import PERSISTENT
from wholestep.capture.outside.stand_ins import Pending
from wholestep.capture.snapshot.snapshot import tensors_below
from wholestep.capture.snapshot.user_code import origin
from wholestep.capture.sources import lineage
from wholestep.errors import DataDependentError
from wholestep.patches import Replacement
from wholestep.torch_compat import FakeTensor
from wholestep.trace.numbers.host_numbers import HOSTS
from wholestep.trace.numbers.symbolic_sizes import is_made
from wholestep.trace.record.inputs import Inputs

NUMBERS: dict[type, type] = {
    **{kind: kind.stands_for for kind in HOSTS}, torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool,
}  # fmt: skip

_CODE = type, ModuleType, FunctionType, BuiltinFunctionType


def _shown(value: Any) -> type:
    """The type of what a value stands for; its own where it stands for nothing else."""
    kind = type(value)
    if kind is Pending:
        return _shown(value.original)
    if kind is FakeTensor:
        return torch.nn.Parameter if getattr(value, "_is_param", False) else torch.Tensor
    return NUMBERS.get(kind, kind)


def _type(*args: Any, **kwargs: Any) -> Any:
    return _shown(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)


def _asked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`isinstance`, `hasattr`, `getattr` of numbers as Python has them."""

    def ask(value: Any, *args: Any) -> Any:
        kind = NUMBERS.get(type(value))
        stands = kind is not None and (function is not getattr or not hasattr(kind, args[0]))
        return function(kind() if kind is not None and stands else value, *args)

    return ask


def _number_of(function: Callable[[Any], int], inputs: Inputs) -> Callable[[Any], int]:
    """`id`, `hash` of what may be another object at each call; those of what guards compare by identity are known."""
    world = inputs.world

    def is_another(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return is_made(value) or world.find(value) is not None
        if function is hash and type(value).__hash__ is not object.__hash__:
            return any(map(is_another, value if isinstance(value, (tuple, frozenset)) else tensors_below(value)))
        if is_plain(value) or isinstance(value, (*PERSISTENT, *_CODE)):
            return False
        source = world.reachable.first.get(id(value))
        of_call = source is None or getattr([*lineage(source)][-1], "argument", None) is not None
        return of_call or isinstance(value, (dict, list, tuple, set, frozenset))

    def ask(value: Any) -> int:
        if is_another(value):
            what = f"the step asks for the {function.__name__}() of an object, another number at each call"
            refused = DataDependentError(what, "use another key, or ask outside of the step")
            world.reachable.outside.refused.append(refused)
            raise refused
        return function(value)

    return ask


ASKED = {"type": _type} | {function.__name__: _asked(function) for function in (isinstance, hasattr, getattr)}


def _asked_outside() -> bool:
    """Whether other code than torch's and this package's asks; the standard library does so for who called it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        whose = origin(frame.f_code.co_filename)
        if whose == "torch" or (whose == "wholestep" and frame.f_globals["__name__"] != "wholestep.patches"):
            return False
        if whose in ("user", "installed"):
            return True
        frame = frame.f_back
    return False


def _address(storage: Any) -> Any:
    if _asked_outside():
        raise DataDependentError("a storage's _cdata is another number at each call", "ask for it outside of the step")
    return vars(torch.UntypedStorage.__base__)["_cdata"].__get__(storage)


def _class(value: Any) -> type:
    return _shown(value) if _asked_outside() else type(value)


def _printed(kind: type) -> Callable[[Any], str]:
    """The value of a symbolic size, which printing decides on; for torch its expression."""
    original: Callable[[Any], str] = vars(kind)["__repr__"]

    def shown(size: Any) -> str:
        return repr(getattr(size, f"__{NUMBERS[kind].__name__}__")()) if _asked_outside() else original(size)

    return shown


def patches(inputs: Inputs, symbolic: bool) -> Iterator[Replacement]:
    """What stands in for `type` and the like in the globals of functions, and for ``__class__``.

    Args:
        symbolic: sizes are symbols.
    """
    for table, name in inputs.world.reachable.asking.values():
        yield table, name, ASKED[name] if name in ASKED else _number_of(getattr(builtins, name), inputs)
    for asked in (FakeTensor, Pending):
        yield asked, "__class__", property(_class)
    if "_cdata" in inputs.world.reachable.names_read.names:
        yield torch.UntypedStorage, "_cdata", property(_address)
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool) if symbolic else ():
        yield kind, "__class__", property(_class)
        yield kind, "__repr__", _printed(kind)
