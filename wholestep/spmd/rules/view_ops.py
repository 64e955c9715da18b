"""Views. Sizes among their arguments become this rank's where they are emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from wholestep.spmd.expand.calls import Call
from wholestep.spmd.expand.strategy import Build, Dims, Names, Rule, Strategy, alphabet, linear
from wholestep.spmd.placements import Shard
from wholestep.spmd.rules.pointwise import pointwise


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


def _complex(call: Call) -> Iterator[Strategy]:
    """Real and imaginary parts as a last dimension of the real side."""
    count = min(call.values[0].dim(), call.results[0].dim())
    letters = alphabet(count)

    def names(value: torch.Tensor) -> Names:
        return [*letters, None] if value.dim() > count else letters

    yield from Dims([names(call.values[0])], [names(call.results[0])]).strategies(call)


RULES: dict[str, Rule] = {
    name: linear(rule)
    for names, rule in {
        ("aten.t", "aten.transpose", "aten.permute"): _permutation,
        ("aten.expand",): pointwise,
        ("aten.view", "aten._unsafe_view", "aten.unsqueeze"): _reshape,
        ("aten.squeeze",): _squeeze,
        ("aten.view_as_real", "aten.view_as_complex"): _complex,
    }.items()
    for name in names
}
