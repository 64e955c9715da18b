"""Sharding strategies: the ways in which one call can run on shards of its operands, along one mesh axis.

A rule takes a `Call`, with its values as one device has them, and gives strategies: placements of the operands, and the
placements of the results that the same call on the local operands then gives. That everything can be replicated goes
without saying. Most rules name the dimensions of operands and results by letters, as `einsum` does: a dimension that
is split in an operand is split in every other tensor with that letter; where a result lacks the letter, the local
results are addends (`Partial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from wholestep.comm.ops.rows import piece
from wholestep.ir import GETITEM, NodeInfo, info, set_info
from wholestep.spmd.expand.calls import Call, R, exchanged, with_arguments
from wholestep.spmd.expand.graph_edits import call as add_call
from wholestep.spmd.mesh import AxisGroup
from wholestep.spmd.placements import Op, Partial, Placement, Shard

collectives = torch.ops.wholestep

Names = Sequence[str | None]  # a letter for each dimension; None: cannot be split


@dataclass
class Build:
    """Adds the calls of one rank to its graph.

    Attributes:
        graph: new calls go to its insertion point.
        record: of the call of the whole step that they stand for.
        group: the ranks of the axis.
        number_of: this rank's node for a node of the whole step that gives a number.
    """

    graph: fx.Graph
    record: NodeInfo
    group: AxisGroup
    number_of: Callable[[fx.Node], fx.Node] = lambda number: number

    def same(self, call: Call, ins: Sequence[fx.Node], /, **changed: Any) -> fx.Node:
        """The call itself on local operands, some arguments exchanged by name."""
        args, kwargs = exchanged(call.args, call.kwargs, ins, self.number_of)
        args, kwargs = with_arguments(call.target, args, kwargs, **changed)
        return self.call(call.target, *args, **kwargs)

    def call(self, target: Any, *args: Any, **keywords: Any) -> fx.Node:
        """A call on nodes of this rank's graph."""
        like = self.record
        return add_call(self.graph, target, *args, phase=like.phase, keywords=keywords, seq=like.seq, where=like.where,
                        module=like.module)  # fmt: skip

    def collective(self, name: str, *args: Any, names: tuple[str, ...] = ()) -> fx.Node:
        """A collective over the axis, waited for at once; ``names`` of what is sent are for its record."""
        started = self.call(getattr(collectives, name).default, *args, self.group.name)
        set_info(started, replace(info(started), placement=names or None))
        return self.call(collectives.wait.default, started)

    def all_reduce(self, node: fx.Node, op: Op = "sum") -> fx.Node:
        """The reduction of a value over the ranks."""
        return self.collective("all_reduce", node, op)

    def shard(self, node: fx.Node, dim: int) -> fx.Node:
        """This rank's shard of a whole value."""
        start, stop = self.piece(info(node).value.shape[dim])
        return self.call(torch.ops.aten.slice.Tensor, node, dim, start, stop)

    def piece(self, length: int) -> tuple[int, int]:
        """Where this rank's piece of a dimension of the whole starts and stops."""
        return piece(length, self.group.size, self.group.rank)

    def pick(self, node: fx.Node, index: int) -> fx.Node:
        """One item of a call's results."""
        picked = self.graph.call_function(GETITEM, (node, index))
        return set_info(picked, replace(self.record, value=info(node).value[index], ends=None))

    def picks(self, node: fx.Node) -> list[fx.Node]:
        """The tensors of a call's results."""
        return [self.pick(node, i) for i, one in enumerate(info(node).value) if isinstance(one, torch.Tensor)]


Emit = Callable[[Build, Call, Sequence[fx.Node]], Sequence[fx.Node]]


@dataclass(frozen=True)
class Decomposed:
    """As a strategy's `emit`: the call comes down to others, each of which is expanded by rules of its own.

    Attributes:
        function: gives what the call gives, of the same arguments; None for torch's decomposition of the operator.
    """

    function: Callable[..., Any] | None = None

    def __call__(self, build: Build, call: Call, ins: Sequence[fx.Node]) -> Sequence[fx.Node]:
        raise AssertionError(f"{call.target} is decomposed where it is expanded")


@dataclass(frozen=True)
class Strategy:
    """One way to run a call on parts.

    Attributes:
        ins: placements of the operands.
        outs: placements of the results.
        emit: adds other calls than the same one on the local operands; takes these, gives the local results.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    emit: Emit | None = None


Rule = Callable[[Call], Iterable[Strategy]]


@dataclass(frozen=True)
class Dims:
    """The dimensions of a call by letters.

    Attributes:
        ins, outs: names for the dimensions of each operand and result.
        reduced: how results that lack a letter are reduced; a letter that is neither here nor in every result is
            not split.
        added: operands that are summands of the result: where it is reduced, they are addends.
        emit: for all rows.
    """

    ins: Sequence[Names]
    outs: Sequence[Names]
    reduced: Mapping[str, Op] = field(default_factory=dict)
    added: frozenset[int] = frozenset()
    emit: Emit | None = None

    def strategies(self, call: Call) -> Iterator[Strategy]:
        """One strategy for each letter that can be split."""
        for letter in dict.fromkeys(name for names in (*self.ins, *self.outs) for name in names if name):
            strategy = self.strategy(letter)
            if strategy is not None and _can_split(letter, self, call):
                yield strategy

    def strategy(self, letter: str) -> Strategy | None:
        """The strategy of one letter, of whatever sizes its dimensions are; None when it cannot be split."""
        ins: tuple[Placement, ...]
        ins = tuple(Shard(names.index(letter)) if letter in names else R for names in self.ins)
        if all(letter in names for names in self.outs):
            return Strategy(ins, tuple(Shard(names.index(letter)) for names in self.outs), self.emit)
        if letter not in self.reduced:
            return None
        part = Partial(self.reduced[letter])
        ins = tuple(part if i in self.added and one == R else one for i, one in enumerate(ins))
        outs = tuple(Shard(names.index(letter)) if letter in names else part for names in self.outs)
        return Strategy(ins, outs, self.emit)


def _can_split(letter: str, dims: Dims, call: Call) -> bool:
    """True when all dimensions of a letter are of one size, so that their pieces are the same."""
    sides = (*zip(dims.ins, call.values, strict=True), *zip(dims.outs, call.results, strict=True))
    return len({value.shape[names.index(letter)] for names, value in sides if letter in names}) == 1


def alphabet(count: int) -> list[str]:
    """So many letters."""
    return [chr(ord("a") + i) if i < 26 else f"a{i}" for i in range(count)]


def trailing(value: torch.Tensor, letters: Sequence[str | None], shape: Sequence[int]) -> Names:
    """Names for a tensor that is broadcast to a shape: its dimensions are the last ones, those of size 1 unnamed."""
    skipped = len(letters) - value.dim()
    return [
        letter if length == whole else None
        for letter, length, whole in zip(letters[skipped:], value.shape, shape[skipped:], strict=True)
    ]


def beside(call: Call, *dims: int) -> Iterator[Strategy]:
    """Rows that split all dimensions but some; all operands and results have these dimensions."""
    count = call.values[0].dim()
    letters: list[str | None] = [None if i in {d % count for d in dims} else a for i, a in enumerate(alphabet(count))]
    yield from Dims([letters] * len(call.values), [letters] * len(call.results)).strategies(call)


def dims_rule(names: Callable[[Call], tuple[Sequence[Names], Sequence[Names]]], *linear: tuple[int, ...]) -> Rule:
    """A rule of letters for operands and results, and of the groups of operands in which the call is linear."""

    def rule(call: Call) -> Iterator[Strategy]:
        yield from Dims(*names(call)).strategies(call)
        yield from linear_strategies(call, linear)

    return rule


def linear(rule: Rule, *groups: tuple[int, ...]) -> Rule:
    """A rule's strategies, and those that pass addends on: for what is linear in groups of operands, or the first."""

    def both(call: Call) -> Iterator[Strategy]:
        yield from rule(call)
        yield from linear_strategies(call, [group for group in groups or [(0,)] if max(group) < len(call.values)])

    return both


def linear_strategies(call: Call, groups: Iterable[Sequence[int]]) -> Iterator[Strategy]:
    """Rows in which some operands together are addends, the others whole: what is linear in those operands."""
    outs = tuple(Partial() for _ in call.results)
    if not all(_is_real(value) for value in call.results):
        return
    for group in groups:
        if all(_is_real(call.values[i]) for i in group):
            yield Strategy(tuple(Partial() if i in group else R for i in range(len(call.values))), outs)


def _is_real(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
