"""Parts of tensors, and tensors put together of parts: by the dimensions along which nothing is sliced or joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import (
    Build,
    Dims,
    Names,
    Rule,
    Strategy,
    alphabet,
    beside,
    dims_rule,
    linear,
    linear_strategies,
)
from wholestep.spmd.placements import Partial, Shard

aten = torch.ops.aten

# A dimension, as an argument says it, has no letter (`_along`), or is not there (`_without`).


def _dim(call: Call, count: int, name: str = "dim") -> int:
    return int(call.argument(name, 0)) % max(count, 1)


def _along(call: Call, value: torch.Tensor, name: str = "dim") -> list[str | None]:
    return [None if i == _dim(call, value.dim(), name) else a for i, a in enumerate(alphabet(value.dim()))]


def _without(call: Call, value: torch.Tensor) -> list[str | None]:
    return [a for i, a in enumerate(alphabet(value.dim())) if i != _dim(call, value.dim())]


def _square(call: Call, value: torch.Tensor) -> list[str | None]:
    dims = {int(call.argument("dim1", 0)) % value.dim(), int(call.argument("dim2", 1)) % value.dim()}
    return [None if i in dims else a for i, a in enumerate(alphabet(value.dim()))]


def _diagonal(call: Call, value: torch.Tensor) -> list[str | None]:
    dims = {int(call.argument("dim1", 0)) % value.dim(), int(call.argument("dim2", 1)) % value.dim()}
    return [*[a for i, a in enumerate(alphabet(value.dim())) if i not in dims], None]


def _windows(call: Call, value: torch.Tensor, name: str = "dimension") -> list[str | None]:
    return [*_along(call, value, name), None]


_Naming = Callable[[Call, torch.Tensor], Names]


def of_first(operand: _Naming, result: _Naming) -> Rule:
    """A view of the first operand."""
    return dims_rule(lambda c: ([operand(c, c.values[0])], [result(c, c.values[0])] * len(c.results)), (0,))


def into_result(whole: _Naming, part: _Naming) -> Rule:
    """The gradient of such a view, or such a view written into another tensor: of the result's dimensions."""

    def names(call: Call) -> tuple[Sequence[Names], Sequence[Names]]:
        base, written = whole(call, call.results[0]), part(call, call.results[0])
        return [base, written][-len(call.values) :], [base]

    def rule(call: Call) -> Iterator[Strategy]:
        yield from dims_rule(names, tuple(range(len(call.values))))(call)

    return rule


# Sliced out -------------------------------------------------------------------------------------------------------


def _slice(call: Call) -> Iterator[Strategy]:
    """Along the split dimension too, when what is sliced out is small: each rank gives what it has of it.

    Where ranks along other axes see other sizes, they may not slice out all of a dimension, or as small a part of it.
    """
    value, result = call.values[0], call.results[0]
    dim = _dim(call, value.dim())
    if call.group.uneven:
        yield from beside(call, dim)
    elif result.shape == value.shape:
        yield from beside(call)
    else:
        yield from beside(call, dim)
        if result.numel() * 2 <= value.numel() and value.dtype != torch.bool:
            yield Strategy((Shard(dim),), (Partial(),), partial(_slice_here, dim=dim))


def _slice_here(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    """A slice of the rank's piece among zeros: the same calls with sizes alike on every rank, for axes to come."""
    length, (start, stop) = call.values[0].shape[dim], build.piece(call.values[0].shape[dim])
    pads = [0, 0] * (call.values[0].dim() - 1 - dim) + [start, length - stop]
    return [build.same(call, [build.call(aten.constant_pad_nd.default, ins[0], pads)])]


def _select(call: Call) -> Iterator[Strategy]:
    """Of a split dimension, the rank that has it gives it, the others zeros."""
    value = call.values[0]
    dim = _dim(call, value.dim())
    yield from Dims([_along(call, value)], [_without(call, value)]).strategies(call)
    if value.dtype != torch.bool:
        yield Strategy((Shard(dim),), (Partial(),), partial(_select_here, dim=dim))


def _select_here(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    """Picks the element, or the zero that is put before one: the same calls on every rank, for axes to come."""
    length, (start, stop) = call.values[0].shape[dim], build.piece(call.values[0].shape[dim])
    index = int(call.argument("index")) % length
    place = min(max(index - start, 0), max(stop - start - 1, 0))
    one = build.call(aten.slice.Tensor, ins[0], dim, place, place + 1)
    two = build.call(aten.constant_pad_nd.default, one, [0, 0] * (call.values[0].dim() - 1 - dim) + [1, 0])
    return [build.call(aten.select.int, two, dim, int(start <= index < stop))]


# Put together -----------------------------------------------------------------------------------------------------


def _all(call: Call) -> tuple[int, ...]:
    return tuple(range(len(call.values)))


def _cat(call: Call) -> Iterator[Strategy]:
    """A tensor of shape [0] may be among others of more dimensions: nothing, as the caches of models begin."""
    count, names = call.results[0].dim(), _along(call, call.results[0])
    yield from Dims([names if value.dim() == count else [None] for value in call.values], [names]).strategies(call)
    yield from linear_strategies(call, [_all(call)])


def _stack(call: Call) -> Iterator[Strategy]:
    result = call.results[0]
    yield from Dims([_without(call, result)] * len(call.values), [_along(call, result)]).strategies(call)
    yield from linear_strategies(call, [_all(call)])


def _pad(call: Call) -> Iterator[Strategy]:
    pads, count = call.argument("pad"), call.values[0].dim()
    padded = [count - 1 - i // 2 for i, pad in enumerate(pads) if pad]
    if call.group.uneven:  # where ranks along other axes see other sizes, they may pad what is not padded here
        padded.append(count - len(pads) // 2)
    yield from beside(call, *padded)
    if not call.argument("value", 0):
        yield from linear_strategies(call, [(0,)])


def _repeated(call: Call) -> tuple[Sequence[Names], Sequence[Names]]:
    repeats = call.argument("repeats")
    new = len(repeats) - call.values[0].dim()
    names = [a if n == 1 else None for a, n in zip(alphabet(len(repeats)), repeats, strict=True)]
    return [names[new:]], [[*[None] * new, *names[new:]]]


def _slice_scatter(call: Call) -> Iterator[Strategy]:
    yield from beside(call, *([] if call.values[0].shape == call.values[1].shape else [int(call.argument("dim", 0))]))
    yield from linear_strategies(call, [(0, 1)])


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.slice", "aten.narrow"], linear(_slice)),
    "aten.select": linear(_select),
    **dict.fromkeys([f"aten.{kind}split{end}" for kind in ("", "unsafe_") for end in ("", "_with_sizes")],
                    of_first(_along, _along)),
    "aten.unbind": of_first(_along, _without),
    "aten.diagonal": of_first(_square, _diagonal),
    "aten.unfold": of_first(partial(_along, name="dimension"), _windows),
    "aten.cat": _cat,
    "aten.stack": _stack,
    "aten.constant_pad_nd": _pad,
    "aten.repeat": dims_rule(_repeated, (0,)),
    "aten.slice_backward": into_result(_along, _along),
    "aten.select_backward": into_result(_along, _without),
    "aten.diagonal_backward": into_result(_square, _diagonal),
    "aten.unfold_backward": into_result(_along, partial(_windows, name="dim")),
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": into_result(_along, _without),
    "aten.diagonal_scatter": into_result(_square, _diagonal),
}  # fmt: skip
