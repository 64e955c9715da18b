"""Views, slices and concatenations: any dimension along which nothing is sliced or joined can be split.

Sizes among the arguments of views become this rank's where they are emitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import (
    Build,
    Dims,
    Rule,
    Strategy,
    alphabet,
    beside,
    linear,
    linear_strategies,
)
from wholestep.spmd.placements import Partial, Shard
from wholestep.spmd.rules.pointwise import pointwise

aten = torch.ops.aten


def _permutation(call: Call) -> Iterator[Strategy]:
    """`t`, `transpose`, `permute`: where dimensions of different sizes go."""
    count = call.values[0].dim()
    probe = torch.empty([*range(2, 2 + count)], device="meta")
    order = [size - 2 for size in call.target(probe, *call.args[1:], **call.kwargs).shape]
    letters = alphabet(count)
    yield from Dims([letters], [[letters[i] for i in order]]).strategies(call)


def groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Which dimensions of one shape become which of another, as few together as can be; without those of size 1."""
    left = [i for i, size in enumerate(old) if size != 1]
    right = [i for i, size in enumerate(new) if size != 1]
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        a, b = old[ins[0]], new[outs[0]]
        while a != b:
            if a < b:
                ins.append(left.pop(0))
                a *= old[ins[-1]]
            else:
                outs.append(right.pop(0))
                b *= new[outs[-1]]
        yield ins, outs


def _reshape(call: Call) -> Iterator[Strategy]:
    """Dimensions that stay, or that are the first of those that are joined or taken apart."""
    old, new = call.values[0], call.results[0]
    if old.numel() == 0 or old.dtype != new.dtype:
        return
    ranks = call.group.size
    for ins, outs in groups(old.shape, new.shape):
        a, b = ins[0], outs[0]
        alone = len(ins) == len(outs) == 1
        if alone or (old.shape[a] % ranks == 0 and new.shape[b] % ranks == 0):
            yield Strategy((Shard(a),), (Shard(b),))


def _squeeze(call: Call) -> Iterator[Strategy]:
    """Of the dimensions that are of size 1 in the whole."""
    for row in _reshape(call):
        yield replace(row, emit=_squeeze_whole)


def _squeeze_whole(build: Build, call: Call, ins: Sequence[fx.Node]) -> list[fx.Node]:
    value = call.values[0]
    dims = call.argument("dim", range(value.dim()))
    dims = [dim % max(1, value.dim()) for dim in ([dims] if isinstance(dims, int) else dims)]
    return [build.call(torch.ops.aten.squeeze.dims, ins[0], [dim for dim in dims if value.shape[dim] == 1])]


RULES: dict[str, Rule] = {
    name: linear(rule)
    for names, rule in {
        ("aten.t", "aten.transpose", "aten.permute"): _permutation,
        ("aten.expand",): pointwise,
        ("aten.view", "aten._unsafe_view", "aten.unsqueeze"): _reshape,
        ("aten.squeeze",): _squeeze,
    }.items()
    for name in names
}


def _names(call: Call, whole: torch.Tensor, dims: Sequence[str], keeps: bool, new: int) -> tuple[list[str | None], ...]:
    """Letters for a whole tensor, and for its part: see `part_of`."""
    gone = {int(call.argument(name, 0)) % max(whole.dim(), 1) for name in dims}
    letters = [None if i in gone else a for i, a in enumerate(alphabet(whole.dim()))]
    return letters, [*[a for i, a in enumerate(letters) if keeps or i not in gone], *[None] * new]


def part_of(*dims: str, keeps: bool = True, new: int = 0) -> Rule:
    """A view of a part of the first operand.

    Args:
        dims: names of the arguments that say the dimensions along which it is one.
        keeps: whether the part has these dimensions, too.
        new: how many other ones it has at its end.
    """

    def rule(call: Call) -> Iterator[Strategy]:
        letters, part = _names(call, call.values[0], dims, keeps, new)
        yield from Dims([letters], [part] * len(call.results)).strategies(call)

    return rule


def into_whole(*dims: str, keeps: bool = True, new: int = 0) -> Rule:
    """The gradient of such a view, or such views put into another tensor; see `part_of`."""

    def rule(call: Call) -> Iterator[Strategy]:
        letters, part = _names(call, call.results[0], dims, keeps, new)
        first = [letters] if "src" in call.by_name(call.values) else []
        yield from Dims([*first, *[part] * (len(call.values) - len(first))], [letters]).strategies(call)
        yield from linear_strategies(call, [range(len(call.values))])

    return rule


# Sliced out -------------------------------------------------------------------------------------------------------


def _slice(call: Call) -> Iterator[Strategy]:
    """A slice, or one that is put into the first operand."""
    whole, part = call.values[0], (*call.values[1:], *call.results)[0]
    yield from beside(call, *([] if whole.shape == part.shape else [int(call.argument("dim", 0))]))


def _select(call: Call) -> Iterator[Strategy]:
    """Of a split dimension, the rank that has it gives it, the others zeros."""
    yield from part_of("dim", keeps=False)(call)
    if call.values[0].dtype != torch.bool:
        dim = int(call.argument("dim")) % call.values[0].dim()
        yield Strategy((Shard(dim),), (Partial(),), partial(_select_here, dim=dim))


def _select_here(build: Build, call: Call, ins: Sequence[fx.Node], *, dim: int) -> list[fx.Node]:
    """Picks the element, or the zero that is put before one: the same calls on every rank, for axes to come."""
    length, (start, stop) = call.values[0].shape[dim], build.piece(call.values[0].shape[dim])
    index = int(call.argument("index")) % length
    place = min(max(index - start, 0), max(stop - start - 1, 0))
    one = build.call(aten.slice.Tensor, ins[0], dim, place, place + 1)
    return [build.call(aten.select.int, build.pad(one, dim, 1, 0), dim, int(start <= index < stop))]


# Put together -----------------------------------------------------------------------------------------------------


def _cat(call: Call) -> Iterator[Strategy]:
    """A tensor of shape [0] may be among others of more dimensions: nothing, as the caches of models begin."""
    names, _ = _names(call, call.results[0], ["dim"], True, 0)
    ins = [names if value.dim() == len(names) else [None] for value in call.values]
    yield from Dims(ins, [names]).strategies(call)
    yield from linear_strategies(call, [range(len(call.values))])


def _pad(call: Call) -> Iterator[Strategy]:
    pads, count = call.argument("pad"), call.values[0].dim()
    padded = [count - 1 - i // 2 for i, pad in enumerate(pads) if pad]
    yield from beside(call, *padded)


def _repeat(call: Call) -> Iterator[Strategy]:
    repeats = call.argument("repeats")
    new = len(repeats) - call.values[0].dim()
    names = [a if n == 1 else None for a, n in zip(alphabet(len(repeats)), repeats, strict=True)]
    yield from Dims([names[new:]], [[*[None] * new, *names[new:]]]).strategies(call)


RULES |= {
    **dict.fromkeys(["aten.slice", "aten.narrow"], linear(_slice)),
    "aten.select": linear(_select),
    **dict.fromkeys([f"aten.{kind}split{end}" for kind in ("", "unsafe_") for end in ("", "_with_sizes")],
                    linear(part_of("dim"))),
    "aten.unbind": linear(part_of("dim", keeps=False)),
    "aten.diagonal": linear(part_of("dim1", "dim2", keeps=False, new=1)),
    "aten.unfold": linear(part_of("dimension", new=1)),
    "aten.view_as_real": linear(part_of(new=1)),
    "aten.view_as_complex": into_whole(new=1),
    "aten.cat": _cat,
    "aten.stack": into_whole("dim", keeps=False),
    "aten.constant_pad_nd": linear(_pad, when=lambda call: not call.argument("value", 0)),
    "aten.repeat": linear(_repeat),
    "aten.slice_backward": into_whole("dim"),
    "aten.select_backward": into_whole("dim", keeps=False),
    "aten.diagonal_backward": into_whole("dim1", "dim2", keeps=False, new=1),
    "aten.unfold_backward": into_whole("dim", new=1),
    "aten.slice_scatter": linear(_slice, (0, 1)),
    "aten.select_scatter": into_whole("dim", keeps=False),
    "aten.diagonal_scatter": into_whole("dim1", "dim2", keeps=False, new=1),
}  # fmt: skip
