"""Other ways to see the same elements. Sizes among the arguments become this rank's where they are emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wholestep.spmd.placements import Shard
from wholestep.spmd.sharding import Call, Dims, Names, Row, Rule, alphabet, linear_rows


def linear_view(names: Rule) -> Rule:
    """A rule for a view, which passes addends on."""

    def rule(call: Call) -> Iterator[Row]:
        yield from names(call)
        if len(call.values) == 1:
            yield from linear_rows(call, [(0,)])

    return rule


def _permutation(call: Call, order: Sequence[int]) -> Iterator[Row]:
    letters = alphabet(len(order))
    yield from Dims([letters], [[letters[i] for i in order]]).rows(call)


def _t(call: Call) -> Iterator[Row]:
    yield from _permutation(call, list(reversed(range(call.values[0].dim()))))


def _transpose(call: Call) -> Iterator[Row]:
    order = list(range(call.values[0].dim()))
    if order:
        one, two = (int(call.args[i]) % len(order) for i in (1, 2))
        order[one], order[two] = order[two], order[one]
    yield from _permutation(call, order)


def _permute(call: Call) -> Iterator[Row]:
    count = call.values[0].dim()
    yield from _permutation(call, [int(i) % count for i in call.args[1]])


def _expand(call: Call) -> Iterator[Row]:
    old, new = call.values[0], call.results[0]
    letters = alphabet(new.dim())
    skipped = new.dim() - old.dim()
    ins: Names = [a if s == w else None
                  for a, s, w in zip(letters[skipped:], old.shape, new.shape[skipped:], strict=True)]  # fmt: skip
    yield from Dims([ins], [letters]).rows(call)


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


def _reshape(call: Call) -> Iterator[Row]:
    """Dimensions that stay, or that are the first of those that are joined or taken apart."""
    old, new = call.values[0], call.results[0]
    if old.numel() == 0 or old.dtype != new.dtype:
        return
    ranks = call.line.size
    for ins, outs in groups(old.shape, new.shape):
        a, b = ins[0], outs[0]
        alone = len(ins) == len(outs) == 1
        if alone or (old.shape[a] % ranks == 0 and new.shape[b] % ranks == 0):
            yield Row((Shard(a),), (Shard(b),))


def _without(call: Call) -> Iterator[Row]:
    """`select`: one dimension goes."""
    dim = int(call.args[1]) % call.values[0].dim()
    letters = alphabet(call.values[0].dim())
    ins = [None if i == dim else a for i, a in enumerate(letters)]
    yield from Dims([ins], [[a for i, a in enumerate(letters) if i != dim]]).rows(call)


def _along(call: Call) -> Iterator[Row]:
    """`slice`, `split` and their kind work along one dimension, which is not split; all others can be."""
    dim = int(call.argument("dim", 0)) % max(call.values[0].dim(), 1)
    letters = alphabet(call.values[0].dim())
    names = [None if i == dim else a for i, a in enumerate(letters)]
    whole = call.results[0].shape == call.values[0].shape and len(call.results) == 1
    sides = letters if whole and str(call.target).startswith("aten.slice.") else names
    yield from Dims([sides], [sides] * len(call.results)).rows(call)


def _unbind(call: Call) -> Iterator[Row]:
    dim = int(call.argument("dim", 0)) % call.values[0].dim()
    letters = alphabet(call.values[0].dim())
    ins = [None if i == dim else a for i, a in enumerate(letters)]
    out = [a for i, a in enumerate(letters) if i != dim]
    yield from Dims([ins], [out] * len(call.results)).rows(call)


RULES: dict[str, Rule] = {
    name: linear_view(rule)
    for names, rule in {
        ("aten.t",): _t,
        ("aten.transpose",): _transpose,
        ("aten.permute",): _permute,
        ("aten.expand",): _expand,
        ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze"): _reshape,
        ("aten.select",): _without,
        ("aten.slice", "aten.split", "aten.split_with_sizes", "aten.narrow", "aten.chunk"): _along,
        ("aten.unbind",): _unbind,
    }.items()
    for name in names
}
