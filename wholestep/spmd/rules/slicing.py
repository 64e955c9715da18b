"""Parts of tensors, and tensors put together of parts: by the dimensions along which nothing is cut or joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Build, Dims, Names, Row, Rule, alphabet, beside, linear_rows
from wholestep.spmd.placements import Partial, Shard

aten = torch.ops.aten


def _letters(count: int, *without: int) -> list[str | None]:
    return [None if i in {d % count for d in without} else a for i, a in enumerate(alphabet(count))]


def _dropped(names: Names, dim: int) -> list[str | None]:
    return [a for i, a in enumerate(names) if i != dim % len(names)]


# Cut out ----------------------------------------------------------------------------------------------------------


def _slice(call: Call) -> Iterator[Row]:
    """Along the split dimension too, when what is cut out is small: each rank gives what it has of it.

    Where other lines see other sizes, they may not have all of a dimension cut out, or as small a part of it.
    """
    value, result = call.values[0], call.results[0]
    dim = int(call.argument("dim", 0)) % value.dim()
    if call.line.uneven:
        yield from beside(call, dim)
    elif result.shape == value.shape:
        yield from beside(call)
    else:
        yield from beside(call, dim)
        if result.numel() * 2 <= value.numel() and value.dtype != torch.bool:
            yield Row((Shard(dim),), (Partial(),), partial(_slice_here, dim=dim))
    yield from linear_rows(call, [(0,)])


def _slice_here(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    """A cut out of the rank's piece among zeros: the same calls with sizes alike on every rank, for axes to come."""
    length, (start, stop) = call.values[0].shape[dim], build.piece(call.values[0].shape[dim])
    pads = [0, 0] * (call.values[0].dim() - 1 - dim) + [start, length - stop]
    return [build.same(call, [build.call(aten.constant_pad_nd.default, ins[0], pads)])]


def _select(call: Call) -> Iterator[Row]:
    """Of a split dimension, the rank that has it gives it, the others zeros."""
    value, dim = call.values[0], int(call.argument("dim")) % call.values[0].dim()
    names = _letters(value.dim(), dim)
    yield from Dims([names], [_dropped(names, dim)]).rows(call)
    if value.dtype != torch.bool:
        yield Row((Shard(dim),), (Partial(),), partial(_select_here, dim=dim))
    yield from linear_rows(call, [(0,)])


def _select_here(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    """Picks the element, or the zero that is put before one: the same calls on every rank, for axes to come."""
    length, (start, stop) = call.values[0].shape[dim], build.piece(call.values[0].shape[dim])
    index = int(call.argument("index")) % length
    place = min(max(index - start, 0), max(stop - start - 1, 0))
    one = build.call(aten.slice.Tensor, ins[0], dim, place, place + 1)
    two = build.call(aten.constant_pad_nd.default, one, [0, 0] * (call.values[0].dim() - 1 - dim) + [1, 0])
    return [build.call(aten.select.int, two, dim, int(start <= index < stop))]


def _split(call: Call) -> Iterator[Row]:
    yield from beside(call, int(call.argument("dim", 0)))
    yield from linear_rows(call, [(0,)])


def _unbind(call: Call) -> Iterator[Row]:
    dim = int(call.argument("dim", 0))
    names = _letters(call.values[0].dim(), dim)
    yield from Dims([names], [_dropped(names, dim)] * len(call.results)).rows(call)
    yield from linear_rows(call, [(0,)])


def _diagonal_names(call: Call, count: int) -> tuple[Names, Names]:
    dims = [int(call.argument("dim1", 0)) % count, int(call.argument("dim2", 1)) % count]
    names = _letters(count, *dims)
    return names, [*[a for i, a in enumerate(names) if i not in dims], None]


def _diagonal(call: Call) -> Iterator[Row]:
    whole, cut = _diagonal_names(call, call.values[0].dim())
    yield from Dims([whole], [cut]).rows(call)
    yield from linear_rows(call, [(0,)])


def _windows(call: Call) -> Iterator[Row]:
    """`unfold`: a dimension becomes windows, their elements last."""
    dim = int(call.argument("dimension")) % call.values[0].dim()
    names = _letters(call.values[0].dim(), dim)
    yield from Dims([names], [[*names, None]]).rows(call)
    yield from linear_rows(call, [(0,)])


# Put together -----------------------------------------------------------------------------------------------------


def _cat(call: Call) -> Iterator[Row]:
    """A tensor of shape [0] may be among others of more dimensions: nothing, as the caches of models begin."""
    count = call.results[0].dim()
    names = _letters(count, int(call.argument("dim", 0)))
    yield from Dims([names if value.dim() == count else [None] for value in call.values], [names]).rows(call)
    yield from linear_rows(call, [range(len(call.values))])


def _stack(call: Call) -> Iterator[Row]:
    names = _letters(call.results[0].dim(), int(call.argument("dim", 0)))
    yield from Dims([_dropped(names, int(call.argument("dim", 0)))] * len(call.values), [names]).rows(call)
    yield from linear_rows(call, [range(len(call.values))])


def _pad(call: Call) -> Iterator[Row]:
    pads, count = call.argument("pad"), call.values[0].dim()
    padded = [count - 1 - i // 2 for i, pad in enumerate(pads) if pad]
    if call.line.uneven:  # where other lines see other sizes, they may pad what is not padded here
        padded.append(count - len(pads) // 2)
    yield from beside(call, *padded)
    if not call.argument("value", 0):
        yield from linear_rows(call, [(0,)])


def _repeat(call: Call) -> Iterator[Row]:
    repeats = call.argument("repeats")
    new = len(repeats) - call.values[0].dim()
    names = [a if n == 1 else None for a, n in zip(alphabet(len(repeats)), repeats, strict=True)]
    yield from Dims([names[new:]], [[*[None] * new, *names[new:]]]).rows(call)
    yield from linear_rows(call, [(0,)])


# Into zeros, or into another tensor -------------------------------------------------------------------------------


def _slice_backward(call: Call) -> Iterator[Row]:
    yield from beside(call, int(call.argument("dim")))
    yield from linear_rows(call, [(0,)])


def _select_backward(call: Call) -> Iterator[Row]:
    names = _letters(call.results[0].dim(), int(call.argument("dim")))
    yield from Dims([_dropped(names, int(call.argument("dim")))], [names]).rows(call)
    yield from linear_rows(call, [(0,)])


def _diagonal_backward(call: Call) -> Iterator[Row]:
    whole, cut = _diagonal_names(call, call.results[0].dim())
    yield from Dims([cut], [whole]).rows(call)
    yield from linear_rows(call, [(0,)])


def _windows_backward(call: Call) -> Iterator[Row]:
    names = _letters(call.results[0].dim(), int(call.argument("dim")))
    yield from Dims([[*names, None]], [names]).rows(call)
    yield from linear_rows(call, [(0,)])


def _slice_scatter(call: Call) -> Iterator[Row]:
    yield from beside(call, *([] if call.values[0].shape == call.values[1].shape else [int(call.argument("dim", 0))]))
    yield from linear_rows(call, [(0, 1)])


def _select_scatter(call: Call) -> Iterator[Row]:
    names = _letters(call.results[0].dim(), int(call.argument("dim")))
    yield from Dims([names, _dropped(names, int(call.argument("dim")))], [names]).rows(call)
    yield from linear_rows(call, [(0, 1)])


def _diagonal_scatter(call: Call) -> Iterator[Row]:
    whole, cut = _diagonal_names(call, call.values[0].dim())
    yield from Dims([whole, cut], [whole]).rows(call)
    yield from linear_rows(call, [(0, 1)])


RULES: dict[str, Rule] = {
    **dict.fromkeys(["aten.slice", "aten.narrow"], _slice),
    "aten.select": _select,
    **dict.fromkeys([f"aten.{kind}split{end}" for kind in ("", "unsafe_") for end in ("", "_with_sizes")], _split),
    "aten.unbind": _unbind,
    "aten.diagonal": _diagonal,
    "aten.unfold": _windows,
    "aten.cat": _cat,
    "aten.stack": _stack,
    "aten.constant_pad_nd": _pad,
    "aten.repeat": _repeat,
    "aten.slice_backward": _slice_backward,
    "aten.select_backward": _select_backward,
    "aten.diagonal_backward": _diagonal_backward,
    "aten.unfold_backward": _windows_backward,
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": _select_scatter,
    "aten.diagonal_scatter": _diagonal_scatter,
}
