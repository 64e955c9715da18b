"""Patterns over the graph: which chain of calls computes a value, and from what.

A pattern is a string (a variable: binds a node or number, equal each time), a number (that literal), a
`Call`, a `OneMinus`, or a tuple of patterns of which the first that fits is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

Bindings = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of one of ``targets``; ``as_`` names the node itself. A missing ``alpha`` or ``value`` is 1."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    as_: str = ""


@dataclass(frozen=True)
class OneMinus:
    """``1 - x``, computed by the step or already a literal."""

    variable: str


def match(found: Any, pattern: Any, bound: Bindings) -> Bindings | None:
    """The bindings under which ``found`` has the pattern's form, or None.

    Args:
        found: a node or a literal.
        bound: bindings so far; not changed.
    """
    if isinstance(pattern, tuple):
        return next((r for p in pattern if (r := match(found, p, bound)) is not None), None)
    if isinstance(pattern, str):
        known = bound.get(pattern, found)
        same = known is found if isinstance(found, fx.Node) else type(known) is type(found) and known == found
        return bound | {pattern: found} if same else None
    if isinstance(pattern, OneMinus):
        return _one_minus(found, pattern, bound)
    if isinstance(pattern, Call):
        return _call(found, pattern, bound)
    return bound if not isinstance(found, fx.Node) and found == pattern else None


def _one_minus(found: Any, pattern: OneMinus, bound: Bindings) -> Bindings | None:
    if isinstance(found, fx.Node):
        is_difference = getattr(found.target, "__name__", "") == "sub" and len(found.args) == 2 and found.args[0] == 1
        return match(found.args[1], pattern.variable, bound) if is_difference else None
    known = bound.get(pattern.variable)
    if known is None:
        return bound | {pattern.variable: 1 - found}
    return bound if not isinstance(known, fx.Node) and 1 - known == found else None


def _call(found: Any, pattern: Call, bound: Bindings) -> Bindings | None:
    if not isinstance(found, fx.Node) or found.target not in pattern.targets or len(found.args) != len(pattern.args):
        return None
    if set(found.kwargs) - set(pattern.kwargs) - {"alpha", "value"}:
        return None
    keywords = {**pattern.kwargs, **found.kwargs}
    pairs = [(found.kwargs.get(name, 1), pattern.kwargs.get(name, 1)) for name in keywords]
    for value, part in [*pairs, *zip(found.args, pattern.args, strict=True)]:
        result = match(value, part, bound)
        if result is None:
            return None
        bound = result
    return bound | {pattern.as_: found} if pattern.as_ else bound
