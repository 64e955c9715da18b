"""Host numbers: Python floats and ints whose value is only known when the step runs.

An optimizer reads `step.item()`, raises `beta ** step` and hands the result to a kernel. Such a number is
a `HostFloat` while tracing: every operation on it is recorded, in the order it ran, as a call of the same
Python function, so that replaying computes the same double. It derives from `torch.SymFloat` because
torch's argument parser takes those where it takes numbers.

Where an operator insists on a C++ double (`lr: float`, lists of scalars) the parser asks for a concrete
value: it gets a token, a float that none of the call's other arguments is, which the recorder replaces again.

Whatever else needs the number itself asks `RecordedNumbers.escaped`: it becomes a guard, or is refused.
"""

from __future__ import annotations

import dis
import math
import operator
import re
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import fx


class HostNode:
    """The `node` that torch's symbolic number classes hold; answers what C++ asks of it.

    Attributes:
        recorder: the `RecordedNumbers` of the run.
        fx_node: the node that computes the number; the number itself for one of C++'s own.
        hint: its value if known while tracing, else a placeholder value of the right type.
        known: whether `hint` is the true value.
    """

    def __init__(self, recorder: Any, fx_node: Any, hint: Any, known: bool) -> None:
        self.recorder, self.fx_node, self.hint, self.known = recorder, fx_node, hint, known
        self.constant = None
        recorder.watch.add([self])

    def is_int(self) -> bool:
        return isinstance(self.hint, int) and not isinstance(self.hint, bool)

    def is_float(self) -> bool:
        return isinstance(self.hint, float)

    def is_bool(self) -> bool:
        return isinstance(self.hint, bool)

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def is_nested_int(self) -> bool:
        return False

    is_constant = is_nested_int

    def maybe_as_int(self) -> int | None:
        return None if isinstance(self.fx_node, fx.Node) else self.hint

    def guard_float(self, file: str, line: int) -> float:
        return float(self.recorder.token(self))

    def guard_int(self, file: str, line: int) -> int:
        return int(self.recorder.escaped(self, "an operator needs its integer value"))

    def int_(self) -> int:
        return int(self.recorder.escaped(self, "int(…) needs its value"))

    def bool_(self) -> bool:
        return bool(self.hint)

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self.hint)

    expect_true = expect_size = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool
    statically_known_true = guard_bool

    def clone(self) -> HostNode:
        return self

    def _graph_repr(self) -> str:
        return self.fx_node.name

    def wrap_int(self, value: float) -> HostNode:
        return HostNode(self.recorder, value, value, known=True)

    wrap_float = wrap_bool = wrap_int

    def __getattr__(self, name: str) -> Callable[..., HostNode]:
        function = _OF_CPP.get(name) or getattr(operator, name)

        def call(*nodes: HostNode) -> HostNode:
            found = _record(function, *(self.recorder.size(make_host(node)) for node in (self, *nodes)))
            return found.node if isinstance(found, HOSTS) else self.wrap_int(found)  # type: ignore[no-any-return]

        return call


def _record(function: Callable[..., Any], *args: Any) -> Any:
    """The number that a call of a function on host numbers gives; a bool is decided on at once."""
    owner = next(a for a in args if isinstance(a, HOSTS))
    hints = [a.node.hint if isinstance(a, HOSTS) else a for a in args]
    try:
        hint, failed = function(*hints), None
    except (ArithmeticError, ValueError) as error:  # the value, if known, is out of the function's domain
        hint, failed = 1.0, error
    return owner.node.recorder.record(function, args, hint, failed)


# What C++ computes with an integer before it needs it, such as the size of a padded tensor, by names of its own.
_OF_CPP: dict[str, Callable[..., Any]] = {
    "int_truediv": operator.truediv, "float_truediv": operator.truediv, "int_floordiv": operator.floordiv,
    "float_pow": pow, "pow_by_natural": pow, "sym_min": min, "sym_max": max,
    "ceil": math.ceil, "floor": math.floor, "sym_float": operator.pos, "sym_and": operator.and_, "sym_or": operator.or_,
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, *HOSTS))


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return _record(function, other, self) if swapped else _record(function, self, other)

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *rest: _record(function, self, *rest)


def plain(number: Any, how: str) -> Any:
    """The Python number that a host number is now; anything else as it is."""
    return number.node.recorder.escaped(number.node, how) if isinstance(number, HOSTS) else number


def _escape(how: str, convert: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *rest, **options: convert(plain(self, how), *rest, **options)


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY: dict[str, Callable[..., Any]] = {
    "__round__": round,
    **{f"__{name}__": getattr(operator, name) for name in ("neg", "pos", "abs", "invert")},
    **{f"__{name}__": getattr(math, name) for name in ("trunc", "floor", "ceil")},
    **{f"__sym_{name}__": getattr(math, name) for name in dir(math) if hasattr(torch.SymFloat, f"__sym_{name}__")},
}
ESCAPES: dict[str, tuple[str, Callable[..., Any]]] = {
    **{f"__{kind.__name__}__": (f"{kind.__name__}(…) needs its value", kind) for kind in (float, int, complex)},
    "__index__": ("an index or size needs its value", operator.index),
    **{f"__{text.__name__}__": ("its text needs its value", text) for text in (repr, str, format)},
    "__hash__": ("hashing it needs its value", hash),
    "__array__": ("NumPy needs its value", lambda value, *rest, **options: numpy.asarray(value, *rest)),
    "__sizeof__": ("its size needs its value", lambda value: value.__sizeof__()),
    "__reduce_ex__": ("a copy of it needs its value", lambda value, protocol: (type(value), (value,))),
}


def _methods() -> dict[str, Any]:
    names = [*dir(int), *dir(float), *dir(numpy.float64)]
    table: dict[str, Any] = {name: _attribute(name) for name in names if not name.startswith("__")}
    for name in (*ARITHMETIC, *COMPARISONS):
        function, name = getattr(operator, name), name.rstrip("_")
        table[f"__{name}__"] = _binary(function, swapped=False)
        if name not in COMPARISONS:
            table[f"__r{name}__"] = _binary(function, swapped=True)
    power = table["__pow__"]
    table["__pow__"] = lambda self, *rest: power(self, *rest) if len(rest) == 1 else _record(pow, self, *rest)
    table["__divmod__"] = lambda self, other: (self // other, self % other)
    table["__rdivmod__"] = lambda self, other: (other // self, other % self)
    table |= {name: _unary(function) for name, function in UNARY.items()}
    table |= {name: _escape(*way) for name, way in ESCAPES.items()}
    table["__bool__"] = lambda self: self != 0
    table["__class__"] = property(lambda self: type(self).stands_for)
    table["__dir__"] = lambda self: dir(self.__class__)
    table["__dict__"] = property(_no_attributes)
    return table


def _no_attributes(self: Any) -> Any:
    raise AttributeError(f"'{self.__class__.__name__}' object has no attribute '__dict__'")


def _attribute(name: str) -> property:
    """What numbers have besides: `bit_length`, `is_integer`, `real`; NumPy's `astype`."""

    def value(self: Any) -> Any:
        if not hasattr(self.__class__, name):
            raise AttributeError(f"'{self.__class__.__name__}' object has no attribute '{name}'")
        return getattr(plain(self, f".{name} needs its value"), name)

    return property(value)


class _Type(type):
    """The type of a class that equals another, for `type(x) == float` and `type(x) in (int, float)`.

    Its hash is its own: C code that finds it under the other in a table of types would read its memory.
    """

    stands_for: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    __hash__ = type.__hash__


def _number_class(name: str, base: type, stands_for: type) -> Any:
    table = {"__doc__": f"A {stands_for.__name__} known when the step runs.", "stands_for": stands_for}
    return _Type(name, (base,), table | _methods())


def is_for_plain(error: Exception) -> bool:
    """Whether an error may be that of code which takes no number but Python's own."""
    frame, text = list(traceback.walk_tb(error.__traceback__))[-1][0], str(error)
    given = any(isinstance(value, HOSTS) for value in frame.f_locals.values())
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "RAISE_VARARGS":  # and not by C, which may name the type
        return given and isinstance(error, TypeError)
    of_ints = re.search(r"\bint(s|eger)?\b", text) is not None
    return "HostInt" in text or (not of_ints if "HostFloat" in text else given and of_ints)


HostFloat: Any = _number_class("HostFloat", torch.SymFloat, float)
HostInt: Any = _number_class("HostInt", torch.SymInt, int)
HostFloat64: Any = _number_class("HostFloat64", torch.SymFloat, numpy.float64)  # of which 1 / 0 is infinite


HOSTS = (HostFloat, HostInt, HostFloat64)


def make_host(node: Any) -> Any:
    """The Python object that stands for a host number of the node's type, or for a symbolic size."""
    if not isinstance(node, HostNode):
        return torch.SymInt(node) if node.is_int() else torch.SymFloat(node)
    return (HostFloat64 if type(node.hint) is numpy.float64 else HostInt if node.is_int() else HostFloat)(node)


def _aware(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, recording its call when it is given a host number."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, HOSTS) for a in args) and not kwargs:
            return _record(function, *args)
        return function(*args, **kwargs)

    return call


# Functions that would otherwise turn a host number into a plain float on the way in.
AWARE: list[tuple[Any, str, Callable[..., Any]]] = [
    (math, name, _aware(function))
    for name, function in vars(math).items()
    if callable(function) and not name.startswith("_") and name not in ("frexp", "modf")  # which give pairs
]


def aware_choice(function: Callable[..., Any]) -> Callable[..., Any]:
    """`max` or `min`, recording the choice itself rather than deciding it while tracing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if not kwargs and any(isinstance(a, HOSTS) for a in items) and all(map(_is_number, items)):
            return _record(function, *items)
        return function(*args, **kwargs)

    return call
