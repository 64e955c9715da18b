"""Sizes as numbers that know what they are at other sizes, so that one program can be made for many.

A program is planned with the sizes of one call. A `Size` is a plain number there, and an expression in symbols besides:
the program's text has the expression, and what was decided on the number is noted. Where all of that is decided alike,
the program serves other sizes.
May import: nested, torch_compat.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from wholestep.nested import leaves, map_leaves
from wholestep.torch_compat import FakeTensor, FakeTensorMode, python_text, simplified


class SizeDecisions:
    """What was decided on the sizes of one program.

    Attributes:
        hints: by symbol, the sizes of the call that the program is made for.
        conditions: Python expressions in the symbols' names that must be true at other sizes.
        places: by symbol, the input of the program and the dimension that it is the size of.
        specialized: whether a decision was on the number alone, so that no other sizes are served.
    """

    def __init__(self, hints: Mapping[Any, int], places: Mapping[Any, tuple[int, int]]) -> None:
        self.hints, self.places = dict(hints), dict(places)
        self.names = [str(symbol) for symbol in hints]
        self.conditions: dict[str, None] = {}
        self.specialized = False

    def number(self, value: Any, symbolic: Any) -> Any:
        """A number of the call at hand as one that knows its expression."""
        expression = simplified(symbolic)
        if not getattr(expression, "free_symbols", None):
            return value
        if type(value) is int:
            return Size(value, expression, self)
        self.specialized = True
        return value

    def sizes(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """What the symbols are in a call."""
        return tuple([inputs[index].shape[dim] for index, dim in self.places.values()])

    def function(self, texts: Iterable[str]) -> Callable[..., tuple[Any, ...]]:
        """What expressions in the symbols' names are, as a function of the symbols."""
        return _compiled(self.names, "".join(f"{text}, " for text in texts))


def function_of(symbols: Iterable[Any], expressions: Any) -> Callable[..., Any]:
    """Nested expressions and conditions as a function of their symbols."""
    return _compiled(map(str, symbols), _text(expressions))


def _text(tree: Any) -> str:
    if isinstance(tree, (list, tuple)):
        return "".join(f"({_text(one)}), " for one in tree)
    return python_text(tree)


def _compiled(names: Iterable[str], text: str) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(names)}: ({text})", {"math": math})  # type: ignore[no-any-return]


class Size(int):
    """A number that follows from symbolic sizes.

    It equals what it equals at all sizes. Other comparisons are by the number at hand, and noted; so is the number
    itself where it goes into arithmetic whose expression is not kept.
    """

    expression: Any
    decisions: SizeDecisions

    def __new__(cls, number: int, expression: Any, decisions: SizeDecisions) -> Size:
        made = super().__new__(cls, number)
        made.expression, made.decisions = expression, decisions
        return made

    def __repr__(self) -> str:
        return python_text(self.expression)

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and bool(self.expression == other.expression)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.expression)

    def __bool__(self) -> bool:
        return self._noted("!=", 0, int.__ne__(self, 0))

    def __reduce__(self) -> Any:
        return int, (_plain(self),)

    def _noted(self, sign: str, other: Any, outcome: bool) -> bool:
        condition = f"({self!r}) {sign} ({other!r})"
        self.decisions.conditions[condition if outcome else f"not {condition}"] = None
        return outcome

    def _alone(self) -> int:
        """The number at hand, for what has no expression."""
        self.decisions.specialized = True
        return _plain(self)


def _comparison(sign: str, compare: Callable[[Any, Any], bool]) -> Any:
    return lambda self, other: self._noted(sign, other, compare(_plain(self), _plain(other)))


def _arithmetic(compute: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def result(self: Size, other: Any) -> Any:
        if not isinstance(other, int):
            return compute(other, self._alone()) if swapped else compute(self._alone(), other)
        pair = (other, self) if swapped else (self, other)
        expression = compute(*(one.expression if isinstance(one, Size) else int(one) for one in pair))
        number = compute(*map(_plain, pair))
        return Size(number, expression, self.decisions) if expression.free_symbols else number

    return result


def _specialized(compute: Callable[..., Any]) -> Any:
    return lambda self, *others: compute(self._alone(), *map(_plain, others))


for _sign, _compare in {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}.items():
    setattr(Size, f"__{_compare.__name__}__", _comparison(_sign, _compare))
for _compute in (operator.add, operator.sub, operator.mul):
    setattr(Size, f"__{_compute.__name__}__", _arithmetic(_compute))
    setattr(Size, f"__r{_compute.__name__}__", _arithmetic(_compute, swapped=True))
for _name in ("floordiv", "mod", "truediv", "pow", "divmod", "lshift", "rshift", "and", "or", "xor"):
    for _way in (f"__{_name}__", f"__r{_name}__"):
        setattr(Size, _way, _specialized(getattr(int, _way)))
for _way in ("__int__", "__float__", "__abs__", "__invert__", "__round__"):
    setattr(Size, _way, _specialized(getattr(int, _way)))
setattr(Size, "__neg__", lambda self: self * -1)  # noqa: B010 - as the others


class SizedFake(FakeTensor):
    """A fake tensor of the sizes at hand, that gives them, and strides, as numbers that know their expressions.

    Attributes:
        plain: the same with plain numbers.
    """

    plain: FakeTensor
    _place: tuple[torch.Size, tuple[int, ...]]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._place[0]

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._place[0] if dim is None else self._place[0][dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._place[1] if dim is None else self._place[1][dim]

    def numel(self) -> int:
        return math.prod(self._place[0])

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.numel() * self.itemsize

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        if args or kwargs:
            return False
        expected = 1
        for size, stride in zip(reversed(self._place[0]), reversed(self._place[1]), strict=True):
            if stride != expected and size != 1:
                return False
            expected = size * expected
        return True


def sized_fake(mode: FakeTensorMode, like: FakeTensor, place: tuple[Any, Any]) -> SizedFake:
    """A fake tensor that has numbers which know their expressions for its size and stride.

    Args:
        like: the same with plain numbers.
    """
    made = SizedFake(mode, torch.empty_strided(*map(plain, place), dtype=like.dtype, device="meta"), like.device)
    made.plain, made._place = like, (torch.Size(place[0]), tuple(place[1]))
    return made


def plain(tree: Any) -> Any:
    """A size as the number that it is in the call at hand; the same for those in nested values, and in tensors."""
    return map_leaves(_plain, tree)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Size):
        return int.__int__(leaf)
    if isinstance(leaf, torch.Size):
        return torch.Size(map(_plain, leaf))
    return leaf.plain if isinstance(leaf, SizedFake) else leaf


def has_size(tree: Any) -> bool:
    """Whether numbers or tensors in nested values follow from symbolic sizes."""
    return any(isinstance(leaf, (Size, SizedFake)) for leaf in leaves(tree))
