"""Host numbers: Python floats and ints whose value is only known when the step runs.

An optimizer reads `step.item()`, raises `beta ** step` and hands the result to a kernel. Such a number is
a `HostFloat` while tracing: every operation on it is recorded, in the order it ran, as a call of the same
Python function, so that replaying computes the same double. It derives from `torch.SymFloat` because
torch's argument parser takes those where it takes numbers.

Where an operator insists on a C++ double (`lr: float`, lists of scalars) the parser asks for a concrete
value: it gets a token, a float that occurs nowhere else, which the recorder exchanges again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from wholestep.trace.where import user_line


class HostRecorder(Protocol):
    """What host numbers need of the recorder."""

    def record_host(self, function: Callable[..., Any], args: tuple[Any, ...], hint: Any) -> Any: ...
    def decide(self, node: fx.Node, hint: Any, line: str) -> Any: ...
    def token(self, number: HostNode) -> float: ...
    def escaped(self, number: HostNode, how: str) -> Any: ...


class HostNode:
    """The `node` that torch's symbolic number classes hold; answers what C++ asks of it.

    Attributes:
        fx_node: the node that computes the number.
        hint: its value if known while tracing, else a stand-in of the right type.
        known: whether `hint` is the true value.
    """

    def __init__(self, recorder: HostRecorder, fx_node: fx.Node, hint: Any, known: bool) -> None:
        self.recorder, self.fx_node, self.hint, self.known = recorder, fx_node, hint, known
        self.constant = None

    def is_int(self) -> bool:
        return isinstance(self.hint, int) and not isinstance(self.hint, bool)

    def is_float(self) -> bool:
        return isinstance(self.hint, float)

    def is_bool(self) -> bool:
        return isinstance(self.hint, bool)

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    def guard_float(self, file: str, line: int) -> float:
        return self.recorder.token(self)

    def guard_int(self, file: str, line: int) -> int:
        return self.recorder.escaped(self, "an operator needs its integer value")

    def guard_bool(self, file: str, line: int) -> bool:
        return self.recorder.decide(self.fx_node, self.hint, user_line())

    def clone(self) -> HostNode:
        return self

    def _graph_repr(self) -> str:
        return self.fx_node.name

    def wrap_float(self, value: float) -> float:
        return value

    def wrap_int(self, value: int) -> int:
        return value


def _record(function: Callable[..., Any], *args: Any) -> Any:
    owner = next(a for a in args if isinstance(a, (HostFloat, HostInt)))
    hints = [a.node.hint if isinstance(a, (HostFloat, HostInt)) else a for a in args]
    try:
        hint = function(*hints)
    except (ArithmeticError, ValueError):  # the stand-in value is out of the function's domain
        hint = 1.0
    return owner.node.recorder.record_host(function, args, hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, HostFloat, HostInt))


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return _record(function, other, self) if swapped else _record(function, self, other)

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _record(function, self)


def _compare(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        outcome = _record(function, self, other)
        return outcome.node.recorder.decide(outcome.node.fx_node, outcome.node.hint, user_line())

    return method


def _escape(how: str, convert: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *rest: convert(self.node.recorder.escaped(self.node, how), *rest)


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY: dict[str, Callable[[Any], Any]] = {
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": abs,
    "__round__": round,
}
ESCAPES: dict[str, tuple[str, Callable[..., Any]]] = {
    "__float__": ("float(…) needs its value", float),
    "__int__": ("int(…) needs its value", int),
    "__index__": ("an index or size needs its value", operator.index),
    "__repr__": ("printing it needs its value", repr),
    "__str__": ("printing it needs its value", str),
    "__format__": ("formatting it needs its value", format),
    "__hash__": ("hashing it needs its value", hash),
    "__trunc__": ("truncating it needs its value", math.trunc),
    "__floor__": ("math.floor needs its value", math.floor),
    "__ceil__": ("math.ceil needs its value", math.ceil),
}


def _methods() -> dict[str, Any]:
    table: dict[str, Any] = dict.fromkeys(())
    for name in ARITHMETIC:
        function = getattr(operator, name)
        table[f"__{name}__"] = _binary(function, swapped=False)
        table[f"__r{name}__"] = _binary(function, swapped=True)
    table |= {f"__{name}__": _compare(getattr(operator, name)) for name in COMPARISONS}
    table |= {name: _unary(function) for name, function in UNARY.items()}
    table |= {name: _escape(*way) for name, way in ESCAPES.items()}
    table["__bool__"] = lambda self: self != 0
    table["__class__"] = property(lambda self: float if isinstance(self.node.hint, float) else int)
    return table


HostFloat: Any = type("HostFloat", (torch.SymFloat,), {"__doc__": "A float known when the step runs.", **_methods()})
HostInt: Any = type("HostInt", (torch.SymInt,), {"__doc__": "An int known when the step runs.", **_methods()})


class HostBool:
    """The outcome of a comparison, before it is decided."""

    def __init__(self, node: HostNode) -> None:
        self.node = node


def make_host(node: HostNode) -> Any:
    """The Python object that stands for a host number of the node's type."""
    if node.is_bool():
        return HostBool(node)
    return HostInt(node) if node.is_int() else HostFloat(node)


def _aware(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, recording its call when it meets a host number."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, (HostFloat, HostInt)) for a in args) and not kwargs:
            return _record(function, *args)
        return function(*args, **kwargs)

    return call


# Functions that would otherwise turn a host number into a plain float on the way in.
MATH_FUNCTIONS = ("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh", "pow",
                  "fabs", "isnan", "isinf", "isfinite", "atan2", "hypot", "copysign")  # fmt: skip
AWARE: list[tuple[Any, str, Callable[..., Any]]] = [
    *((math, name, _aware(getattr(math, name))) for name in MATH_FUNCTIONS),
]


def aware_choice(function: Callable[..., Any]) -> Callable[..., Any]:
    """`max` or `min`, recording the choice itself rather than deciding it while tracing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if not kwargs and any(isinstance(a, (HostFloat, HostInt)) for a in items) and all(map(_is_number, items)):
            return _record(function, *items)
        return function(*args, **kwargs)

    return call
